"""Recursive search of an object for tensors and random generators, without reading tensor values.

`debug.check_device=true` needs it, since torch silently copies host scalars, and its device errors do not name tensors.
"""

from __future__ import annotations

import itertools
import random
import sys
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Generator, Tensor, nn

from gpusim_rl.env.random import EnvRandom
from gpusim_rl.env.stateful import Stateful
from gpusim_rl.errors import ConfigError
from gpusim_rl.machine.compiled import Compiled

T = TypeVar("T")

# Packages whose objects may hold host tensors
LIBRARIES = ("torch", "numpy", "mujoco", "mujoco_warp", "warp", "newton", "gymnasium", "envpool")
ELSEWHERE = tuple(f"{name}." for name in (*sys.stdlib_module_names, *LIBRARIES, "gpusim_rl.sim", "gpusim_rl.run"))
MODULE_DICTS = ("_parameters", "_buffers", "_modules")  # attributes of torch.nn.Module
LARGEST_ARRAY = 64 << 20  # bytes; `unsaved` compares larger arrays by shape only
PLAIN = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, str, bytes, int, float, type(None))


def generators_of(owner: object, device: torch.device) -> list[Generator]:
    """Return an object's random generators on a device; a CUDA graph must register them."""
    return [generator for _, generator, _ in _held(owner, Generator, device) if generator.device.type == device.type]


def regions_of(owner: object, device: torch.device) -> list[Compiled[..., Any]]:
    """Return the functions in an object that torch.compile can compile."""
    return [region for _, region, _ in _held(owner, Compiled, device)]


def attributes(node: object) -> dict[str, Any]:
    """Return the attributes of an object, in its `__dict__` and its slots."""
    slots = [name for cls in type(node).__mro__ for name in getattr(cls, "__slots__", ())]
    return {**{name: getattr(node, name) for name in slots if hasattr(node, name)}, **getattr(node, "__dict__", {})}


def unsaved(owner: object) -> dict[str, Any]:
    """Return fingerprints of the state that checkpoints omit, by path; for tensors, version counters (no sync)."""
    found: dict[str, Any] = {}
    own = attributes(owner)
    seen = {id(node): node for node in (owner, *(own.get(name) for name in ("cfg", "sim", "_task")))}
    nodes: list[tuple[str, Any, bool]] = [(name, node, True) for name, node in own.items()]
    while nodes:
        path, node, kept = nodes.pop()
        if isinstance(node, int):
            found[path] = node  # repr fails for very many digits
        elif isinstance(node, (float, complex, str, bytes, type(None), np.generic, itertools.count)):
            found[path] = repr(node)
        elif isinstance(node, np.ndarray):
            found[path] = node.shape, zlib.crc32(node.tobytes()) if node.nbytes <= LARGEST_ARRAY else 0
        elif isinstance(node, Tensor):
            found |= {} if kept else {path: (id(node), 0 if node.is_inference() else node._version)}
        elif isinstance(node, (random.Random, Generator)):
            found[path] = repr(node.getstate() if isinstance(node, random.Random) else node.get_state().tolist())
        elif isinstance(node, np.random.Generator):
            found[path] = repr(node.bit_generator.state)
        elif id(node) not in seen and not isinstance(node, (type, EnvRandom)):
            seen[id(node)] = node
            if isinstance(node, (list, tuple, set, frozenset, deque)):
                inner, kept = dict(enumerate(node)), kept and isinstance(node, (list, tuple))
            elif isinstance(node, Mapping):
                inner = node
            else:
                ours = f"{type(node).__module__}.".startswith(ELSEWHERE) and not isinstance(node, SimpleNamespace)
                inner, kept = {} if ours else attributes(node), isinstance(node, Stateful)
            saved = kept and all(isinstance(item, Tensor) for item in inner.values())
            if isinstance(node, (Mapping, list, deque, set)) and not saved:
                found[f"{path} (length)"] = len(node)
            nodes += [(f"{path}.{name}", item, kept) for name, item in inner.items()]
    return found


def check_devices(name: str, owner: object, device: torch.device) -> None:
    """Raise ConfigError for the first tensor in `owner` on the wrong device."""
    for path, tensor, expected in _held(owner, Tensor, device):
        place = tensor.device
        if place.type != expected.type or (expected.index is not None and place.index not in (None, expected.index)):
            raise ConfigError(f"{path} is on {place}", key=f"debug.check_device: {name}", expected=str(expected))


@contextmanager
def devices_checked(*owners: tuple[str, object, torch.device], enabled: bool) -> Iterator[None]:
    """Call `check_devices` before and after the block, even if the block raises."""
    checked = owners if enabled else ()
    for owner in checked:
        check_devices(*owner)
    try:
        yield
    finally:
        for owner in checked:
            check_devices(*owner)


def _held(
    node: Any, kind: type[T], device: torch.device, path: str = "", seen: dict[int, object] | None = None
) -> Iterator[tuple[str, T, torch.device]]:
    """Yield each object of a kind with its path and expected device: the innermost enclosing object's `device`."""
    seen = {} if seen is None else seen
    if isinstance(node, PLAIN) or id(node) in seen:
        return
    seen[id(node)] = node  # keeps the object alive, so that its id stays unique
    if isinstance(node, kind):
        yield path, node, device
        return
    inner: list[tuple[str, Any]] = []
    if isinstance(node, Mapping):
        inner = [(f"{path}[{key!r}]", item) for key, item in node.items()]
    elif isinstance(node, (list, tuple, set, frozenset, deque)):
        inner = [(f"{path}[{number}]", item) for number, item in enumerate(node)]
    elif isinstance(node, torch.optim.Optimizer):  # which may count its steps on the host
        states = [(name, item) for state in node.state.values() for name, item in state.items() if name != "step"]
        inner = [(f"{type(node).__name__}.state[{name!r}]", item) for name, item in states]
    elif isinstance(node, nn.Module):
        values = vars(node)
        items = [item for group in MODULE_DICTS for item in values[group].items()]
        items += [item for item in values.items() if item[0] not in MODULE_DICTS]
        inner = [(f"{path or type(node).__name__}.{name}", item) for name, item in items]
    elif not f"{type(node).__module__}.".startswith(ELSEWHERE):
        values = attributes(node)
        if path and isinstance(values.get("device"), torch.device):
            device = values["device"]
        inner = [(f"{type(node).__name__}.{name}", item) for name, item in values.items()]
    for deeper, item in inner:
        yield from _held(item, kind, device, deeper, seen)
