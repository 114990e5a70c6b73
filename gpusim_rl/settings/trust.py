"""Trust in run folders: which settings are restored and which code may be loaded. Does not import torch."""

from __future__ import annotations

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
from gpusim_rl.settings.schema import MACHINE_SETTINGS, PER_CALL_SETTINGS

FORBIDDEN = ("hydra", "defaults")  # Hydra keys through which settings could run code
LEADS_ELSEWHERE = re.compile(r"[/:\\~]|\.\.")  # path, address, or `module:Env-v0` in env arguments

TRUST = "If you trust the run, try trust=true (tools: --trust)"
ENV_ID = "env.id"  # setting whose `module:` part Gymnasium imports

Named = tuple[str, str]  # kind of code (see `place_of`) and its import path


def check_saved_settings(
    settings: Any,
    where: Path,
    *,
    trust: bool = False,
    config_dir: str | Path | None = None,
    named: Collection[Named] = (),
) -> dict[str, Any]:
    """Return upgraded saved settings, with per-call and machine settings reset to defaults, or raise ConfigError.

    Unless `trust`, code must be named by its exact path: in `named`, our yamls, an installed package or `config_dir`.
    """
    check_plain(settings, where)
    if not isinstance(settings, dict) or not all(isinstance(settings.get(key), dict) for key in ("task", "algo")):
        raise ConfigError("expected the settings of a run, with the sections `task` and `algo`", key=str(where))
    for key in settings:
        if str(key).partition("/")[0] in FORBIDDEN:
            raise ConfigError(f"key {key!r} is not allowed in run settings", key=str(where), hint="Try removing it")
    settings = copy.deepcopy(settings)
    upgrade_settings(settings)
    for key, value in [] if trust else untrusted_values(settings, config_dir, named):
        if "_target_" in key.split(".") or key == ENV_ID:
            problem = f"{key}={value} would run code that is not named in a yaml of gpusim_rl or an installed package"
            raise ConfigError(problem, key=str(where), hint=f"{TRUST}, or -cd <folder that contains its yaml>")
        raise ConfigError(f"{key}={value!r} may point outside the run folder", key=str(where), hint=TRUST)
    for _, node, leaf, default in _class_sections(settings, PER_CALL_SETTINGS + MACHINE_SETTINGS):
        node[leaf] = default
    return settings


def untrusted_values(
    settings: Any, config_dir: str | Path | None = None, named: Collection[Named] = ()
) -> list[tuple[str, str]]:
    """Return keys and values that need trust: unnamed code, and arguments that may point outside the run folder.

    For a function that makes envs, a package's yaml is not enough, as settings choose its arguments.
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
    return strange + [(key, text) for key, text in leaves if isinstance(text, str) and LEADS_ELSEWHERE.search(text)]


def place_of(key: str) -> str:
    """Return the kind of class that a `_target_` key names (task, algo, network, extension or env), or ""."""
    section, _, rest = key.removesuffix("._target_").partition(".")
    networks = "network", "network.encoder"
    if re.fullmatch(r"extensions\.\w+", rest):
        return "extension"
    return "network" if rest in networks else section if not rest and section in ("task", "algo", "env") else ""


def _is_named(code: Named, config_dir: str | Path | None) -> bool:
    folders = [] if config_dir is None else [check_config_dir(config_dir)]
    folders += [] if code[0] == "env" else [folder for _, folder in cfg_dirs()]
    files = (file for folder in folders for group in ("algo", "task") for file in (folder / group).glob("*.yaml"))
    # Parsing is slow, so search the text first.
    near = (file for file in files if code[1] in file.read_text(encoding="utf-8", errors="replace"))
    return any(code == (place_of(key), target) for file in near for key, target in class_paths(read_yaml(file)))


def machine_overrides(settings: Mapping[str, Any]) -> list[str]:
    """Return overrides that restore a run's machine settings."""
    words = []
    for key, node, leaf, default in _class_sections(settings, MACHINE_SETTINGS):
        value = node.get(leaf, default)
        if value != default and isinstance(value, dict) and isinstance(default, dict):
            changed = {name: item for name, item in value.items() if item != default.get(name)}
            words += [f"{key}={text_of(changed.pop('engine'))}"] if "engine" in changed else []  # a yaml of the group
            words += [f"{key}.{name}={text_of(item)}" for name, item in changed.items()]
        elif value != default:
            words.append(f"{key}={text_of(value)}")
    return words


def is_per_call(key: str) -> bool:
    """Return whether a setting is never restored from a run folder."""
    return any(fnmatchcase(f"{key}.", f"{setting}.*") for setting in PER_CALL_SETTINGS + MACHINE_SETTINGS)


def _class_sections(settings: Mapping[str, Any], keys: Sequence[str]) -> Iterator[tuple[str, dict[str, Any], str, Any]]:
    """Yield key, section, name and default of each setting in `keys`, which may contain `*`."""
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
    """Yield key and value of nested settings; list items share their list's key."""
    if isinstance(node, dict):
        for name, value in node.items():
            yield from _leaves(value, f"{key}.{name}" if key else str(name))
    elif isinstance(node, (list, tuple)):
        for item in node:
            yield from _leaves(item, key)
    else:
        yield key, node


def refuse_classes_of_script(settings: Any) -> None:
    """Raise ConfigError for classes of `__main__`, which another process cannot import."""
    for key, target in class_paths(settings):
        if target.startswith("__main__."):
            raise ConfigError("defined in a script, not a module", key=f"{key}={target}", hint="Try a separate module")


def class_paths(settings: Any) -> Iterator[tuple[str, str]]:
    """Yield key and value of every nested `_target_`."""
    for key, value in _leaves(settings, ""):
        if value is not None and "_target_" in key.split("."):
            yield key, str(value)
