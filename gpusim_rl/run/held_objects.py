"""What an object holds, in its attributes and containers and in the objects in them: tensors, random generators."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import torch
from torch import Generator, nn

T = TypeVar("T")

LIBRARIES = ("torch", "numpy", "mujoco", "mujoco_warp", "warp", "newton", "gymnasium", "envpool")
ELSEWHERE = tuple(f"{name}." for name in (*sys.stdlib_module_names, *LIBRARIES, "gpusim_rl.sim", "gpusim_rl.run"))
"""Objects of these packages may hold tensors of the host. Simulators hand out tensors of their device only."""
OF_MODULES = ("_parameters", "_buffers", "_modules")
PLAIN = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, str, bytes, int, float, type(None))


def held(owner: object, kind: type[T], device: torch.device) -> Iterator[tuple[str, T, torch.device]]:
    """Objects of a kind that an object holds, each once.

    Args:
        owner: An object, or a nested container.
        kind: Class of what is looked for.
        device: Device that the owner's tensors should be on.

    Yields:
        Where it is held, the object, and the device that it should be on: that of the innermost object around it which
        has an attribute `device`, a memory on the host, say.
    """
    yield from _held(owner, kind, "", device, {})


def generators_of(owner: object, device: torch.device) -> list[Generator]:
    """Random generators of a device that an object holds. A CUDA graph must know those that its kernels draw from."""
    return [generator for _, generator, _ in held(owner, Generator, device) if generator.device.type == device.type]


def attributes(node: object) -> dict[str, Any]:
    """Attributes of an object, in its `__dict__` and in slots."""
    slots = [name for cls in type(node).__mro__ for name in getattr(cls, "__slots__", ())]
    return {**{name: getattr(node, name) for name in slots if hasattr(node, name)}, **getattr(node, "__dict__", {})}


def _held(
    node: Any, kind: type[T], path: str, device: torch.device, seen: dict[int, object]
) -> Iterator[tuple[str, T, torch.device]]:
    if isinstance(node, PLAIN) or id(node) in seen:
        return
    seen[id(node)] = node  # kept, so that no other object gets its id
    if isinstance(node, kind):
        yield path, node, device
        return
    inner: list[tuple[str, Any]] = []
    if isinstance(node, Mapping):
        inner = [(f"{path}[{key!r}]", item) for key, item in node.items()]
    elif isinstance(node, (list, tuple, set, frozenset, deque)):
        inner = [(f"{path}[{number}]", item) for number, item in enumerate(node)]
    elif isinstance(node, torch.optim.Optimizer):  # it counts its steps on the host, if it may
        states = [(name, item) for state in node.state.values() for name, item in state.items() if name != "step"]
        inner = [(f"{type(node).__name__}.state[{name!r}]", item) for name, item in states]
    elif isinstance(node, nn.Module):
        own = vars(node)
        items = [item for group in OF_MODULES for item in own[group].items()]
        items += [item for item in own.items() if item[0] not in OF_MODULES]
        inner = [(f"{path or type(node).__name__}.{name}", item) for name, item in items]
    elif not f"{type(node).__module__}.".startswith(ELSEWHERE):
        own = attributes(node)
        if path and isinstance(own.get("device"), torch.device):
            device = own["device"]
        inner = [(f"{type(node).__name__}.{name}", item) for name, item in own.items()]
    for deeper, item in inner:
        yield from _held(item, kind, deeper, device, seen)
