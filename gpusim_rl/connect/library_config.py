"""Settings of other libraries' envs: the section `task`, in which nothing may be set, and `env.cfg`."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, Literal, TypeGuard

from torch import Tensor

from gpusim_rl.env.task import ResetFromConfig
from gpusim_rl.errors import ConfigError, described, did_you_mean, first_line, is_out_of_memory
from gpusim_rl.settings.load_class import load_function
from gpusim_rl.settings.schema import EnvConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryConfig:
    """Task settings without effect on these envs; use the section `env` instead."""

    randomize: Literal[False] = False
    randomization_params: dict[str, Any] = field(default_factory=dict)
    reset_from: ResetFromConfig = field(default_factory=ResetFromConfig)
    observations: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise ConfigError for settings without effect."""
        for key, value, why in (
            ("reset_from.share", self.reset_from.share > 0.0, "the state of these envs is not known. Try 0"),
            ("randomization_params", self.randomization_params, "the physics is the library's. Try env.cfg"),
            ("observations", self.observations, "these envs do not name the parts. Try without it"),
        ):
            if value:
                raise ConfigError(f"task.{key} has no effect here: {why}")


@contextlib.contextmanager
def quietly(library: str) -> Iterator[None]:
    """Suppress the output of a library while it makes its envs."""
    logger.info("%s makes its envs; where kernels are to be compiled, that takes minutes", library)
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def refuse_gymnasiums(cfg: EnvConfig, library: str) -> None:
    """Raise ConfigError for `env` settings without effect on tensor envs."""
    for key, default in {"vectorization": "sync", "max_episode_steps": None}.items():
        if getattr(cfg, key) != default:
            raise ConfigError(f"env.{key} has no effect on envs of {library}. Try without it, or env.cfg.<field>")


def require(module: str, library: str, install: str) -> None:
    """Raise ConfigError if a library is not installed."""
    try:
        metadata.version(module)
    except metadata.PackageNotFoundError:
        raise ConfigError(f"{library} is not installed. Try {install}") from None


def require_id(cfg: EnvConfig, task: str, example: str) -> None:
    """Raise ConfigError unless exactly one of `env.id` and `env._target_` is set."""
    if (cfg.id is None) == (cfg._target_ is None):
        script = "" if task == "Gymnasium" else ", or in a script gpusim_rl.train(envs)"
        raise ConfigError(f"task={task} needs env.id or env._target_: try env.id={example}{script}")


def require_shape(action: Tensor, num_envs: int, num_actions: int) -> None:
    """Raise ValueError unless actions have the shape [num_envs, num_actions]."""
    if list(action.shape) != [num_envs, num_actions]:
        raise ValueError(f"step() needs actions of shape {[num_envs, num_actions]}, got {list(action.shape)}")


def made_by_function(target: str, example: str) -> Any:
    """Call the function or class named by `env._target_` without arguments."""
    function = load_function(target, "env._target_", example)
    with in_one_line(f"env._target_={target}"):
        return function()


@contextlib.contextmanager
def in_one_line(name: str) -> Iterator[None]:
    """Raise a library's ImportError, TypeError or ValueError as a one-line ConfigError."""
    try:
        yield
    except (ImportError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        words = first_line(error)
        if any(module in str(error) for module in ("carb", "omni.", "isaacsim")):
            words += ". It needs Kit: start that in a script, which hands its envs to gpusim_rl.train(envs)"
        raise ConfigError(f"{name}: {words}") from error


def refuse_ours(changes: Mapping[str, Any], ours: Mapping[str, str]) -> None:
    """Raise ConfigError if `env.cfg` sets a field of `ours`, num_envs or the seed."""
    own = {"scene.num_envs": "num_envs is a setting of its own", "seed": "seed is a setting of its own"}
    for path, setting in (own | {**ours}).items():
        node: Any = changes
        for key in path.split("."):
            node = node.get(key) if isinstance(node, Mapping) else None
        if node is not None:
            raise ConfigError(f"env.cfg.{path} has no effect: {setting}")


def module_and_id(name: str) -> str:
    """Import the module of `module:id`, which registers envs; return the id."""
    module, _, env_id = name.rpartition(":")
    if module:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            advice = f"Try pip install {error.name}, or start in the folder of {error.name}.py"
            raise ConfigError(f"env.id={name}: {first_line(error)}. {advice}") from None
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise ConfigError(f"env.id={name}: {described(error)}") from error
    return env_id


def change(cfg: Any, changes: Mapping[str, Any], key: str) -> None:
    """Set fields of another library's nested configuration; raise ConfigError for an unknown field or another type."""
    for name, value in changes.items():
        fields = cfg if isinstance(cfg, dict) else getattr(cfg, "__dict__", {})
        by_pattern = isinstance(cfg, dict) and all(map(_is_number, fields.values()))  # of joints, say
        if by_pattern and _is_number(value):
            cfg[name] = float(value)
            continue
        if name not in fields:
            raise ConfigError(f"{key}.{name}: no such field.{did_you_mean(name, sorted(fields))}")
        old = fields[name]
        if isinstance(value, Mapping) and old is not None:
            change(old, value, f"{key}.{name}")
            continue
        kind = _annotation(cfg, name, old)
        if _is_number(old) and _is_number(value) and ("float" in kind or isinstance(cfg, dict)):
            old, value = float(old), float(value)
        if isinstance(old, tuple) and isinstance(value, list):
            value = tuple(value)
        if not _fits(value, old, kind):
            expected, got = type(old).__name__, type(value).__name__
            raise ConfigError(f"{key}.{name} must be {expected}, such as {old!r}; got {got} {value!r}")
        if isinstance(cfg, dict):
            cfg[name] = value
        else:
            setattr(cfg, name, value)


def _fits(value: Any, old: Any, kind: str) -> bool:
    """Return whether a value can replace the default. None removes a term or an optional field."""
    if old is None:
        return True
    if value is None:
        return "None" in kind or "Optional" in kind or hasattr(old, "__dict__")
    if isinstance(value, bool) != isinstance(old, bool) or not isinstance(value, type(old)):
        return False
    numbers = isinstance(old, tuple) and old and all(map(_is_number, old))
    return not numbers or (len(value) == len(old) and all(map(_is_number, value)))


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _annotation(cfg: Any, name: str, value: Any) -> str:
    """Return a field's annotation: a float field may hold 5, and accept 0.5."""
    fields = getattr(cfg, "__dataclass_fields__", {})
    return str(fields[name].type if name in fields else type(value))
