"""Reader for IsaacGymEnvs' settings, source code and assets; nothing is executed."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpusim_rl.connect.task_text import is_field, number
from gpusim_rl.errors import ConfigError
from gpusim_rl.files.safe_open import check_events, read_bytes
from gpusim_rl.settings.checks import OTHERS, known_keys

# Sections of PPO settings: IsaacGymEnvs' name to ours.
PLACES = {"config": "", "config.reward_shaper": "", "network": "network.", "network.mlp": "network."}
RENAMED = {
    "config.mixed_precision": "precision",
    "config.seq_length": "sequence_length",  # rl_games 1.1 calls it seq_len
    "network.rnn.name": "network.rnn",
    "network.rnn.units": "network.rnn_size",
    "network.rnn.layers": "network.rnn_layers",
    "network.space.continuous.fixed_sigma": "network.state_dependent_std",
    "network.space.continuous.sigma_init.val": "network.log_std_init",
}
WORDS = {"identity": "constant", "fixed": "constant", "None": "none", "swish": "silu"}  # renamed values
WORDS |= {"legacy": "minibatch", "standard": "epoch"}
SILENT = {"seed", "load_checkpoint", "load_path", "algo.name", "model.name", "network.name"}
SILENT |= {f"config.{name}" for name in ("name", "full_experiment_name", "env_name", "multi_gpu", "ppo", "num_actors")}
SILENT |= {f"config.{name}" for name in ("max_epochs", "truncate_grads", "save_frequency", "value_bootstrap")}
SILENT |= {"network.space.continuous.sigma_init.name"}
"""PPO settings not reported as ignored: run settings, settings fixed here, and settings read by name."""
COMMON = {
    "num_envs": ("num_envs",),
    "episode_length": ("episode_length", "max_episode_length", "rl.max_episode_length"),
    "clip_actions": ("clip_actions",),
    "clip_observations": ("clip_observations",),
}
"""Settings common to all tasks, and their paths in IsaacGymEnvs."""
DECIMATION = ("control_frequency_inv", "control.control_frequency_inv", "control.decimation", "control_decimation")
SECONDS = ("episode_length_s", "learn.episode_length_s", "reset_time")
RATES = (*DECIMATION, *SECONDS, *(path for places in COMMON.values() for path in places))
SECTIONS = {"name", "physics_engine", "env", "sim", "task", "defaults", "viewer"}
NO_FIELDS = {"env_spacing", "num_observations", "num_actions", "enable_debug_vis", "enable_camera_sensors"}
NO_FIELDS |= {"default_joint_angles", "asset", "urdf_asset", "viewer", *RATES}  # read by name
LARGEST = 1e9  # maximum magnitude of a number
MAX_YAMLS = 50  # maximum number of yamls in a task's defaults
MAX_CODE = 500  # maximum number of Python files searched; IsaacGymEnvs has 80
CLASS = re.compile(r"^class (\w+) ?(?:\(([^()]*)\))? ?:", re.MULTILINE)
ASSET = r"""["']([\w./-]+\.(?:urdf|xml))["']"""


def read_settings(file: Path, depth: int = 0, read: list[Path] | None = None) -> dict[str, Any]:
    """Return a yaml's settings, merged with the yamls in its `defaults`; `${resolve_default:4096,...}` becomes 4096.

    Args:
        file: The yaml.
        depth: Nesting depth of `defaults`.
        read: Files read so far; extended in place.

    Raises:
        ConfigError: A file cannot be read, or is not plain yaml (aliases, tags, too many values).
    """
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    def resolved(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(key): resolved(item) for key, item in value.items()}
        default = re.match(r"\$\{resolve_default:\s*([^,}]{1,100})", value) if isinstance(value, str) else None
        return yaml.safe_load(default[1]) if default else value

    read = [] if read is None else read
    read.append(file)
    if len(read) > MAX_YAMLS:
        raise ConfigError(f"the defaults include more than {MAX_YAMLS} files", key=str(read[0]))
    try:
        text = read_bytes(file.resolve())
        check_events(text, file)
        content = resolved(OmegaConf.to_container(OmegaConf.create(text.decode())))
    except ConfigError:
        raise
    except (OSError, ValueError, AssertionError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"cannot read {file}: {' '.join(str(error).split())}") from None
    content, merged = content if isinstance(content, dict) else {}, dict[str, Any]()
    defaults = content.pop("defaults", None)
    defaults = defaults if isinstance(defaults, list) else []
    for entry in defaults if "_self_" in defaults else [*defaults, "_self_"]:
        group, name = next(iter(entry.items()), ("", "")) if isinstance(entry, dict) else ("", entry)
        other = file.parent / str(group) / f"{name}.yaml"
        if name == "_self_":
            merged = merge(merged, content)
        elif all(re.fullmatch(r"\w*", str(word)) for word in (group, name)) and depth < 5 and other.is_file():
            base = read_settings(other, depth + 1, read)
            merged = merge(merged, {group: base} if group else base)
    return merged


def merge(one: dict[str, Any], two: dict[str, Any]) -> dict[str, Any]:
    """Merge nested settings; `two` overrides `one`."""
    nested = [key for key in two if isinstance(one.get(key), dict) and isinstance(two[key], dict)]
    return one | two | {key: merge(one[key], two[key]) for key in nested}


def section(values: Any, key: str) -> dict[str, Any]:
    """Return a section of nested settings, or an empty dict."""
    found = values.get(key) if isinstance(values, dict) else None
    return found if isinstance(found, dict) else {}


def look_up(values: Any, path: str) -> Any:
    """Return the value at a path such as `config.gamma`, or None."""
    for key in path.split("."):
        values = values.get(key) if isinstance(values, dict) else None
    return values


def is_number(value: Any) -> bool:
    """Return whether a value is a number of magnitude below `LARGEST`."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST


def without_references(value: Any, path: str, ignored: list[str]) -> Any:
    """Return plain data without `${...}` references and Hydra's special keys; append removed paths to `ignored`."""
    if isinstance(value, dict):
        kept = {key: without_references(item, f"{path}.{key}", ignored) for key, item in value.items()}
        odd = [key for key in kept if key.startswith("_") or "${" in key]  # special keys in Hydra
        ignored += [f"{path}.{key}" for key in odd]
        return {key: item for key, item in kept.items() if item is not None and key not in odd}
    if isinstance(value, list):
        items = [without_references(item, path, ignored) for item in value]
        return None if None in items else items
    if is_number(value) or isinstance(value, bool) or (isinstance(value, str) and "${" not in value):
        return value
    ignored += [path] if value is not None else []
    return None


def is_new_field(name: str) -> bool:
    """Return whether a key can name a new field, distinct from the settings common to all tasks."""
    from gpusim_rl.env import TaskConfig

    return is_field(name) and not hasattr(TaskConfig, name)


def snake_keys(values: dict[str, Any]) -> dict[str, Any]:
    """Convert the keys of nested settings to snake_case, except joint names."""
    return {
        name: snake_keys(value) if isinstance(value, dict) and name != "default_joint_angles" else value
        for key, value in values.items()
        for name in [snake_case(key) if key.isidentifier() else key]
    }


def snake_case(name: str) -> str:
    """Convert `jointVelScale` to joint_vel_scale."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def camel_case(name: str) -> str:
    """Convert `joint_vel_scale` to `jointVelScale`."""
    return re.sub(r"_(\w)", lambda match: match[1].upper(), name)


def read_rates(env: dict[str, Any], physics: dict[str, Any], file: str) -> dict[str, Any]:
    """Return the settings common to all tasks, removing nested ones from `env`; all must be positive."""

    def positive(values: dict[str, Any], path: str) -> float | int:
        value = look_up(values, path)
        if not is_number(value) or not 1e-6 < value < LARGEST:
            raise ConfigError(key=f"{file}: {path}", expected="a positive number", got=value)
        return value

    def given(places: tuple[str, ...]) -> list[str]:
        return [path for path in places if look_up(env, path) is not None]

    rate = max(1, round(1 / positive({"dt": 1 / 60} | physics, "dt")))  # IsaacGymEnvs rounds 1/60 s to 0.0166
    common: dict[str, Any] = {"physics_hz": rate * round(positive({"substeps": 1} | physics, "substeps"))}
    inverse = [positive(env, path) for path in given(DECIMATION)]
    common["control_hz"] = number(rate / max(1, round((inverse or [1])[0])))
    common |= {key: positive(env, found[0]) for key, places in COMMON.items() if (found := given(places))}
    for path in given(SECONDS):
        value = look_up(env, path)
        if not (path == "reset_time" and is_number(value) and value <= 0):  # IsaacGymEnvs' default is -1
            common["episode_length"] = positive(env, path) * common["control_hz"]
    for above, _, leaf in (path.rpartition(".") for path in RATES):
        section(env, above).pop(leaf, None)
    return common | {key: max(1, round(common[key])) for key in ("num_envs", "episode_length") if key in common}


def ppo_key(path: str) -> str:
    """Return our key in `ppo` for an IsaacGymEnvs PPO setting; "" if there is none."""
    above, _, leaf = path.rpartition(".")
    key = RENAMED.get(path) or f"{PLACES.get(above)}{OTHERS.get(leaf, leaf)}"
    ours = (above in PLACES or path in RENAMED) and not leaf.startswith("_")  # `_target_` names a class to import
    return key if ours and f"ppo.{key}" in known_keys() else ""


def randomized_properties(params: Mapping[str, Any], way: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """Return the path and the settings of each randomised property."""
    found = []
    for key, value in params.items():
        path = (*way, key)
        nested = isinstance(value, dict) and "range" not in value
        deeper = nested and len(path) <= {"sim_params": 1, "actor_params": 3}.get(path[0], 0)
        found += randomized_properties(value, path) if deeper else [(path, value)]
    return found


def find_asset(file: Path, name: str) -> Path | None:
    """Find a file in an `assets` folder next to or above `file`; ignore links to files outside that folder."""
    with suppress(OSError, ValueError):  # not a valid file name
        leaf = Path(name).name
        for root in (folder / "assets" for folder in file.resolve().parents):
            below = sorted(Path(folder, leaf) for folder, _, names in os.walk(root) if leaf in names)
            for path in (root / name, *sorted(below, key=lambda path: not path.as_posix().endswith(f"/{name}"))):
                if path.resolve().is_relative_to(root.resolve()) and path.is_file():
                    return path.resolve()
    return None


def has_moving_joint(robot: Path) -> bool:
    """Return whether a robot file has a joint that an actuator could move; objects have none."""
    try:
        return re.search(rb"<joint\b(?![^<>]*\stype\s*=\s*[\"'](fixed|floating|free))", read_bytes(robot)) is not None
    except (OSError, ValueError):
        return True  # too large for an object


def read_code(file: Path, name: str) -> list[str]:
    """Return the text of the source files that define a task's class and its bases."""
    folder, texts = file.resolve().parents[min(2, len(file.resolve().parents) - 1)] / "tasks", dict[Path, str]()
    for path in sorted(folder.rglob("*.py"))[:MAX_CODE]:
        with suppress(OSError, ValueError):
            texts[path] = read_bytes(path).decode(errors="replace")
    classes = {match[1]: (path, match[2] or "") for path, text in texts.items() for match in CLASS.finditer(text)}
    registry = texts.get(folder / "__init__.py", "")
    entry = re.search(rf"""["']{re.escape(name)}["']\s*:\s*(\w+)""", registry)
    start = entry[1] if entry else name
    maker = re.search(rf"^def {start}\b.*?(?=^\S|\Z)", registry, re.DOTALL | re.MULTILINE) if entry else None
    way, found = re.findall(r"\w+", maker[0]) if maker else [start], list[Path]()
    if not classes.keys() & {*way}:
        found = [path for path in texts if path.stem == snake_case(name)]
    for word in way:  # bases are appended
        path, bases = classes.get(word, (None, ""))
        found += [path] if path is not None and path not in found else []
        way += [base for base in re.findall(r"\w+", bases) if base not in way]
    return [texts[path] for path in found]


def base_is_fixed(code: list[str], word: str) -> bool | None:
    """Return whether the code fixes the base of the robot called `word`; None if the code does not specify it."""
    option = re.compile(r"fix_base_link\s*=\s*(True|False)\b")
    for text in sorted(code, key=lambda text: word not in text):
        if match := option.search(text, max(0, text.find(word))) or option.search(text):
            return match[1] == "True"
    return None
