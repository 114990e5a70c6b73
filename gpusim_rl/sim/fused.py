"""Formulas that are one Warp kernel each on CUDA, where torch would launch several, as torch operators.

`sim/quaternion.py`, `sim/bodies.py` and `env/random.py` choose them if `fits`; their torch code defines the results.
torch.compile fuses the torch code itself.
"""

from __future__ import annotations

import functools
import logging
from importlib.util import find_spec

import torch
from jaxtyping import Float, Int
from torch import Tensor

logger = logging.getLogger("gpusim_rl.sim")

_INSTALLED = find_spec("warp") is not None


def fits(*tensors: Tensor) -> bool:
    """Return whether the operators support these tensors: on CUDA, without gradients, outside of torch.compile."""
    if not _INSTALLED or torch.compiler.is_compiling() or not all(x.is_cuda for x in tensors):
        return False
    return not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)) and works(tensors[0].device)


@functools.cache
def works(device: torch.device) -> bool:
    """Return whether the kernels compute known results on a device; if not, warn, and torch's operators are used."""
    try:
        turned = rotate(torch.full((4,), 0.5, device=device), torch.tensor([1.0, 2.0, 3.0], device=device), -1.0)
        [[number]] = hash_numbers(torch.zeros(1, dtype=torch.int64, device=device), 1, 33).tolist()
        if turned.tolist() == [2.0, 3.0, 1.0] and number == 0xE220A8397B1DCDAF >> 33:  # SplitMix64's first number
            return True
        reason = f"wrong results {turned.tolist()}, {number}"
    except Exception as error:  # Warp raises bare exceptions too
        reason = next(iter(str(error).splitlines()), type(error).__name__)
    logger.warning("task code runs without Warp's fused kernels on %s: %s", device, reason)
    return False


@torch.library.custom_op(
    "gpusim_rl::rotate", mutates_args=(), schema="(Tensor quat, Tensor vec, float sense) -> Tensor"
)
def rotate(quat: Tensor, vec: Tensor, sense: float) -> Tensor:
    """Rotate float32 vectors by unit quaternions, or by their inverses if `sense` is -1; at most three batch dims."""
    from gpusim_rl.sim import fused_kernels

    batch = torch.broadcast_shapes(quat.shape[:-1], vec.shape[:-1])
    rotated = vec.new_empty(*batch, 3)
    shape = (*[1] * (3 - len(batch)), *batch)
    fused_kernels.rotate(quat.expand(*shape, 4), vec.expand(*shape, 3), sense, rotated.view(*shape, 3))
    return rotated


@rotate.register_fake
def _(quat: Float[Tensor, "*#batch 4"], vec: Float[Tensor, "*#batch 3"], sense: float) -> Tensor:
    return vec.new_empty(*torch.broadcast_shapes(quat.shape[:-1], vec.shape[:-1]), 3)


@torch.library.custom_op(
    "gpusim_rl::hash_numbers", mutates_args=(), schema="(Tensor state, int count, int shift) -> Tensor"
)
def hash_numbers(state: Tensor, count: int, shift: int) -> Tensor:
    """Return the next `count` hashed numbers of each env, shifted right by `shift` bits, int64 [envs, count]."""
    from gpusim_rl.sim import fused_kernels

    numbers = state.new_empty(len(state), count)
    fused_kernels.hash_numbers(state, shift, numbers)
    return numbers


@hash_numbers.register_fake
def _(state: Int[Tensor, " envs"], count: int, shift: int) -> Tensor:
    return state.new_empty(len(state), count)


@torch.library.custom_op("gpusim_rl::wrench_in_body_frame", mutates_args=(), schema="(Tensor readings) -> Tensor")
def wrench_in_body_frame(readings: Tensor) -> Tensor:
    """Return `Contacts.in_body_frame`, [envs, bodies, 6], from contiguous sensor readings [envs, bodies, 16]."""
    from gpusim_rl.sim import fused_kernels

    wrench = readings.new_empty(*readings.shape[:2], 6)
    fused_kernels.wrench_in_body_frame(readings, wrench)
    return wrench


@wrench_in_body_frame.register_fake
def _(readings: Float[Tensor, "envs bodies 16"]) -> Tensor:
    return readings.new_empty(*readings.shape[:2], 6)
