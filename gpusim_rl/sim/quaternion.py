"""Quaternions, wxyz, batched over any leading dimensions."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def quat_rotate(quat: Float[Tensor, "*#batch 4"], vec: Float[Tensor, "*#batch 3"]) -> Float[Tensor, "*#batch 3"]:
    """Rotates vectors by unit quaternions: v' = v + 2 w (u x v) + 2 u x (u x v), with q = (w, u).

    Leading dimensions broadcast, given as many of them.
    """
    w, u = quat[..., :1], quat[..., 1:]
    t = 2.0 * torch.linalg.cross(u, vec)
    return vec + w * t + torch.linalg.cross(u, t)


def quat_rotate_inverse(
    quat: Float[Tensor, "*#batch 4"], vec: Float[Tensor, "*#batch 3"]
) -> Float[Tensor, "*#batch 3"]:
    """Rotates vectors by the inverse of unit quaternions: world frame to body frame; broadcasts as `quat_rotate`."""
    w, u = quat[..., :1], quat[..., 1:]
    t = 2.0 * torch.linalg.cross(u, vec)
    return vec - w * t + torch.linalg.cross(u, t)


def quat_multiply(a: Float[Tensor, "*batch 4"], b: Float[Tensor, "*batch 4"]) -> Float[Tensor, "*batch 4"]:
    """Hamilton product a b: the rotation b, then a."""
    aw, au = a[..., :1], a[..., 1:]
    bw, bu = b[..., :1], b[..., 1:]
    w = aw * bw - (au * bu).sum(-1, keepdim=True)
    return torch.cat([w, aw * bu + bw * au + torch.linalg.cross(au, bu)], dim=-1)


def quat_conjugate(quat: Float[Tensor, "*batch 4"]) -> Float[Tensor, "*batch 4"]:
    """The inverse rotation of unit quaternions."""
    return torch.cat([quat[..., :1], -quat[..., 1:]], dim=-1)


def quat_from_axis_angle(axis: Float[Tensor, "*batch 3"], angle: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch 4"]:
    """Rotation by `angle` [rad] about unit axes."""
    half = 0.5 * angle[..., None]
    return torch.cat([half.cos(), half.sin() * axis], dim=-1)


def euler_xyz(quat: Float[Tensor, "*batch 4"]) -> tuple[Tensor, Tensor, Tensor]:
    """Roll, pitch, yaw [rad] in (-pi, pi]: extrinsic rotations about the fixed axes x, y, z.

    Pitch saturates at +-pi/2, where roll and yaw are not unique (gimbal lock).
    """
    w, x, y, z = quat.unbind(-1)
    roll = torch.atan2(2 * (w * x + y * z), 1 - 2 * (x * x + y * y))
    pitch = torch.asin((2 * (w * y - z * x)).clamp(-1.0, 1.0))
    yaw = torch.atan2(2 * (w * z + x * y), 1 - 2 * (y * y + z * z))
    return roll, pitch, yaw
