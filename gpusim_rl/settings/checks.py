"""Strict conversion of composed yaml to frozen dataclasses. Does not import torch."""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from gpusim_rl.errors import ConfigError, TaskError, UserError, closest, did_you_mean, first_line
from gpusim_rl.settings.schema import (
    ALGORITHMS,
    LARGEST_COUNT,
    LARGEST_FLOAT,
    LARGEST_INT,
    TASK_DEFAULTS,
    Rule,
    RunConfig,
)
from gpusim_rl.settings.simulators import SIMULATORS

if TYPE_CHECKING:
    from omegaconf import DictConfig

T = TypeVar("T")


def plain(cfg: DictConfig | Mapping[str, Any]) -> dict[str, Any]:
    """Resolve a composed config into nested plain dicts and lists."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        node = OmegaConf.create(dict(cfg)) if isinstance(cfg, dict) else cfg
        container = OmegaConf.to_container(node, resolve=True, throw_on_missing=True)  # type: ignore[arg-type]
    except OmegaConfBaseException as error:
        raise ConfigError(first_line(error), key=getattr(error, "full_key", None) or "") from None
    return typing.cast("dict[str, Any]", container)


def build_run(config: Mapping[str, Any], *, task_class: type, algorithm_class: type) -> RunConfig:
    """Convert composed or saved settings to a RunConfig, or raise ConfigError."""
    checked = check_settings(config)
    task = {key: value for key, value in _section(config.get("task"), "task").items() if key != "_target_"}
    check_hooks(task_class, "task")
    check_hooks(algorithm_class, "algorithm")
    checked["task"] = build(settings_class(task_class), task, path="task")
    if "algorithm" not in checked:
        section = _section(config.get(checked["algo"]), checked["algo"])
        checked["algorithm"] = build(settings_class(algorithm_class), section, path=checked["algo"])
    return RunConfig(**checked)


def check_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Check all settings except those of the task and of a third-party algorithm; return them as RunConfig fields."""
    algo = _section(config.get("algo"), "algo")
    for key in algo.keys() - {"name", "_target_"}:
        raise unknown_key(f"algo.{key}", ["algo.name", "algo._target_"])
    name = algo.get("name")
    if not isinstance(name, str) or not name.isidentifier() or name in _hints(RunConfig):
        raise ConfigError(key="algo.name", expected="the name of the algorithm's section, such as 'ppo'", got=name)
    sections = {"task", "algo", name, *ALGORITHMS}  # a task may tune several algorithms
    settings = {key: node for key, node in config.items() if key not in sections}
    checked = _fields(RunConfig, settings, path="", skip=("task", "algo", "algorithm"))
    checked["algo"] = name
    target, settings_cls = ALGORITHMS.get(name, (None, None))
    if settings_cls is not None and algo.get("_target_") == target:
        checked["algorithm"] = build(settings_cls, config.get(name), path=name)
    if not _section(config.get("task") or {}, "task").keys() - set(TASK_DEFAULTS):
        raise ConfigError("no task selected", hint="Try task=Cartpole, or `gpusim-rl list` for all tasks")
    return checked


def build(cls: type[T], node: Any, path: str = "") -> T:
    """Build the dataclass `cls` from nested plain values; `path` is the key of `node`."""
    values = _fields(cls, _section(node, path), path)
    try:
        return cls(**values)
    except ConfigError:
        raise
    except ValueError as error:  # from __post_init__
        if not isinstance(error, UserError) or isinstance(error, TaskError):  # a user's class; the key names a call
            raise ConfigError(str(error), key=path) from None
        prefix = f"{path}." if path else ""  # keys in the class are relative
        key, hint = (prefix + error.key).rstrip("."), re.sub(r"^Try (?=[\w.]+=)", f"Try {prefix}", error.hint)
        raise ConfigError(error.problem, key=key, expected=error.expected, got=error.got, hint=hint) from None


def algorithm_settings_class(name: Any, algorithm_class: type) -> type:
    """Return the settings dataclass of `algo=<name>`; the class is not enough, since ppo and amp share PPO."""
    target, ours = ALGORITHMS.get(name, ("", object)) if isinstance(name, str) else ("", object)
    path = f"{algorithm_class.__module__}.{algorithm_class.__qualname__}"
    return ours if target == path else settings_class(algorithm_class)


def settings_class(owner: type) -> type:
    """Return the settings dataclass of a task or an algorithm."""
    cls = getattr(owner, "Config", None)
    if not (inspect.isclass(cls) and dataclasses.is_dataclass(cls)):
        raise ConfigError(key=f"{owner.__module__}.{owner.__qualname__}.Config", expected="a dataclass", got=cls)
    return cls


