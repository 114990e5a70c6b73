"""Tensor maths for tasks: rewards, angles and quaternions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gpusim_rl.sim.quaternion import (
    euler_xyz,
    quat_conjugate,
    quat_difference,
    quat_from_axis_angle,
    quat_multiply,
    quat_rotate,
    quat_rotate_inverse,
    quat_yaw,
)

__all__ = [
    "euler_xyz",
    "masked_terms",
    "operational_space_torque",
    "quat_angle",
    "quat_conjugate",
    "quat_difference",
    "quat_from_axis_angle",
    "quat_from_uniform",
    "quat_multiply",
    "quat_rotate",
    "quat_rotate_inverse",
    "quat_yaw",
    "scale",
    "solve_positive_definite",
    "tolerance",
    "unscale",
    "wrap_angle",
]

DAMPING = 1e-4  # relative to the inverse inertia's diagonal: keeps torques of stretched arms finite
Sigmoid = Literal["gaussian", "linear", "quadratic", "cosine", "hyperbolic", "long_tail", "tanh_squared"]


def masked_terms(terms: Mapping[str, Float[Tensor, " envs"]], where: Bool[Tensor, " envs"]) -> dict[str, Tensor]:
    """Return reward terms, shape [num_envs] each, set to 0 in the masked envs."""
    return dict(zip(terms, torch.stack(list(terms.values())).masked_fill(where, 0.0), strict=True))


def wrap_angle(angle: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """Wrap an angle to [-pi, pi) [rad]."""
    return torch.remainder(angle + math.pi, 2 * math.pi) - math.pi


def unscale(
    value: Float[Tensor, "*batch"], low: Float[Tensor, "..."], high: Float[Tensor, "..."]
) -> Float[Tensor, "*batch"]:
    """Map [low, high] to [-1, 1], e.g. joint positions by their limits."""
    # (2 value - low - high) / (high - low)
    return torch.sub(high + low, value, alpha=2.0) / (low - high)


def scale(
    value: Float[Tensor, "*batch"], low: Float[Tensor, "..."], high: Float[Tensor, "..."]
) -> Float[Tensor, "*batch"]:
    """Map [-1, 1] to [low, high], e.g. actions to position targets; the inverse of `unscale`."""
    # low + (high - low) (value + 1) / 2
    return torch.lerp(low, high, 0.5 * value + 0.5)


def quat_angle(a: Float[Tensor, "*batch 4"], b: Float[Tensor, "*batch 4"]) -> Float[Tensor, "*batch"]:
    """Return the angle between two orientations, in [0, pi] [rad]; also accurate near 0."""
    between = quat_difference(a, b)
    # q and -q are the same rotation; abs() takes the smaller of their two angles
    return 2.0 * torch.atan2(torch.linalg.vector_norm(between[..., 1:], dim=-1), between[..., 0].abs())


def quat_from_uniform(u: Float[Tensor, "*batch 3"]) -> Float[Tensor, "*batch 4"]:
    """Map uniform numbers to uniform rotations, w >= 0 (Shoemake 1992, Uniform random rotations, Graphics Gems III)."""
    length, angle = torch.stack([u[..., 0], 1.0 - u[..., 0]], dim=-1).sqrt(), 2.0 * math.pi * u[..., 1:]
    quat = (length[..., None] * torch.stack([angle.cos(), angle.sin()], dim=-1)).flatten(-2)
    quat[..., 0].abs_()
    return quat


def tolerance(
    x: Float[Tensor, "*batch"],
    bounds: tuple[float, float] = (0.0, 0.0),
    margin: float = 0.0,
    sigmoid: Sigmoid = "gaussian",
    value_at_margin: float = 0.1,
) -> Float[Tensor, "*batch"]:
    """Return a soft indicator in [0, 1]: 1 within the bounds, `value_at_margin` at the distance `margin` outside them.

    Products and sums of such terms make readable rewards (Tassa et al. 2018, arXiv 1801.00690, section 2).

    Args:
        x: Any quantity.
        bounds: Interval where the indicator is 1, in the unit of `x`; may be infinite.
        margin: Distance outside the bounds, in the unit of `x`; 0 = a hard indicator.
        sigmoid: Shape of the decay. `linear`, `quadratic` and `cosine` reach 0; the others approach it.
        value_at_margin: Value in (0, 1), or 0 if the sigmoid reaches it.

    Raises:
        ValueError: An argument is out of range.
    """
    low, high = bounds
    if low > high or margin < 0:
        raise ValueError(f"tolerance: expected low <= high and margin >= 0, got bounds={bounds} and margin={margin}")
    if sigmoid not in _SIGMOIDS:
        raise ValueError(f"tolerance: unknown sigmoid {sigmoid!r}")
    zero_allowed = sigmoid in ("linear", "quadratic", "cosine")
    if not (0 <= value_at_margin < 1 if zero_allowed else 0 < value_at_margin < 1):
        raise ValueError(f"tolerance: value_at_margin={value_at_margin} is out of range for sigmoid={sigmoid!r}")
    distance = torch.clamp_min(torch.maximum(low - x, x - high), 0.0)
    if margin == 0:
        return (distance <= 0).to(x.dtype)
    return _SIGMOIDS[sigmoid](distance / margin, value_at_margin)


_SIGMOIDS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "gaussian": lambda d, v: torch.exp(math.log(v) * d * d),
    "linear": lambda d, v: torch.clamp_min(1.0 - d * (1.0 - v), 0.0),
    "quadratic": lambda d, v: torch.clamp_min(1.0 - d * d * (1.0 - v), 0.0),
    "cosine": lambda d, v: 0.5 * (1.0 + torch.cos((d * math.acos(2.0 * v - 1.0)).clamp(max=math.pi))),
    "hyperbolic": lambda d, v: 1.0 / torch.cosh(d * math.acosh(1.0 / v)),
    "long_tail": lambda d, v: 1.0 / (1.0 + d * d * (1.0 / v - 1.0)),
    "tanh_squared": lambda d, v: 1.0 - torch.tanh(d * math.atanh(math.sqrt(1.0 - v))) ** 2,
}
"""Sigmoids of the distance d in multiples of the margin, with value v at the margin."""


def operational_space_torque(
    jacobian: Float[Tensor, "envs task joints"],
    mass_matrix: Float[Tensor, "envs joints joints"],
    acceleration: Float[Tensor, "envs task"],
    posture: Float[Tensor, "envs joints"],
) -> Float[Tensor, "envs joints"]:
    """Return joint torques [N m] for a body acceleration a, with joint accelerations p in the null space.

    Operational space control (Khatib 1987, doi 10.1109/JRA.1987.1087068): with the body's inertia
    L = (J M^-1 J^T)^-1 the torques are M p + J^T L (a - J p). They produce acceleration a, with joint accelerations as
    close to p as possible in the metric M. Gravity and velocity-dependent forces are not included.

    Args:
        jacobian: Jacobian J of the body.
        mass_matrix: Mass matrix M [kg m^2].
        acceleration: Acceleration a of the body [m/s^2, rad/s^2].
        posture: Acceleration p of the joints [rad/s^2].
    """
    transposed = jacobian.transpose(1, 2)
    mobility = jacobian @ solve_positive_definite(mass_matrix, transposed)
    mobility = mobility + DAMPING * torch.diag_embed(mobility.diagonal(dim1=1, dim2=2))
    missing = acceleration[..., None] - jacobian @ posture[..., None]
    force = solve_positive_definite(mobility, missing)
    return (mass_matrix @ posture[..., None] + transposed @ force)[..., 0]


def solve_positive_definite(
    matrix: Float[Tensor, "*batch n n"], right: Float[Tensor, "*batch n m"]
) -> Float[Tensor, "*batch n m"]:
    """Solve `matrix @ x = right` by Gauss-Jordan elimination; unlike torch.linalg, it never waits for the device."""
    size = matrix.shape[-1]
    rows = torch.cat([matrix, right], dim=-1)
    for k in range(size):
        row = rows[..., k : k + 1, :] / rows[..., k : k + 1, k : k + 1]
        rows = rows - rows[..., :, k : k + 1] * row
        rows[..., k : k + 1, :] = row
    return rows[..., size:]
