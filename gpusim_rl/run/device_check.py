"""Names the first tensor that is on another device than it should be: `debug.check_device=true`.

Torch computes with a number of the host and tensors of a GPU, and copies the number every time. With larger tensors it
raises an error that names neither of the two. This looks at where tensors are, and reads no value.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from gpusim_rl.errors import ConfigError

LIBRARIES = ("torch", "numpy", "mujoco", "mujoco_warp", "warp", "newton", "gymnasium", "envpool")
ELSEWHERE = tuple(f"{name}." for name in (*sys.stdlib_module_names, *LIBRARIES, "gpusim_rl.sim", "gpusim_rl.run"))
"""Objects of these packages may hold tensors of the host. Simulators hand out tensors of their device only."""
OF_MODULES = ("_parameters", "_buffers", "_modules")
PLAIN = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, str, bytes, int, float, type(None))


def check_devices(what: str, owner: object, device: torch.device) -> None:
    """Stops at the first tensor of an object, or of the objects in it, that is on another device.

    An object in it that has an attribute `device` has its tensors there: a memory on the host, say.

    Args:
        what: Names the owner in the message: `the policy`.
        owner: An object, or a nested container of tensors.
        device: Where its tensors should be.

    Raises:
        ConfigError: With the class and the attribute that hold the tensor, and both devices.
    """
    for path, tensor, expected in _tensors(owner, "", device, {}):
        if not _same(tensor.device, expected):
            raise ConfigError(f"debug.check_device: {what}: {path} is on {tensor.device}, expected {expected}")


@contextmanager
def devices_checked(*parts: tuple[str, object, torch.device], enabled: bool) -> Iterator[None]:
    """Before and after the block all tensors of these parts are on their device.

    Torch's own error in the block, where one is not, becomes one that names it.

    Args:
        parts: As for `check_devices`.
        enabled: Else nothing is looked at.

    Raises:
        ConfigError: See `check_devices`.
    """
    checked = parts if enabled else ()
    for part in checked:
        check_devices(*part)
    try:
        yield
    finally:
        for part in checked:
            check_devices(*part)


def _same(found: torch.device, expected: torch.device) -> bool:
    return found.type == expected.type and (expected.index is None or found.index in (None, expected.index))


def _tensors(
    node: Any, path: str, device: torch.device, seen: dict[int, object]
) -> Iterator[tuple[str, Tensor, torch.device]]:
    """Tensors in an object, each once: where they are held, and the device that they should be on."""
    if isinstance(node, PLAIN) or id(node) in seen:
        return
    seen[id(node)] = node  # kept, so that no other object gets its id
    if isinstance(node, Tensor):
        yield path, node, device
        return
    parts: list[tuple[str, Any]] = []
    if isinstance(node, Mapping):
        parts = [(f"{path}[{key!r}]", item) for key, item in node.items()]
    elif isinstance(node, (list, tuple, set, frozenset, deque)):
        parts = [(f"{path}[{number}]", item) for number, item in enumerate(node)]
    elif isinstance(node, torch.optim.Optimizer):  # it counts its steps on the host, if it may
        states = [(name, item) for state in node.state.values() for name, item in state.items() if name != "step"]
        parts = [(f"{type(node).__name__}.state[{name!r}]", item) for name, item in states]
    elif isinstance(node, nn.Module):
        held = vars(node)
        own = [item for group in OF_MODULES for item in held[group].items()]
        own += [item for item in held.items() if item[0] not in OF_MODULES]
        parts = [(f"{path or type(node).__name__}.{name}", item) for name, item in own]
    elif not f"{type(node).__module__}.".startswith(ELSEWHERE):
        attributes = _attributes(node)
        if path and isinstance(attributes.get("device"), torch.device):
            device = attributes["device"]
        parts = [(f"{type(node).__name__}.{name}", item) for name, item in attributes.items()]
    for deeper, item in parts:
        yield from _tensors(item, deeper, device, seen)


def _attributes(node: object) -> dict[str, Any]:
    """Of an object, in its `__dict__` and in slots."""
    slots = [name for cls in type(node).__mro__ for name in getattr(cls, "__slots__", ())]
    return {**{name: getattr(node, name) for name in slots if hasattr(node, name)}, **getattr(node, "__dict__", {})}