def check_hooks(cls: type, kind: str) -> None:
    """Raise ConfigError if a task or an algorithm (`kind`) lacks a required method."""
    if missing := sorted(getattr(cls, "__abstractmethods__", ())):
        members = [name for name in vars(cls) if not name.startswith("__")]
        matches = {name: close for name in missing if (close := closest(name, members))}
        hint = " ".join(f"Found {close!r}: did you mean {name!r}?" for name, close in matches.items())
        raise ConfigError(f"{kind} {cls.__name__} does not define {', '.join(missing)}", hint=hint)


def known_keys() -> list[str]:
    """Return all keys outside the task section, e.g. `ppo.network.hidden`."""

    def keys(cls: type, prefix: str) -> Iterator[str]:
        hints = _hints(cls)
        for name in (field.name for field in dataclasses.fields(cls) if field.init):
            yield prefix + name
            if dataclasses.is_dataclass(hints[name]):
                yield from keys(hints[name], f"{prefix}{name}.")

    algorithms = [key for name, (_, settings) in ALGORITHMS.items() for key in [name, *keys(settings, f"{name}.")]]
    return [key for key in keys(RunConfig, "") if key != "algorithm"] + algorithms


ISAACGYMENVS = {
    "capture_video": "Try gpusim-rl record <run folder>, during or after training, or log.video=true",
    "capture_video_freq": "Try gpusim-rl record <run folder>",
    "capture_video_len": "Try gpusim-rl record <run folder> --steps <control steps>",
    "pbt": "Try gpusim-rl tune method=pbt (docs/distributed.md)",
    "num_threads": "Did you mean 'sim.num_threads'?",
    "physics_engine": f"Try one of sim={', sim='.join(SIMULATORS)}",
    "pipeline": f"Try one of sim={', sim='.join(SIMULATORS)}, and device=cpu or device=cuda",
    "graphics_device_id": "Training does not render. Try gpusim-rl record <run folder>",
    "task.sim": "Try task.physics_hz (substeps / dt) and task.control_hz; solver settings are in the MJCF",
    "task.env": "Try the `task` section, e.g. task.episode_length; see docs/migrating_from_isaacgymenvs.md",
    "train": "Try the `ppo` section, e.g. ppo.learning_rate; see docs/migrating_from_isaacgymenvs.md",
}
"""Hints for keys from IsaacGymEnvs and all keys below them."""
OURS = {
    "learning_rate": "lr",
    "minibatch_size": "batch_size",
    "horizon": "n_steps horizon_length num_steps_per_env",
    "epochs": "n_epochs mini_epochs num_learning_epochs",
    "entropy_coef": "ent_coef",
    "value_coef": "vf_coef critic_coef value_loss_coef",
    "bounds_coef": "bounds_loss_coef",
    "gae_lambda": "lam tau",
    "clip": "clip_range e_clip clip_param",
    "value_clip": "clip_value use_clipped_value_loss",
    "kl_threshold": "desired_kl",
    "max_grad_norm": "grad_norm",
    "reward_scale": "scale_value",
    "schedule": "lr_schedule",
    "schedule_per": "schedule_type",
    "sequence_length": "seq_len",
    "normalize_obs": "normalize_input",
    "hidden": "units hidden_sizes",
    "capacity": "buffer_size",
    "wandb_activate": "wandb",
    "max_iterations": "max_epochs total_timesteps",
}
OTHERS = {theirs: ours for ours, names in OURS.items() for theirs in names.split()}  # other libraries' names to ours


def unknown_key(key: str, known: Sequence[str]) -> ConfigError:
    """Build the error for an unknown key, with the closest known key."""
    problem = f"unknown key {key!r}"
    if key in known:
        return ConfigError(f"cannot set {key!r} with this syntax", expected="key=value, e.g. num_envs=64")
    for name, advice in ISAACGYMENVS.items():
        if f"{key}.".startswith(f"{name}."):
            return ConfigError(problem, hint=advice)
    section, _, leaf = key.rpartition(".")
    leaf = OTHERS.get(leaf, leaf)
    siblings = [name.rpartition(".")[2] for name in known if name.rpartition(".")[0] == section]
    elsewhere = {name.rpartition(".")[2]: name for name in reversed(known)}  # of equal names, the first wins
    inside = bool(section and siblings)
    if close := closest(leaf, siblings):
        hint = f"Did you mean {'.'.join(filter(None, (section, close)))!r}?"
    elif close := closest(leaf, elsewhere, 0.75 if inside else 0.6):
        hint = f"Did you mean {elsewhere[close]!r}?"
    elif inside:
        hint = f"Keys of {section}: {', '.join(siblings)}"
    else:
        hint = did_you_mean(key, known) or "Try python train.py --help, or --cfg job for all keys"
    return ConfigError(problem, hint=hint)


