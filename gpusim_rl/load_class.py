"""The class that a setting names: a task, an algorithm, a network."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any, TypeVar

import gpusim_rl
from gpusim_rl.errors import ConfigError, did_you_mean

T = TypeVar("T")


def load_class(target: Any, base: type[T], key: str, example: str) -> type[T]:
    """Import the class that a setting names.

    Args:
        target: Value of the setting.
        base: What the class must be a subclass of.
        key: The setting, e.g. `task._target_`.
        example: A value that would do.

    Raises:
        ConfigError: There is no such class, or it is no subclass of `base`.
    """
    if not isinstance(target, str) or not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", target):
        raise ConfigError(f"{key} must be a class path such as {example!r}, got {target!r}")
    module_name, _, class_name = target.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # An import that fails inside the user's file is the author's bug: show its traceback.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        package = module_name.partition(".")[0]
        raise ConfigError(
            f"{key}={target}: no module named {error.name!r}. Try running from the folder that holds {package!r} (this"
            f" one is {Path.cwd()}), or install its package"
        ) from None
    cls = getattr(module, class_name, None)
    if cls is None:
        classes = [
            name for name, member in vars(module).items() if inspect.isclass(member) and issubclass(member, base)
        ]
        raise ConfigError(f"{key}={target}: {module_name} has no {class_name!r}." + did_you_mean(class_name, classes))
    if not (inspect.isclass(cls) and issubclass(cls, base)):
        got = f"got {cls!r}" if inspect.isclass(cls) else f"it is a {type(cls).__name__}"
        raise ConfigError(f"{key}={target} must name a subclass of {public_name(base)}, e.g. {example}; {got}")
    return cls


def public_name(cls: type) -> str:
    """A class as its users import it: from the outermost package where it can be had."""
    if cls.__module__.split(".")[0] == "gpusim_rl" and cls.__name__ in gpusim_rl.__all__:  # loaded only when asked for
        return f"gpusim_rl.{cls.__qualname__}"
    parts = cls.__module__.split(".")
    names = [".".join(parts[: i + 1]) for i in range(len(parts))]
    module = next((name for name in names if vars(sys.modules[name]).get(cls.__name__) is cls), cls.__module__)
    return f"{module}.{cls.__qualname__}"
