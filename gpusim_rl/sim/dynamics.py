"""Rigid-body dynamics of articulations: Jacobian and mass matrix."""

from __future__ import annotations

from collections.abc import Sequence

import mujoco
import torch
from jaxtyping import Float
from torch import Tensor

from gpusim_rl.sim.bodies import MujocoTensors
from gpusim_rl.sim.masks import columns


class Dynamics:
    """Joint-space dynamics of an articulation whose root is held fixed, even if it is free; up to date whenever read.

    With body velocities scaled by the square roots of masses and principal inertias, the kinetic energy is half a
    squared norm, and the mass matrix is the product of a thin matrix and its transpose. Per-world masses are ignored.
    """

    def __init__(self, sim: MujocoTensors, joints: Sequence[int], bodies: Sequence[int], body: int) -> None:
        model, device = sim.scene.model, sim.device

        def tensor(values: object) -> Tensor:
            return torch.as_tensor(values, dtype=torch.float32).to(device)

        carried = {i: _carried_by(model, joints, i) for i in (body, *bodies)}
        massive = [i for i in bodies if any(carried[i]) and model.body_mass[i] > 0]
        self._derived = sim.derived
        self._joints, self._body = columns(joints, device), slice(body, body + 1)
        self._massive = torch.tensor(massive, device=device)
        self._carried = tensor([carried[body]])
        self._all_carried = tensor([carried[i] for i in massive])
        self._is_hinge = tensor(model.jnt_type[list(joints)] == mujoco.mjtJoint.mjJNT_HINGE.value)
        self._root_mass = tensor(model.body_mass[massive, None, None]).sqrt()
        self._root_inertia = tensor(model.body_inertia[massive, None, :]).sqrt()
        self._armature = tensor(model.dof_armature[model.jnt_dofadr[list(joints)]]).diag()
        for field in ("xpos", "xipos", "ximat", "xanchor", "xaxis"):
            sim.derived(field)

    @property
    def jacobian(self) -> Float[Tensor, "envs 6 joints"]:
        """Linear [m/s] and angular [rad/s] velocity of the body's origin per unit joint velocity, world frame."""
        linear, angular = self._velocities(self._derived("xpos")[:, self._body], self._carried)
        return torch.cat([linear, angular], dim=-1)[:, 0].transpose(1, 2)

    @property
    def mass_matrix(self) -> Float[Tensor, "envs joints joints"]:
        """Joint-space inertia, including armature [kg m^2; kg for slides]."""
        centres = self._derived("xipos").index_select(1, self._massive)
        to_world = self._derived("ximat").index_select(1, self._massive).reshape(*centres.shape, 3)
        linear, angular = self._velocities(centres, self._all_carried)
        scaled = torch.cat([self._root_mass * linear, self._root_inertia * (angular @ to_world)], dim=-1)
        scaled = scaled.transpose(1, 2).flatten(2)
        return scaled @ scaled.transpose(1, 2) + self._armature

    def _velocities(
        self, points: Float[Tensor, "envs bodies 3"], carried: Float[Tensor, "bodies joints"]
    ) -> tuple[Float[Tensor, "envs bodies joints 3"], Float[Tensor, "envs bodies joints 3"]]:
        """Return each body's linear velocity at its point and its angular velocity, per unit velocity of each joint."""
        anchor, axis = (self._derived(field)[:, None, self._joints] for field in ("xanchor", "xaxis"))
        hinge, slide = carried * self._is_hinge, carried * (1.0 - self._is_hinge)
        angular = hinge[..., None] * axis
        linear = torch.linalg.cross(angular, points[:, :, None] - anchor) + slide[..., None] * axis
        return linear, angular


def _carried_by(model: mujoco.MjModel, joints: Sequence[int], body: int) -> list[float]:
    """Return 1 for each joint that moves the body, else 0."""
    chain = set()
    while body:
        chain.add(body)
        body = int(model.body_parentid[body])
    return [float(int(model.jnt_bodyid[joint]) in chain) for joint in joints]
