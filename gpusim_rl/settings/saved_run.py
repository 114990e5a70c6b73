"""Settings and command line of the run that `checkpoint=` names, read as data. Does not import Hydra."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpusim_rl.errors import ConfigError, warn
from gpusim_rl.files import paths
from gpusim_rl.files.paths import Checkpoint
from gpusim_rl.files.safe_open import check_plain, load_yaml, read_intact
from gpusim_rl.settings.discover import cfg_dirs, default_choice, recipes, tasks
from gpusim_rl.settings.overrides import is_override, key_of, keys_in, last_value, quote, text_of, value_of
from gpusim_rl.settings.trust import ENV_ID, Named, check_saved_settings, is_per_call, machine_overrides, place_of

KEY, NAME = re.compile(r"\w[\w.-]*", re.ASCII), re.compile(r"\w[\w-]*", re.ASCII)
"""Keys and yaml names that a shell and Hydra accept unquoted."""
NUMBER = re.compile(r"[0-9]+(\.[0-9]*)?(e-?[0-9]{1,3})?", re.ASCII)
NO_YAML = "~task"  # first override of a run without a task yaml; `++task.<key>=<value>` overrides follow


@dataclass(frozen=True)
class SavedRun:
    """Run that `checkpoint=` names; its settings are data, never parsed as a command line."""

    checkpoint: Checkpoint
    settings: dict[str, Any]
    overrides: list[str]  # recorded command line

    @property
    def place(self) -> Path:
        """Run folder, or the checkpoint file if it is not in a run folder."""
        return self.checkpoint.run_dir or self.checkpoint.file

    def with_overrides(self, typed: Sequence[str]) -> list[str]:
        """Return the recorded command line updated with typed overrides."""
        replaced = {key_of(text) for text in typed}
        kept = (text for text in self.overrides if not is_per_call(key_of(text)) and key_of(text) not in replaced)
        return [*kept, *typed]


def continue_run(
    arguments: Sequence[str], config_dir: str | Path | None, named: Sequence[Named] = ()
) -> tuple[list[str], SavedRun | None]:
    """Return arguments that do not repeat the run of `checkpoint=`, and that run (or None), or raise ConfigError."""
    typed = {key_of(text): value_of(text) for text in arguments if is_override(text)}
    name = typed.get("checkpoint", "null")
    if name == "null":
        return list(arguments), None
    if not name:
        raise ConfigError(key="checkpoint", expected="a run folder, a .pt file or a trained task", got=name)
    checkpoint = paths.find_checkpoint(name, typed.get("log.dir", "runs"))
    if checkpoint.continues and checkpoint.run_dir is not None and "log.dir" in typed:
        folder = Path(typed["log.dir"]).resolve()
        if folder not in checkpoint.run_dir.resolve().parents:
            warn(f"ignoring log.dir={folder}: the run continues in {checkpoint.run_dir}")
    code = {key: value for key, value in typed.items() if key == ENV_ID or key.endswith("_target_")}
    named = [*named, *((place_of(key), value) for key, value in code.items())]
    trust = typed.get("trust", "").lower() == "true"
    overrides = read_overrides(checkpoint)
    settings, left_out = _read_settings(checkpoint, trust=trust, config_dir=config_dir, named=named)
    saved = SavedRun(checkpoint, settings, overrides)
    _warn_left_out(saved, left_out, typed)
    trained = settings["algo"].get("name")
    asked = typed.get("recipe", "auto")
    recipe = settings["recipe"] = settings["recipe"] or (asked if asked != "auto" else None)  # older runs have none
    if asked not in ("auto", recipe):
        problem = f"checkpoint of another recipe: {saved.place} used {recipe}, but {asked} is requested"
        raise ConfigError(problem, hint="Try without recipe=")
    repeated = {NO_YAML, f"recipe={asked}", f"algo={last_value(overrides, 'algo') or trained}"}
    task = last_value(overrides, "task") or default_choice("task")
    entry = tasks(config_dir, outside=True).get(task)
    if entry is not None and entry.target == settings["task"].get("_target_"):  # the record may be untrusted
        repeated.add(f"task={task}")
    # A folder continues in place, whereas a file may start a new run: keep the distinction.
    place = checkpoint.file if name.endswith(".pt") else saved.place
    kept = [text for text in arguments if text not in repeated]
    kept = [f"checkpoint={quote(str(place))}" if key_of(text) == "checkpoint" else text for text in kept]
    if {value_of(text) for text in kept if key_of(text) in ("algo", "algo.name")} - {trained}:
        for key in ("algo", trained):  # settings of another algorithm
            settings.pop(key, None)
    return kept, saved


def _warn_left_out(saved: SavedRun, words: Sequence[str], typed: Mapping[str, str]) -> None:
    """Warn about machine settings that a resume does not restore, such as actors."""
    known = {*typed, *["actors"] * ("actors.engine" in typed), *["log.dir"] * saved.checkpoint.continues}
    words = [word for word in words if key_of(word) not in known]
    if typed.get("actors") == "none":
        words = [word for word in words if not word.startswith(("actors", "num_actors"))]
    if words and typed.get("test", "").lower() != "true":  # an evaluation needs none of them
        warn(f"machine settings of {saved.place} are not restored: {shlex.join(words)}. Pass them again to keep them")


def _read_settings(
    checkpoint: Checkpoint, *, trust: bool, config_dir: str | Path | None, named: Sequence[Named]
) -> tuple[dict[str, Any], list[str]]:
    """Return settings from config.yaml, else from the checkpoint, and overrides that would restore machine settings."""
    file = checkpoint.file if checkpoint.run_dir is None else checkpoint.run_dir / "config.yaml"
    content = None if checkpoint.run_dir is None else read_intact(file)
    if content is not None:
        settings = load_yaml(file, content)
    else:
        settings = _in_checkpoint(checkpoint, "config")
        if checkpoint.run_dir is not None:
            warn(f"{file} {_damage(file)}: using the settings in {checkpoint.file}. Change them with <key>=<value>")
        file = checkpoint.file
    checked = check_saved_settings(settings, file, trust=trust, config_dir=config_dir, named=named)
    return checked, machine_overrides(settings)


def read_overrides(checkpoint: Checkpoint) -> list[str]:
    """Read the recorded command line, empty if missing; raise ConfigError unless it holds plain overrides."""
    if checkpoint.run_dir is None:
        file, overrides = checkpoint.file, _in_checkpoint(checkpoint, "overrides")
        check_plain(overrides, file)
    else:
        file = checkpoint.run_dir / "overrides.yaml"
        content = read_intact(file)
        if content is None:
            warn(f"{file} {_damage(file)}: the record of the run's command line is lost")
            return []
        overrides = load_yaml(file, content)
    check_record(overrides, file)
    return overrides


def check_record(overrides: Any, file: Path) -> None:
    """Raise ConfigError unless a recorded command line consists of plain overrides."""
    if not isinstance(overrides, list) or not all(isinstance(text, str) for text in overrides):
        raise ConfigError(f"expected a list of key=value strings, got {type(overrides).__name__}", key=str(file))
    for text in overrides:
        key = key_of(text).partition("/")[0].partition(".")[0]
        if not (is_override(text) or text.startswith("~")) or key == "hydra":
            raise ConfigError(key=str(file), expected="settings, not flags or Hydra's own keys", got=text)


def repeating_words(
    overrides: Sequence[str], settings: Mapping[str, Any], where: Path, config_dir: str | Path | None = None
) -> list[str]:
    """Return a command line that repeats a run, with keys from the record and values from the settings in `where`.

    Users paste the command line, and the run's files may be untrusted: it has only values that a resume accepts.
    """
    check_record(overrides, where.with_name("overrides.yaml"))
    settings = check_saved_settings(settings, where, config_dir=config_dir)
    words = {}
    for text in overrides:
        key, value = key_of(text), value_of(text)
        if is_per_call(key) or key == "recipe":
            continue
        if not KEY.fullmatch(key) or text.startswith("~"):
            raise ConfigError(f"the recorded command line sets {text!r}, which contains characters that need quoting")
        choices = (folder / key / f"{value}.yaml" for _, folder in cfg_dirs(config_dir))
        if NAME.fullmatch(value) is not None and any(file.is_file() for file in choices):
            words[key] = f"{key}={value}"
            continue
        node: Any = settings
        for name in key.split("."):
            if not isinstance(node, dict) or name not in node:
                raise ConfigError(f"missing {key}, which the recorded command line sets", key=str(where))
            node = node[name]
        if not all(KEY.fullmatch(name) for name in keys_in(node)):
            raise ConfigError(f"{key} contains keys that need quoting", key=str(where))
        same = type(node) in (int, float) and NUMBER.fullmatch(value) and float(value) == node
        words[key] = f"{'++' * text.startswith('+')}{key}={value if same else text_of(node)}"
    task = last_value(overrides, "task") or default_choice("task")
    entry = tasks(config_dir, outside=True).get(task)
    if entry is None or entry.target != settings["task"].get("_target_"):
        raise ConfigError(f"the task differs from task={task} in the recorded command line", key=str(where))
    names = recipes(task, config_dir)
    if len(names) > 1 and settings["recipe"] in names:
        words["recipe"] = f"recipe={settings['recipe']}"
    folder = [] if config_dir is None or task in tasks(outside=True) else ["-cd", str(config_dir)]
    return [*folder, *words.values()]


def _damage(file: Path) -> str:
    return "was changed or damaged" if file.exists() else "is missing"


def _in_checkpoint(checkpoint: Checkpoint, key: str) -> Any:
    from gpusim_rl.files.checkpoint_file import load  # torch

    state = load(checkpoint.file)
    if key not in state:
        raise ConfigError(f"not a training checkpoint: missing {key}", key=str(checkpoint.file))
    return state[key]
