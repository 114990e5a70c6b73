"""Conversion of Python calls (keyword arguments, classes) to one plain dict, through `compose`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gpusim_rl.errors import ConfigError, warn
from gpusim_rl.files.paths import Checkpoint
from gpusim_rl.settings.checks import check_settings, settings_class
from gpusim_rl.settings.compose import choose_recipe, compose
from gpusim_rl.settings.discover import tasks, tuned_sections
from gpusim_rl.settings.hydra_errors import GROUPS, refuse_other_algorithm, refuse_other_task, unknown_choice
from gpusim_rl.settings.overrides import OPEN_SECTIONS, Override, key_of, text_of
from gpusim_rl.settings.saved_run import KEY, NO_YAML, continue_run
from gpusim_rl.settings.schema import algorithm_of


def compose_call(
    task: type | str,
    config: Any,
    overrides: Mapping[str, Any],
    *,
    algo: type | str | None = None,
    network: type | None = None,
    config_dir: str | Path | None = None,
) -> tuple[dict[str, Any], list[str], Checkpoint | None]:
    """Compose the arguments of `gpusim_rl.train`: checked settings, equivalent command line, initial checkpoint."""
    name = _yaml_name(task, config_dir)
    typed = [f"task={name}" if name else NO_YAML]
    if isinstance(algo, type):
        typed = [*typed, *_algorithm_lines(algo, typed, overrides, name, config_dir)]
    elif algo is not None:
        typed.append(f"algo={algo}")
    places = ("task", task), ("algo", algo), ("network", network)
    named = [(place, _class_path(cls)) for place, cls in places if isinstance(cls, type)]
    lines, saved = continue_run([*typed, *_lines(overrides)], config_dir, named)
    more = [line for line in lines if line.startswith("task.")] if config is not None or name is None else []
    lines = [line for line in lines if line not in more]  # `more` applies on top of the task's own settings
    lines = choose_recipe(lines, config_dir) if saved is None else lines
    composed = compose(lines, config_dir, saved)
    target = _class_path(task) if isinstance(task, type) else composed["task"].get("_target_")
    if network is not None:
        more.append(Override(f"{composed['algo']['name']}.network._target_", _class_path(network, "network")))
    if config is None and isinstance(task, type) and "_target_" not in composed["task"]:
        config = _defaults(task, f"train({task.__name__})")
    if config is not None:
        more = [*_section_lines(composed["task"], {"_target_": target, **dataclasses.asdict(config)}), *more]
    if more:
        composed = compose([*lines, *more], config_dir, saved)
    if saved is not None:
        composed["task"]["_target_"] = target
    check_settings(composed)
    refuse_other_algorithm(composed, lines)
    refuse_other_task(composed, saved)
    record = [str(line) for line in [*lines, *more]]
    return (composed, record, None) if saved is None else (composed, saved.with_overrides(record), saved.checkpoint)


def _algorithm_lines(
    algo: type, typed: list[str], overrides: Mapping[str, Any], task: str | None, config_dir: str | Path | None
) -> Iterator[str]:
    """Yield overrides that select the caller's algorithm class and set its section."""
    section = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", algo.__name__).lower()
    base = algorithm_of(algo)
    if overrides.get("checkpoint") is not None:
        settings: Mapping[str, Any] = {}  # the run's own settings
    elif base is None:
        settings = dataclasses.asdict(_defaults(algo, f"algo={algo.__name__}"))
    else:  # including the task's tuned values
        fields = dataclasses.fields(settings_class(algo))
        new = {field.name: field.default for field in fields if field.default is not dataclasses.MISSING and field.init}
        choosing = [line for line in _lines(overrides) if key_of(line) in ("recipe", "device", "sim_device")]
        composed = compose([*typed, *choosing, f"algo={base}"], config_dir)
        tuned = tuned_sections(task, config_dir, composed["recipe"]).get(base, {}) if task else {}
        settings = {**composed[base], **{key: value for key, value in new.items() if key not in tuned}}
    yield Override("++algo.name", section)
    yield Override("++algo._target_", _class_path(algo, "algo"))
    yield from _lines(settings, f"++{section}.")


def _yaml_name(task: type | str, config_dir: str | Path | None) -> str | None:
    entries = tasks(config_dir, outside=True)
    if isinstance(task, str):
        if task in entries:
            return task
        otherwise = "Try config_dir=<folder that contains its yaml>, or pass the task's class."
        raise unknown_choice("task", task, list(entries), Path(config_dir) if config_dir else None, otherwise)
    names = [entry.name for entry in entries.values() if entry.target == _class_path(task)]
    return task.__name__ if task.__name__ in names else next(iter(names), None)


def _defaults(owner: type, call: str) -> Any:
    try:
        return settings_class(owner)()
    except TypeError:
        name = owner.__name__
        hint = f"Try gpusim_rl.train({name}, {name}.Config(...)), or adding defaults to {name}.Config"
        raise ConfigError(f"{name} has no yaml, and its Config lacks defaults", key=call, hint=hint) from None


def _class_path(cls: type, argument: str = "") -> str:
    """Return the import path of a class; given `argument`, warn about a script's classes and reject local classes."""
    if cls.__module__ == "__main__" and argument:
        problem = f"{argument}={cls.__name__} is defined in this script: only the script can resume or play the run"
        warn(f"{problem}. Try moving the class to a module")
    if "<locals>" in cls.__qualname__ and argument:
        problem = "the class must be at the top level of a module, so that the run can be resumed and played"
        raise ConfigError(problem, key=f"{argument}={cls.__name__}")
    return f"{cls.__module__}.{cls.__qualname__}"


def _section_lines(composed: Mapping[str, Any], section: Mapping[str, Any]) -> Iterator[str]:
    """Yield overrides that turn the composed task section into `section`."""
    for key, value in section.items():
        old = composed.get(key)
        if old != value or key not in composed:
            if isinstance(old, Mapping) and old:  # Hydra would merge the two
                yield f"~task.{key}"
            yield Override(f"++task.{key}", value)


def _lines(overrides: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in overrides.items():
        if not KEY.fullmatch(str(name)):
            raise ConfigError(f"invalid key {name!r}", expected="names and dots, e.g. 'ppo.clip'")
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key not in OPEN_SECTIONS and (value or not prefix):
            yield from _lines(value, f"{key}.")
        elif key in GROUPS:
            yield f"{key}={value if isinstance(value, str) else text_of(value)}"
        else:
            yield Override(key, value)
