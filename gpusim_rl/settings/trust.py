"""What is taken from a run folder: settings that travel, and classes that the user has put trust in before.

Free of torch.
"""

from __future__ import annotations

import argparse
import copy
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from gpusim_rl.errors import ConfigError
from gpusim_rl.files import paths
from gpusim_rl.files.safe_open import check_plain
from gpusim_rl.settings.discover import cfg_dirs, check_config_dir, read_yaml
from gpusim_rl.settings.older_run import upgrade_settings
from gpusim_rl.settings.overrides import text_of
from gpusim_rl.settings.schema import OF_ONE_CALL, OF_THE_MACHINE

FORBIDDEN = ("hydra", "defaults")
"""Keys of Hydra's own parts: with them, settings would name code to run."""
LEADS_ELSEWHERE = re.compile(r"[/:\\~]|\.\.")
"""In arguments of envs of another library: a path, an address, or `module:Env-v0` (see `ENV_ID`)."""

ENV_ID = "env.id"
"""Setting of which Gymnasium imports the module, where it is `module:Env-v0`."""

Named = tuple[str, str]
"""Where code may stand (`place_of`), and its path."""


def check_saved_settings(
    settings: Any,
    where: Path,
    *,
    trust: bool = False,
    config_dir: str | Path | None = None,
    named: Collection[Named] = (),
) -> dict[str, Any]:
    """Return saved settings, those of a call at their defaults; stop where they name code the user has not asked for.

    Settings of an algorithm or a simulator of ours that came after the run take today's defaults. A class is taken by
    its exact path, where a yaml of ours, of an installed package or of `config_dir` names it, or this command does
    (`named`). With `trust`, all is taken.

    Raises:
        ConfigError: They are none of a run, or code would be run, which the error names.
    """
    check_plain(settings, where)
    if not isinstance(settings, dict) or not all(isinstance(settings.get(key), dict) for key in ("task", "algo")):
        raise ConfigError(f"{where}: expected the settings of a run, with the sections task and algo")
    for key in settings:
        if str(key).partition("/")[0] in FORBIDDEN:
            raise ConfigError(f"{where} has the key {key!r}: the settings of a run have none. Try removing it")
    settings = copy.deepcopy(settings)
    upgrade_settings(settings)
    for key, value in [] if trust else strange_values(settings, config_dir, named):
        if "_target_" in key.split(".") or key == ENV_ID:
            problem = "would run code that no yaml of gpusim_rl or of an installed package of tasks names"
            raise ConfigError(f"{where}: {key}={value} {problem}. If you trust it, {_advice(', or -cd <its yaml>')}")
        raise ConfigError(f"{where}: {key}={value!r} may lead out of the folder. If you trust it, {_advice()}")
    for _, node, leaf, default in _of_a_call(settings, OF_ONE_CALL + OF_THE_MACHINE):
        node[leaf] = default
    return settings


def _advice(more: str = "") -> str:
    return f"try trust=true (tools: --trust){more}"


def strange_values(
    settings: Any, config_dir: str | Path | None = None, named: Collection[Named] = ()
) -> list[tuple[str, str]]:
    """Return keys and values that need trust: code that nobody has named, and arguments of code that lead elsewhere.

    A function that makes envs gets arguments from the settings: that an installed package names it is not enough.
    """
    strange = []
    for key, target in class_paths(settings):
        code = (place_of(key), target)
        if code not in named and not (code[0] and _is_named(code, config_dir)):
            strange.append((key, target))
    sections = {name: section for name, section in settings.items() if isinstance(section, dict)}
    env = sections.get("env", {})
    if ":" in str(env.get("id")) and (place_of(ENV_ID), env["id"]) not in named:
        strange.append((ENV_ID, str(env["id"])))
    leaves = [leaf for part in ("kwargs", "cfg") for leaf in _leaves(env.get(part), f"env.{part}")]
    leaves += [leaf for name, it in sections.items() for leaf in _leaves(it.get("extensions"), f"{name}.extensions")]
    texts = [(key, text) for key, text in leaves if isinstance(text, str)]
    return [*strange, *((key, text) for key, text in texts if LEADS_ELSEWHERE.search(text))]


