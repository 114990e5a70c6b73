"""Operational space control by elementary tensor operations.

`torch.linalg` on a GPU waits for the device to report singular matrices, or cannot be captured in a CUDA graph.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

DAMPING = 1e-4
"""Relative damping of the inverse inertia's diagonal; keeps torques of stretched arms finite."""


def operational_space_torque(
    jacobian: Float[Tensor, "envs task joints"],
    mass_matrix: Float[Tensor, "envs joints joints"],
    acceleration: Float[Tensor, "envs task"],
    posture: Float[Tensor, "envs joints"],
) -> Float[Tensor, "envs joints"]:
    """Return torques [N m] for a body's acceleration a, and joint accelerations p in its null space.

    Operational space control (Khatib 1987, doi 10.1109/JRA.1987.1087068): with the body's inertia
    L = (J M^-1 J^T)^-1 the torques are M p + J^T L (a - J p). Of all joint accelerations that give a, they give the
    one nearest to p in the metric M. Gravity and velocity-dependent forces are not included.

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
    """Solve `matrix @ x = right` for small matrices by Gauss-Jordan elimination, which needs no pivoting here."""
    size = matrix.shape[-1]
    rows = torch.cat([matrix, right], dim=-1)
    for k in range(size):
        row = rows[..., k : k + 1, :] / rows[..., k : k + 1, k : k + 1]
        rows = rows - rows[..., :, k : k + 1] * row
        rows[..., k : k + 1, :] = row
    return rows[..., size:]
