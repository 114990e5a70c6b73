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
from gpusim_rl.settings.checks import known_keys, unknown_key
from gpusim_rl.settings.discover import default_choice, task_section, tasks, yaml_error
from gpusim_rl.settings.overrides import is_open, is_override, key_of, value_of
from gpusim_rl.settings.saved_run import SavedRun
from gpusim_rl.settings.schema import ALGORITHMS, TASK_DEFAULTS

HYDRA_ERRORS = (HydraException, OmegaConfBaseException, YAMLError, ValueError, RecursionError, OSError)
GROUPS = ("task", "recipe", "algo", "sim", "actors", "log", "debug")
LONGEST_NAME = 200  # longest yaml name [bytes]; file names are limited to 255


def check_flags(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the flags; reject an unknown one with the syntax of settings."""

    def refuse(message: str) -> NoReturn:
        bad = re.match(r"unrecognized arguments: (\S+)", message)
        name = bad.group(1).lstrip("-").partition("=")[0].replace("-", "_") if bad else ""
        hint = did_you_mean(name, known_keys())
        key = re.findall(r"'(.*)'", hint)[0] if hint else "num_envs"
        raise ConfigError(f"{message}. Settings are written without dashes: {key}=<value>; see --help")

    parser: argparse.ArgumentParser = get_args_parser()
    parser.error = refuse  # type: ignore[method-assign]
    return parser.parse_args(list(arguments))


def refuse_unreadable(overrides: Sequence[str], typed: Sequence[str] = ()) -> None:
    """Raise ConfigError for an override that Hydra misreads; `typed` has the original order."""
    for text in overrides:
        if is_override(text) and value_of(text).strip() == "???":  # taken for none: a folder `None` for hydra.run.dir
            raise ConfigError(f"{key_of(text)}: expected a value, got ???")
        try:
            [override] = OverridesParser.create().parse_overrides([text])
            value = override.value()
        except (HydraException, AssertionError, RecursionError, ValueError):  # also lists too deep, numbers too long
            raise _unreadable(text, typed or overrides) from None
        if not override.key_or_group:
            raise _unreadable(text, typed or overrides)
        one_group = override.key_or_group in GROUPS and not override.is_delete() and not override.is_sweep_override()
        for name in (value if isinstance(value, list) else [value]) if one_group else ():
            if not isinstance(name, str) or len(os.fsencode(name)) > LONGEST_NAME:
                raise ConfigError(f"{text}: expected a name, e.g. task=Cartpole; see --help")


def _unreadable(text: str, overrides: Sequence[str] = ()) -> ConfigError:
    if any(other != text and other.count("[") > other.count("]") for other in overrides):  # the shell split a list
        return ConfigError(f"cannot read {text!r}: no spaces in a list, or quote it")
    together = re.sub("\0?=\0?", "=", "\0".join(overrides)).split("\0")
    if words := [word for word in together if word not in overrides and re.fullmatch("[^=]+=[^=]+", word)]:
        return ConfigError(f"cannot read {text!r}: no spaces around =. Try {shlex.quote(words[0])}")
    task = closest(text, tasks())
    advice = f"Did you mean 'task={task}'?" if task else "Try num_envs=64"
    return ConfigError(f"cannot read {text!r}: expected key=value. {advice}")


def refuse_misplaced(config: Mapping[str, Any], arguments: Sequence[str], config_dir: Path | None) -> None:
    """Raise ConfigError if a yaml lacks `# @package _global_`, so that Hydra nested it."""
    for group in ("algo", "task"):
        if isinstance(section_of(config, group).get(group), Mapping):
            problem = _problem(arguments, config_dir) if group == "task" else ""
            nested = f"the yaml of {group} has a section {group!r} below {group!r}"
            raise ConfigError(problem or f"{nested}: is its first line not '# @package _global_'?")


def refuse_other_task(config: Mapping[str, Any], saved: SavedRun | None) -> None:
    """Raise ConfigError if the checkpoint's task is not the requested one."""
    if saved is None:
        return
    trained, asked = (section_of(settings, "task").get("_target_") for settings in (saved.settings, config))
    if trained != asked:
        run = saved.checkpoint.run_dir or saved.checkpoint.file
        problem = f"checkpoint of another task: {run} trained {trained}, asked for {asked}"
        raise ConfigError(f"{problem}. Try leaving task= away")


def refuse_other_algorithm(config: Mapping[str, Any], overrides: Sequence[str]) -> None:
    """Raise ConfigError for a setting of an algorithm that does not run."""
    chosen = config["algo"]["name"]
    for text in overrides:
        section = key_of(text).partition(".")[0]
        if section in ALGORITHMS and section != chosen:
            raise _no_effect(key_of(text), chosen)


def _no_effect(key: str, chosen: str) -> ConfigError:
    section = key.partition(".")[0]
    return ConfigError(f"{key} has no effect with algo={chosen}. Try algo={section}, or {chosen}.<key>=<value>")


def explain(
    error: Exception, arguments: Sequence[str], saved: SavedRun | None = None, config_dir: Path | None = None
) -> ConfigError:
    """Convert an error of Hydra; raise other errors unless an override of Hydra's settings caused them."""
    if isinstance(error, ConfigError):
        return error
    if not isinstance(error, HYDRA_ERRORS):
        words = " ".join(text for text in arguments if re.match("hydra[./]", key_of(text)))
        if not words:
            raise error
        return ConfigError(f"Hydra cannot use {words}: {first_line(error)}")
    if isinstance(error, YAMLError):
        return yaml_error(error)
    if isinstance(error, RecursionError):
        itself = f"a yaml in {config_dir or paths.cfg_dir()} builds on itself: none may name itself in its defaults"
        return ConfigError(_problem(arguments, config_dir) or itself)
    text = str(error).strip()
    first = text.partition("\n")[0]
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options is not None:
        group, _, name = error.missing_cfg_file.rpartition("/")
        return unknown_choice(group, name, list(error.options), config_dir)
    if isinstance(error, OverrideParseException):
        return _unreadable(error.override)
    if match := re.search(r"Could not (?:override|delete) '([^'=]+)|config group '(.+)' does not", text):
        key = match.group(1) or match.group(2)
        section = key.partition(".")[0]
        chosen = [value_of(text) for text in arguments if key_of(text) in ("algo", "algo.name")]
        [*_, chosen] = [saved.settings.get("algo", {}).get("name") if saved else default_choice("algo"), *chosen]
        if chosen != section and section in ALGORITHMS:
            return _no_effect(key, chosen)
        return unknown_key(key, _all_keys(arguments, saved))
    if match := re.search(r"already at '(.+)'|Multiple values for ([\w/]+)", text):
        key = match.group(1) or match.group(2)
        value = next((value_of(argument) for argument in arguments if key_of(argument) == key), "<value>")
        return ConfigError(f"{key!r} has a value already: write {key}={value} without +")
    if match := re.search(r"Ambiguous value for argument '(.+)'|Sweep parameters '(.+)' requires", first):
        asked = match.group(1) or match.group(2)
        return ConfigError(f"{asked}: several values need -m (one run for each); a list is written [a,b]")
    reasons = [first or type(error).__name__, *([str(error.__cause__).partition("\n")[0]] if error.__cause__ else [])]
    return ConfigError(": ".join(reasons))


def unknown_choice(
    group: str, name: str, options: Sequence[str], config_dir: Path | None, otherwise: str = ""
) -> ConfigError:
    """Build the error for an unknown yaml; `otherwise` is the hint without a similar name."""
    hint = did_you_mean(name, options)
    if config_dir is not None:
        folder = paths.from_here(config_dir.resolve())
        misplaced = folder / f"{name}.yaml"
        if misplaced.is_file():
            hint = f" Move {misplaced} to {folder / group}/."
        else:
            hint += f" Looked in {folder / group}/ and ours."
    elif not hint and group in ("task", "algo"):
        hint = otherwise or f" Try -cd <folder that holds {group}/{name}.yaml>."
    return ConfigError(f"unknown {group} {name!r}.{hint} Available: {', '.join(options)}")


def section_of(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section of settings, or an empty one."""
    section = settings.get(name)
    return section if isinstance(section, Mapping) else {}


def _all_keys(arguments: Sequence[str], saved: SavedRun | None) -> list[str]:
    if saved is not None:
        sections = [section_of(saved.settings, "task")]
    else:
        entries = tasks(get_args_parser().parse_known_args(list(arguments))[0].config_dir, outside=True)
        names = [name for name in _task_names(arguments) if name in entries and not entries[name].problem]
        sections = [task_section(entries[name].file) for name in names]
    keys = {f"task.{key}": None for section in [*sections, TASK_DEFAULTS] for key in section if key != "_target_"}
    made = [key_of(text) for text in arguments if text.startswith("++") and not is_open(key_of(text))]
    algo = next((f"{value_of(text)}." for text in reversed(arguments) if key_of(text) == "algo"), "")
    known = sorted(known_keys(), key=lambda key: not (algo and key.startswith(algo)))  # what is chosen is meant
    return [*known, *keys, *made]


def _problem(arguments: Sequence[str], config_dir: Path | None) -> str:
    entries = tasks(config_dir, outside=True)
    return next((entries[name].problem for name in _task_names(arguments) if name in entries), "")


def _task_names(arguments: Sequence[str]) -> list[str]:
    return [value_of(text) for text in arguments if key_of(text) == "task"] or [default_choice("task")]
