"""Names the first tensor that is on another device than it should be: `debug.check_device=true`.

Torch computes with a number of the host and tensors of a GPU, and copies the number every time. With larger tensors it
raises an error that names neither of the two. This looks at where tensors are, and reads no value.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from gpusim_rl.errors import ConfigError
from gpusim_rl.run.held_objects import held


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
    for path, tensor, expected in held(owner, Tensor, device):
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
