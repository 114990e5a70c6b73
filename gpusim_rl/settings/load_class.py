"""Import of classes and functions named by settings."""

from __future__ import annotations

import importlib
import inspect
import itertools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

from gpusim_rl import public
from gpusim_rl.errors import ConfigError, did_you_mean

T = TypeVar("T")


def load_class(target: Any, base: type[T] | tuple[type, ...], key: str, example: str) -> type[T]:
    """Import the class that the setting `key` names, or raise ConfigError with an `example`."""
    module = _import_module(target, "class", key, example)
    module_name, _, class_name = target.rpartition(".")
    cls: Any = getattr(module, class_name, None)
    if cls is None:
        classes = [name for name, item in vars(module).items() if inspect.isclass(item) and issubclass(item, base)]
        hint = did_you_mean(class_name, classes)
        raise ConfigError(f"{module_name} has no class {class_name!r}", key=f"{key}={target}", hint=hint)
    if not (inspect.isclass(cls) and issubclass(cls, base)):
        expected = f"a subclass of {public_name(base[0] if isinstance(base, tuple) else base)}, e.g. {example}"
        raise ConfigError(key=f"{key}={target}", expected=expected, got=cls if inspect.isclass(cls) else type(cls))
    return cast("type[T]", cls)


def load_function(target: Any, key: str, example: str) -> Callable[..., Any]:
    """Import the function that the setting `key` names, or raise ConfigError."""
    module = _import_module(target, "function", key, example)
    name = target.rpartition(".")[2]
    function = getattr(module, name, None)
    if not callable(function):
        names = [known for known, member in vars(module).items() if callable(member)]
        problem = f"{module.__name__} has no function {name!r}"
        raise ConfigError(problem, key=f"{key}={target}", hint=did_you_mean(name, names))
    return function


def _import_module(target: Any, kind: str, key: str, example: str) -> ModuleType:
    if not isinstance(target, str) or not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", target):
        raise ConfigError(key=key, expected=f"a {kind} path such as {example!r}", got=target)
    module_name = target.rpartition(".")[0]
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # A failing import inside the user's file is a bug to show with a traceback.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        package = module_name.partition(".")[0]
        hint = f"Try running from the folder of {package!r} (current folder: {Path.cwd()}), or installing its package"
        raise ConfigError(f"no module named {error.name!r}", key=f"{key}={target}", hint=hint) from None


def public_name(cls: type) -> str:
    """Return the shortest import path of a class."""
    parts = cls.__module__.split(".")
    if parts[0] == "gpusim_rl" and cls.__name__ in public.HOME:  # imported lazily
        return f"gpusim_rl.{cls.__qualname__}"
    names = itertools.accumulate(parts, "{}.{}".format)
    module = next((name for name in names if vars(sys.modules[name]).get(cls.__name__) is cls), cls.__module__)
    return f"{module}.{cls.__qualname__}"
