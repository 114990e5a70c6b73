"""One-line replacements for Hydra's errors, with suggestions."""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from gpusim_rl.errors import ConfigError, closest, did_you_mean, first_line
from gpusim_rl.files import paths
from gpusim_rl.files.safe_open import yaml_error
from gpusim_rl.settings.checks import known_keys, unknown_key
from gpusim_rl.settings.discover import default_choice, read_yaml, tasks
from gpusim_rl.settings.overrides import is_open, is_override, key_of, last_value, value_of
from gpusim_rl.settings.saved_run import SavedRun
from gpusim_rl.settings.schema import ALGORITHMS, TASK_DEFAULTS

HYDRA_ERRORS = (HydraException, OmegaConfBaseException, YAMLError, ValueError, RecursionError, OSError)
GROUPS = ("task", "recipe", "algo", "sim", "actors", "log", "debug")
LONGEST_NAME = 200  # [bytes]; file names are limited to 255


def check_flags(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse Hydra's flags; for an unknown flag, raise ConfigError with the syntax of settings."""

    def refuse(message: str) -> NoReturn:
        bad = re.match(r"unrecognized arguments: (\S+)", message)
        name = bad.group(1).lstrip("-").partition("=")[0].replace("-", "_") if bad else ""
        key = closest(name, known_keys()) or "num_envs"
        raise ConfigError(message, hint=f"Settings are written without dashes: {key}=<value>; see --help")

    parser: argparse.ArgumentParser = get_args_parser()
    parser.error = refuse  # type: ignore[method-assign]
    return parser.parse_args(list(arguments))


def refuse_unreadable(overrides: Sequence[str], typed: Sequence[str] = ()) -> None:
    """Raise ConfigError for an override that Hydra misreads; `typed`: all overrides as typed."""
    for text in overrides:
        if is_override(text) and value_of(text).strip() == "???":  # Hydra would read None
            raise ConfigError("expected a value, got ???", key=key_of(text))
        try:
            [override] = OverridesParser.create().parse_overrides([text])
            value = override.value()
        except (HydraException, AssertionError, RecursionError, ValueError):  # e.g. deep lists, long numbers
            raise _unreadable(text, typed or overrides) from None
        if not override.key_or_group:
            raise _unreadable(text, typed or overrides)
        one_group = override.key_or_group in GROUPS and not override.is_delete() and not override.is_sweep_override()
        for name in (value if isinstance(value, list) else [value]) if one_group else ():
            if not isinstance(name, str) or len(os.fsencode(name)) > LONGEST_NAME:
                raise ConfigError("expected a name, e.g. task=Cartpole", key=text, hint="See --help")


def _unreadable(text: str, overrides: Sequence[str] = ()) -> ConfigError:
    problem = f"cannot read {text!r}"
    if any(other != text and other.count("[") > other.count("]") for other in overrides):  # the shell split a list
        return ConfigError(f"{problem}: remove the spaces from the list, or quote it")
    joined = re.sub("\0?=\0?", "=", "\0".join(overrides)).split("\0")
    if words := [word for word in joined if word not in overrides and re.fullmatch("[^=]+=[^=]+", word)]:
        return ConfigError(f"{problem}: remove the spaces around =", hint=f"Try {shlex.quote(words[0])}")
    task = closest(text, tasks())
    hint = f"Did you mean 'task={task}'?" if task else "Try num_envs=64"
    return ConfigError(f"{problem}: expected key=value", hint=hint)


def refuse_misplaced(config: Mapping[str, Any], arguments: Sequence[str], config_dir: Path | None) -> None:
    """Raise ConfigError if a yaml lacks `# @package _global_`, so that Hydra nested it."""
    for group in ("algo", "task"):
        if isinstance(section_of(config, group).get(group), Mapping):
            problem = _problem(arguments, config_dir) if group == "task" else ""
            nested = f"the {group} yaml is nested as {group}.{group}. Its first line must be '# @package _global_'"
            raise ConfigError(problem or nested)


def refuse_other_task(config: Mapping[str, Any], saved: SavedRun | None) -> None:
    """Raise ConfigError if the checkpoint's task is not the requested one."""
    if saved is None:
        return
    trained, asked = (section_of(settings, "task").get("_target_") for settings in (saved.settings, config))
    if trained != asked:
        problem = f"checkpoint of another task: {saved.place} trained {trained}, but {asked} is requested"
        raise ConfigError(problem, hint="Try without task=")


def refuse_other_algorithm(config: Mapping[str, Any], overrides: Sequence[str]) -> None:
    """Raise ConfigError for a setting of an algorithm that is not selected."""
    chosen = config["algo"]["name"]
    for text in overrides:
        section = key_of(text).partition(".")[0]
        if section in ALGORITHMS and section != chosen:
            raise _no_effect(key_of(text), chosen)


def _no_effect(key: str, chosen: str) -> ConfigError:
    hint = f"Try algo={key.partition('.')[0]}, or {chosen}.<key>=<value>"
    return ConfigError(f"{key} has no effect with algo={chosen}", hint=hint)


def explain(
    error: Exception, arguments: Sequence[str], saved: SavedRun | None = None, config_dir: Path | None = None
) -> ConfigError:
    """Convert a Hydra error to ConfigError; re-raise other errors unless overrides of Hydra's settings caused them."""
    if isinstance(error, ConfigError):
        return error
    if not isinstance(error, HYDRA_ERRORS):
        if words := " ".join(text for text in arguments if re.match("hydra[./]", key_of(text))):
            return ConfigError(f"Hydra cannot use {words}: {first_line(error)}")
        raise error
    if isinstance(error, YAMLError):
        return yaml_error(error)
    if isinstance(error, RecursionError):
        itself = f"a yaml in {config_dir or paths.cfg_dir()} includes itself in its defaults"
        return ConfigError(_problem(arguments, config_dir) or itself)
    text = str(error).strip()
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options is not None:
        group, _, name = error.missing_cfg_file.rpartition("/")
        return unknown_choice(group, name, list(error.options), config_dir)
    if isinstance(error, OverrideParseException):
        return _unreadable(error.override)
    if match := re.search(r"Could not (?:override|delete) '([^'=]+)|config group '(.+)' does not", text):
        key = match.group(1) or match.group(2)
        section = key.partition(".")[0]
        chosen = last_value(arguments, "algo", "algo.name")
        if chosen is None:
            chosen = str(section_of(saved.settings, "algo").get("name")) if saved else default_choice("algo")
        if chosen != section and section in ALGORITHMS:
            return _no_effect(key, chosen)
        return unknown_key(key, _all_keys(arguments, saved))
    if match := re.search(r"already at '(.+)'|Multiple values for ([\w/]+)", text):
        key = match.group(1) or match.group(2)
        value = last_value(arguments, key) or "<value>"
        return ConfigError(f"{key!r} already has a value", hint=f"Try {key}={value} without +")
    if match := re.search(r"Ambiguous value for argument '(.+)'|Sweep parameters '(.+)' requires", first_line(error)):
        problem = "several values require -m (one run per value); write a list as [a,b]"
        return ConfigError(problem, key=match.group(1) or match.group(2))
    return ConfigError(": ".join(first_line(reason) for reason in (error, error.__cause__) if reason is not None))


def unknown_choice(
    group: str, name: str, options: Sequence[str], config_dir: Path | None, otherwise: str = ""
) -> ConfigError:
    """Build the error for an unknown yaml; `otherwise` is the hint if no name is similar."""
    hint = did_you_mean(name, options)
    if config_dir is not None:
        folder = paths.from_here(config_dir.resolve())
        misplaced = folder / f"{name}.yaml"
        looked = f"{hint} Looked in {folder / group}/ and gpusim_rl's cfg/."
        hint = f"Move {misplaced} to {folder / group}/." if misplaced.is_file() else looked
    elif not hint and group in ("task", "algo"):
        hint = otherwise or f"Try -cd <folder that contains {group}/{name}.yaml>."
    return ConfigError(f"unknown {group} {name!r}", hint=f"{hint} Available: {', '.join(options)}")


def section_of(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section of settings, or an empty mapping."""
    section = settings.get(name)
    return section if isinstance(section, Mapping) else {}


def _all_keys(arguments: Sequence[str], saved: SavedRun | None) -> list[str]:
    if saved is not None:
        sections = [section_of(saved.settings, "task")]
    else:
        entries = tasks(get_args_parser().parse_known_args(list(arguments))[0].config_dir, outside=True)
        entry = entries.get(task_of(arguments))
        sections = [section_of(read_yaml(entry.file), "task")] if entry is not None and not entry.problem else []
    keys = {f"task.{key}": None for section in [*sections, TASK_DEFAULTS] for key in section if key != "_target_"}
    made = [key_of(text) for text in arguments if text.startswith("++") and not is_open(key_of(text))]
    algo = last_value(arguments, "algo")
    known = sorted(known_keys(), key=lambda key: not key.startswith(f"{algo}."))  # the chosen algorithm first
    return [*known, *keys, *made]


def _problem(arguments: Sequence[str], config_dir: Path | None) -> str:
    entry = tasks(config_dir, outside=True).get(task_of(arguments))
    return entry.problem if entry is not None else ""


def task_of(arguments: Sequence[str]) -> str:
    """Return the task that a command line names, or the default."""
    name = last_value(arguments, "task")
    return default_choice("task") if name is None else name
