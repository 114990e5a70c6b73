"""Warp kernels of `sim/fused.py`."""

from __future__ import annotations

from typing import Any, no_type_check

import torch
import warp as wp
from torch import Tensor

from gpusim_rl.sim.warp import start_warp, wrapped_stream

_Floats = wp.array(dtype=wp.float32, ndim=4)  # type: ignore[reportInvalidTypeForm]
_Numbers = wp.array(dtype=wp.int64, ndim=2)  # type: ignore[reportInvalidTypeForm]


@no_type_check
@wp.func
def _turned(quat: wp.vec4, v: wp.vec3, sense: wp.float32):
    u = wp.vec3(quat[1], quat[2], quat[3])
    t = wp.cross(u, v) + sense * quat[0] * v
    return v + 2.0 * wp.cross(u, t)


@no_type_check
@wp.kernel(enable_backward=False)
def _rotate(quat: _Floats, vec: _Floats, sense: wp.float32, rotated: _Floats):
    i, j, k = wp.tid()
    q = wp.vec4(quat[i, j, k, 0], quat[i, j, k, 1], quat[i, j, k, 2], quat[i, j, k, 3])
    turned = _turned(q, wp.vec3(vec[i, j, k, 0], vec[i, j, k, 1], vec[i, j, k, 2]), sense)
    for n in range(3):
        rotated[i, j, k, n] = turned[n]


@no_type_check
@wp.kernel(enable_backward=False)
def _hash(state: wp.array(dtype=wp.int64), shift: wp.uint64, numbers: _Numbers):
    env, number = wp.tid()
    x = wp.uint64(state[env]) + wp.uint64(number + 1) * wp.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> wp.uint64(30))) * wp.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> wp.uint64(27))) * wp.uint64(0x94D049BB133111EB)
    numbers[env, number] = wp.int64(x >> shift)


@no_type_check
@wp.kernel(enable_backward=False)
def _wrench_in_body_frame(readings: wp.array(dtype=wp.float32, ndim=3), wrench: wp.array(dtype=wp.float32, ndim=3)):
    # Force, torque about the contact position, contact position, body position, body quaternion.
    i, j = wp.tid()
    force = wp.vec3(readings[i, j, 0], readings[i, j, 1], readings[i, j, 2])
    torque = wp.vec3(readings[i, j, 3], readings[i, j, 4], readings[i, j, 5])
    contact_pos = wp.vec3(readings[i, j, 6], readings[i, j, 7], readings[i, j, 8])
    body_pos = wp.vec3(readings[i, j, 9], readings[i, j, 10], readings[i, j, 11])
    quat = wp.vec4(readings[i, j, 12], readings[i, j, 13], readings[i, j, 14], readings[i, j, 15])
    f = _turned(quat, force, -1.0)
    t = _turned(quat, torque + wp.cross(contact_pos - body_pos, force), -1.0)
    for n in range(3):
        wrench[i, j, n] = f[n]
        wrench[i, j, 3 + n] = t[n]


def wrench_in_body_frame(readings: Tensor, wrench: Tensor) -> None:
    """Write wrenches in the body frames; see `fused.wrench_in_body_frame`."""
    _launch(_wrench_in_body_frame, wrench.shape[:2], wrench, [readings], [wrench])


def rotate(quat: Tensor, vec: Tensor, sense: float, rotated: Tensor) -> None:
    """Write rotated vectors, [a, b, c, 3] each; see `fused.rotate`."""
    _launch(_rotate, rotated.shape[:3], rotated, [quat, vec, sense], [rotated])


def hash_numbers(state: Tensor, shift: int, numbers: Tensor) -> None:
    """Write hashed numbers; see `fused.hash_numbers`."""
    _launch(_hash, numbers.shape, numbers, [state, shift], [numbers])


def _launch(kernel: Any, dim: torch.Size, out: Tensor, inputs: list[Any], outputs: list[Tensor]) -> None:
    """Launch on torch's current stream, also into a graph that torch captures."""
    device = start_warp(out.device)
    stream = wrapped_stream(torch.cuda.current_stream(out.device)) if out.is_cuda else None
    arrays = ([wp.from_torch(x) if isinstance(x, Tensor) else x for x in given] for given in (inputs, outputs))
    if out.numel():
        wp.launch(kernel, tuple(dim), *arrays, device=device, stream=stream)
