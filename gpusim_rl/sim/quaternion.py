"""Quaternions, wxyz, batched over leading dimensions."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from gpusim_rl.sim.fused import fits, rotate


def quat_rotate(quat: Float[Tensor, "*#batch 4"], vec: Float[Tensor, "*#batch 3"]) -> Float[Tensor, "*#batch 3"]:
    """Rotate vectors by unit quaternions q = (w, u): v' = v + 2 u x (u x v + w v).

    Inputs broadcast if they have the same number of dimensions.
    """
    return _rotate(quat, vec, 1.0)


def quat_rotate_inverse(
    quat: Float[Tensor, "*#batch 4"], vec: Float[Tensor, "*#batch 3"]
) -> Float[Tensor, "*#batch 3"]:
    """Rotate vectors by inverse unit quaternions, from world to body frame."""
    return _rotate(quat, vec, -1.0)


def _rotate(quat: Tensor, vec: Tensor, sense: float) -> Tensor:
    if fits(quat, vec) and vec.ndim <= 4 and quat.dtype == vec.dtype == torch.float32:
        return rotate(quat, vec, sense)
    w, u = quat[..., :1], quat[..., 1:]
    t = torch.addcmul(torch.linalg.cross(u, vec), w, vec, value=sense)
    return torch.add(vec, torch.linalg.cross(u, t), alpha=2.0)


def quat_multiply(a: Float[Tensor, "*batch 4"], b: Float[Tensor, "*batch 4"]) -> Float[Tensor, "*batch 4"]:
    """Return the Hamilton product a b: rotation b, then a."""
    aw, au = a[..., :1], a[..., 1:]
    bw, bu = b[..., :1], b[..., 1:]
    product = a * b
    w = product[..., :1] - product[..., 1:].sum(-1, keepdim=True)
    u = torch.linalg.cross(au, bu).addcmul_(aw, bu).addcmul_(bw, au)
    return torch.cat([w, u], dim=-1)


def quat_difference(a: Float[Tensor, "*batch 4"], b: Float[Tensor, "*batch 4"]) -> Float[Tensor, "*batch 4"]:
    """Return the rotation from b to a in the world frame, for unit quaternions."""
    aw, au = a[..., :1], a[..., 1:]
    bw, bu = b[..., :1], b[..., 1:]
    u = torch.linalg.cross(bu, au).addcmul_(bw, au).addcmul(aw, bu, value=-1.0)
    return torch.cat([(a * b).sum(-1, keepdim=True), u], dim=-1)


def quat_conjugate(quat: Float[Tensor, "*batch 4"]) -> Float[Tensor, "*batch 4"]:
    """Return the inverse of unit quaternions."""
    return torch.cat([quat[..., :1], -quat[..., 1:]], dim=-1)


def quat_from_axis_angle(axis: Float[Tensor, "*batch 3"], angle: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch 4"]:
    """Return the quaternion of a rotation by `angle` [rad] about unit axes."""
    half = 0.5 * angle[..., None]
    return torch.cat([half.cos(), half.sin() * axis], dim=-1)


def euler_xyz(quat: Float[Tensor, "*batch 4"]) -> tuple[Tensor, Tensor, Tensor]:
    """Return extrinsic roll, pitch and yaw [rad] in (-pi, pi]; roll and yaw are ambiguous at a pitch of +-pi/2."""
    w, x, y, z = quat.unbind(-1)
    roll = torch.atan2(torch.addcmul(w * x, y, z), 0.5 - torch.addcmul(x * x, y, y))
    pitch = torch.asin(torch.addcmul(w * y, z, x, value=-1.0).mul_(2.0).clamp_(-1.0, 1.0))
    return roll, pitch, quat_yaw(quat)


def quat_yaw(quat: Float[Tensor, "*batch 4"]) -> Float[Tensor, "*batch"]:
    """Return the yaw of `euler_xyz` [rad]."""
    w, x, y, z = quat.unbind(-1)
    return torch.atan2(torch.addcmul(w * z, x, y), 0.5 - torch.addcmul(y * y, z, z))
