"""Settings of other libraries' envs."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeGuard

from torch import Tensor

from gpusim_rl.env.task import ResetFromConfig
from gpusim_rl.errors import ConfigError, described, did_you_mean, first_line, is_out_of_memory
from gpusim_rl.settings.load_class import load_function
from gpusim_rl.settings.schema import EnvConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryConfig:
    """`task` section for envs of other libraries; all settings must keep their defaults."""

    randomize: Literal[False] = False
    randomization_params: dict[str, Any] = field(default_factory=dict)
    reset_from: ResetFromConfig = field(default_factory=ResetFromConfig)
    observations: dict[str, Any] = field(default_factory=dict)
    drives: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        """Raise ConfigError for settings without effect."""
        for key, value, hint in (
            ("reset_from.share", self.reset_from.share > 0.0, "Try task.reset_from.share=0"),
            ("randomization_params", self.randomization_params, "Try the library's own settings in env.cfg"),
            ("observations", self.observations, "Remove this setting"),
            ("drives", self.drives, "Remove this setting"),
        ):
            if value:
                raise ConfigError("has no effect on envs of other libraries", key=f"task.{key}", hint=hint)


@contextlib.contextmanager
def quietly(library: str) -> Iterator[None]:
    """Suppress the output of a library while it makes its envs."""
    logger.info("creating %s envs; compiling kernels may take minutes", library)
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def refuse_unused(cfg: EnvConfig, library: str, ours: Mapping[str, str]) -> None:
    """Raise ConfigError for settings without effect, and for fields of `env.cfg` that we set ourselves.

    `ours` maps these fields to hints; scene.num_envs and seed are always included.
    """
    for key, default in {"vectorization": "sync", "max_episode_steps": None}.items():
        if getattr(cfg, key) != default:
            raise ConfigError(f"has no effect on {library} envs", key=f"env.{key}", hint="Remove it")
    for path, hint in {"scene.num_envs": "Set num_envs instead", "seed": "Set seed instead", **ours}.items():
        node: Any = cfg.cfg
        for key in path.split("."):
            node = node.get(key) if isinstance(node, Mapping) else None
        if node is not None:
            raise ConfigError("has no effect", key=f"env.cfg.{path}", hint=hint)


def require_id(cfg: EnvConfig, task: str, example: str) -> None:
    """Raise ConfigError unless exactly one of `env.id` and `env._target_` is set."""
    if (cfg.id is None) == (cfg._target_ is None):
        script = "" if task == "Gymnasium" else ", or gpusim_rl.train(envs) in a script"
        raise ConfigError(f"task={task} needs env.id or env._target_, not both", hint=f"Try env.id={example}{script}")


def require_shape(action: Tensor, num_envs: int, num_actions: int) -> None:
    """Raise ValueError unless actions have shape [num_envs, num_actions]."""
    if list(action.shape) != [num_envs, num_actions]:
        raise ValueError(f"step() expects actions of shape {[num_envs, num_actions]}, got {list(action.shape)}")


def made_by_function(target: str, example: str) -> Any:
    """Call the function or class named by `env._target_` without arguments; return the result."""
    function = load_function(target, "env._target_", example)
    with in_one_line(f"env._target_={target}"):
        return function()


@contextlib.contextmanager
def in_one_line(name: str) -> Iterator[None]:
    """Convert a library's ImportError, TypeError or ValueError to ConfigError."""
    try:
        yield
    except (ImportError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        kit = any(module in str(error) for module in ("carb", "omni.", "isaacsim"))
        hint = "Isaac Sim's Kit must be running: try gpusim_rl.train(envs) in a script that starts it" if kit else ""
        raise ConfigError(first_line(error), key=name, hint=hint) from error


def module_and_id(name: str) -> str:
    """Import the module of `module:id`, which registers envs; return the id."""
    module, _, env_id = name.rpartition(":")
    if module:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            hint = f"Try pip install {error.name}, or running the command in the folder of {error.name}.py"
            raise ConfigError(first_line(error), key=f"env.id={name}", hint=hint) from None
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise ConfigError(described(error), key=f"env.id={name}") from error
    return env_id


def change(cfg: Any, changes: Mapping[str, Any], key: str) -> None:
    """Set fields of another library's nested configuration; raise ConfigError for unknown fields or wrong values."""
    for name, value in changes.items():
        fields = cfg if isinstance(cfg, dict) else getattr(cfg, "__dict__", {})
        by_pattern = isinstance(cfg, dict) and all(map(_is_number, fields.values()))  # e.g. values by joint name
        if by_pattern and _is_number(value):
            cfg[name] = float(value)
            continue
        if name not in fields:
            raise ConfigError("no such field", key=f"{key}.{name}", hint=did_you_mean(name, sorted(fields)))
        old = fields[name]
        if isinstance(value, Mapping) and old is not None:
            change(old, value, f"{key}.{name}")
            continue
        annotated = getattr(cfg, "__dataclass_fields__", {})
        kind = str(annotated[name].type if name in annotated else type(old))  # a float field may hold 5
        if _is_number(old) and _is_number(value) and ("float" in kind or isinstance(cfg, dict)):
            old, value = float(old), float(value)
        if isinstance(old, tuple) and isinstance(value, list):
            value = tuple(value)
        if not _fits(value, old, kind):
            expected = f"{type(old).__name__}, such as {old!r}"
            raise ConfigError(key=f"{key}.{name}", expected=expected, got=value)
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
