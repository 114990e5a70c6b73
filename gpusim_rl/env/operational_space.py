"""The control law that moves a hand by torques of its arm.

Everything here is elementary tensor operations. `torch.linalg` would call LAPACK's cousins on the GPU, which wait for
the device to hear of singular matrices, or cannot be captured in a CUDA graph.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

DAMPING = 1e-4
"""Share by which the diagonal of a body's inverse inertia is raised, so that stretched arms get finite torques."""


def operational_space_torque(
    jacobian: Float[Tensor, "envs task joints"],
    mass_matrix: Float[Tensor, "envs joints joints"],
    acceleration: Float[Tensor, "envs task"],
    posture: Float[Tensor, "envs joints"],
) -> Float[Tensor, "envs joints"]:
    """Returns torques that accelerate a body as asked, and the joints as asked where this does not touch the body.

    Operational space control (Khatib 1987, doi 10.1109/JRA.1987.1087068): with the inertia L = (J M^-1 J^T)^-1 that the
    body has for its surroundings, the torques are M p + J^T L (a - J p). Of all joint accelerations that give the body
    `a` these are the nearest to `p`, in the metric M. Gravity and forces that depend on velocity are left out.

    Args:
        jacobian: Jacobian J of the body.
        mass_matrix: Mass matrix M [kg m^2].
        acceleration: Acceleration a that the body shall have [m/s^2, rad/s^2].
        posture: Acceleration p that the joints shall have [rad/s^2].

    Returns:
        Torques [N m], shape [num_envs, joints].
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
    """Solves `matrix @ x = right` for small symmetric positive definite matrices.

    Gauss-Jordan elimination; such matrices need no pivoting.
    """
    size = matrix.shape[-1]
    rows = torch.cat([matrix, right], dim=-1)
    for k in range(size):
        row = rows[..., k : k + 1, :] / rows[..., k : k + 1, k : k + 1]
        rows = rows - rows[..., :, k : k + 1] * row
        rows[..., k : k + 1, :] = row
    return rows[..., size:]