def place_of(key: str) -> str:
    """Return the kind of code of a `_target_`: task, algo, network, extension or env; "" where none is loaded."""
    section, _, rest = key.removesuffix("._target_").partition(".")
    networks = "network", "network.encoder"
    if re.fullmatch(r"extensions\.\w+", rest):
        return "extension"
    return "network" if rest in networks else section if not rest and section in ("task", "algo", "env") else ""


def _is_named(code: Named, config_dir: str | Path | None) -> bool:
    """Returns whether a yaml names this code for its place: the user's, ours, or an installed package's."""
    if config_dir is not None:
        check_config_dir(config_dir)
        if _names(Path(config_dir), code):
            return True
    return code[0] != "env" and any(_names(folder, code) for _, folder in cfg_dirs())


def _names(folder: Path, code: Named) -> bool:
    files = [file for group in ("algo", "task") for file in sorted((folder / group).glob("*.yaml"))]
    # To parse one takes long: most are left out by their text.
    near = [file for file in files if code[1] in file.read_text(encoding="utf-8", errors="replace")]
    return any(code == (place_of(key), target) for file in near for key, target in class_paths(read_yaml(file)))


def words_of_call(settings: Mapping[str, Any]) -> list[str]:
    """Returns the settings of the machine, if not the defaults, as they must be typed to resume the run with them."""
    words = []
    for key, node, leaf, default in _of_a_call(settings, OF_THE_MACHINE):
        value = node.get(leaf, default)
        if value != default and isinstance(value, dict) and isinstance(default, dict):
            changed = {name: item for name, item in value.items() if item != default.get(name)}
            words += [f"{key}={text_of(changed.pop('engine'))}"] if "engine" in changed else []  # the group's yaml
            words += [f"{key}.{name}={text_of(item)}" for name, item in changed.items()]
        elif value != default:
            words.append(f"{key}={text_of(value)}")
    return words


def is_per_call(key: str) -> bool:
    """Returns whether a setting does not travel with a run folder, alone or with its section."""
    return any(fnmatchcase(f"{key}.", f"{setting}.*") for setting in OF_ONE_CALL + OF_THE_MACHINE)


def _of_a_call(settings: Mapping[str, Any], keys: Sequence[str]) -> Iterator[tuple[str, dict[str, Any], str, Any]]:
    """Yields settings that do not travel: key, section, name in the section, and default."""
    cfg = paths.cfg_dir()
    groups = {"log": read_yaml(cfg / "log" / "default.yaml"), "actors": read_yaml(cfg / "actors" / "none.yaml")}
    defaults = {**read_yaml(cfg / "config.yaml"), **groups}

    def walk(node: Any, default: Any, parts: Sequence[str], above: str) -> Iterator[Any]:
        first, *rest = parts
        for name in [first] if first != "*" else [*node]:
            value = default.get(name) if isinstance(default, dict) else None
            if not rest:
                yield f"{above}{name}", node, name, value
            elif isinstance(node.get(name), dict):
                yield from walk(node[name], value, rest, f"{above}{name}.")

    for key in keys:
        yield from walk(settings, defaults, key.split("."), "")


def _leaves(node: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Yields keys and values of all that is neither section nor list in nested settings."""
    if isinstance(node, dict):
        for name, value in node.items():
            yield from _leaves(value, f"{key}.{name}" if key else str(name))
    elif isinstance(node, (list, tuple)):
        for item in node:
            yield from _leaves(item, key)
    else:
        yield key, node


def refuse_classes_of_script(settings: Any) -> None:
    """Raises ConfigError where a class is of the script that runs: another process cannot import it."""
    for key, target in class_paths(settings):
        if target.startswith("__main__."):
            raise ConfigError(f"{key}={target} is of the script itself: try a module of its own")


def class_paths(settings: Any) -> Iterator[tuple[str, str]]:
    """Yields keys and values of all `_target_` in nested settings."""
    for key, value in _leaves(settings, ""):
        if value is not None and "_target_" in key.split("."):
            yield key, str(value)


def add_trust_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a tool that say which code a run may name."""
    parser.add_argument("--trust", action="store_true", help="import the classes that the run names, whatever they are")
    parser.add_argument("-cd", "--config-dir", help="a folder with more tasks, as for train.py: their code is trusted")