def _fields(cls: type, node: Mapping[str, Any], path: str, skip: Sequence[str] = ()) -> dict[str, Any]:
    prefix = f"{path}." if path else ""
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init and field.name not in skip}
    for key in node:
        if key not in fields:
            raise unknown_key(f"{prefix}{key}", [f"{prefix}{name}" for name in fields] if path else known_keys())
    values, hints = {}, _hints(cls)
    for name, field in fields.items():
        if name in node:
            values[name] = _convert(node[name], hints[name], f"{prefix}{name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"missing key {prefix + name!r}, which has no default", hint="Set it in the yaml")
    return values


def _section(node: Any, path: str) -> Mapping[str, Any]:
    if not isinstance(node, Mapping):
        hint = f"Try {path}.<key>=<value>{f', or algo={path} to choose the algorithm' if path in ALGORITHMS else ''}"
        raise ConfigError(key=path, expected="a section with keys", got=node, hint=hint)
    return node


@lru_cache(maxsize=256)
def _hints(cls: type) -> Mapping[str, Any]:
    # `localns` makes Python resolve names in the modules of the class and its bases.
    return typing.get_type_hints(cls, localns={}, include_extras=True)


def _convert(value: Any, hint: Any, key: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return build(typing.cast(type, hint), value, key)
    try:
        return _match(value, hint)
    except _Mismatch:
        advice = ""
        if _accepts([value], hint):
            advice = f"Try {key}=[{value}]"
        elif isinstance(value, str):
            advice = did_you_mean(value, _literals(hint))
        elif isinstance(value, float) and value.is_integer() and _accepts(int(value), hint):
            advice = f"Try {key}={int(value)}"
        elif isinstance(value, (int, float)):
            limits = [limit if value > 0 else -limit for limit in (LARGEST_FLOAT, LARGEST_INT, LARGEST_COUNT)]
            exceeded = (limit for limit in limits if abs(value) > abs(limit) and _accepts(limit, hint))
            advice = next((f"Try at {'most' if limit > 0 else 'least'} {limit:.15g}" for limit in exceeded), "")
        raise ConfigError(key=key, expected=_describe(hint), got=value, hint=advice) from None


class _Mismatch(Exception):  # noqa: N818 (never leaves this file)
    """Value that does not match a type hint."""


def _accepts(value: Any, hint: Any) -> bool:
    try:
        _match(value, hint)
    except _Mismatch:
        return False
    return True


def _match(value: Any, hint: Any) -> Any:
    """Convert a value without loss: int to float, list to tuple, never bool to number; numbers must fit a tensor."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin is Annotated:
        value = _match(value, args[0])
        if all(rule.test(value) for rule in args[1:] if isinstance(rule, Rule)):
            return value
    elif origin in (typing.Union, types.UnionType):
        for option in args:
            if _accepts(value, option):
                return _match(value, option)
    elif origin is Literal:
        if any(value == option and type(value) is type(option) for option in args):
            return value
    elif origin in (list, tuple) and isinstance(value, (list, tuple)):
        if origin is list:
            return [_match(item, args[0]) for item in value]
        if len(args) == 2 and args[1] is Ellipsis:
            return tuple(_match(item, args[0]) for item in value)
        if len(args) == len(value):
            return tuple(_match(item, arg) for item, arg in zip(value, args, strict=True))
    elif origin is dict and isinstance(value, Mapping):
        return {_match(name, args[0]): _match(item, args[1]) for name, item in value.items()}
    elif dataclasses.is_dataclass(hint):
        return build(typing.cast(type, hint), value)
    elif hint in (None, type(None)):
        if value is None:
            return None
    elif hint is float:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LARGEST_FLOAT:
            return float(value)
    elif hint is int:
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST_INT:
            return value
    elif inspect.isclass(hint) and isinstance(value, hint):
        return value
    raise _Mismatch


def _literals(hint: Any) -> list[str]:
    if typing.get_origin(hint) is Literal:
        return [value for value in typing.get_args(hint) if isinstance(value, str)]
    return [name for arg in typing.get_args(hint) for name in _literals(arg)]


def _describe(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        rules = [rule.words for rule in args[1:] if isinstance(rule, Rule)]
        return " and ".join(rules) or _describe(args[0])
    if origin in (typing.Union, types.UnionType):
        words = [_describe(arg) for arg in args if arg is not type(None)]
        return " or ".join([*words, "null"] if type(None) in args else words)
    if origin is Literal:
        names = [str(value) for value in args]
        return names[0] if len(names) == 1 else f"one of {', '.join(names)}"
    if origin in (list, tuple):
        items = [arg for arg in args if arg is not Ellipsis]
        if origin is list or len(items) < len(args):
            return f"a list (each item {_describe(items[0])})"
        return f"a list of {len(items)} items ({', '.join(_describe(item) for item in items)})"
    if origin is dict:
        return f"a section (each value {_describe(args[1])})"
    names = {int: "an int", float: "a number", bool: "true or false", str: "a string", type(None): "null"}
    return names.get(hint, getattr(hint, "__name__", str(hint)))
