"""Rigid-body dynamics of articulations: Jacobian and mass matrix."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mujoco
import torch
from jaxtyping import Float
from torch import Tensor

from gpusim_rl.sim.masks import columns


class MujocoDynamics:
    """See `gpusim_rl.sim.Dynamics`; from the poses that MuJoCo and MuJoCo Warp both keep.

    A body's velocity is a sum over the joints that carry it: a hinge turns it about its axis, a slide shifts it. With
    the velocities of all bodies, scaled by the roots of their masses and principal inertias, the kinetic energy is half
    of a squared norm, and the mass matrix a product of two thin matrices.

    Args:
        model: Model of the scene; its masses, inertias and armatures count, whatever a world changed of them.
        joints: Hinges and slides of the articulation.
        bodies: Bodies of the articulation.
        body: Body of the Jacobian.
        derived: Function from a name of MuJoCo's to the array, which follows the state from the first call on.
        device: Device of these arrays.
    """

    def __init__(
        self,
        model: mujoco.MjModel,
        joints: Sequence[int],
        bodies: Sequence[int],
        body: int,
        derived: Callable[[str], Tensor],
        device: torch.device,
    ) -> None:
        def tensor(values: object) -> Tensor:
            return torch.as_tensor(values, dtype=torch.float32).to(device)

        carried = {i: _carried_by(model, joints, i) for i in (body, *bodies)}
        massive = [i for i in bodies if any(carried[i]) and model.body_mass[i] > 0]
        self._derived = derived
        self._joints, self._body = columns(joints, device), slice(body, body + 1)
        self._massive = torch.tensor(massive, device=device)
        self._carried = tensor([carried[body]])
        self._all_carried = tensor([carried[i] for i in massive])
        self._is_hinge = tensor(model.jnt_type[list(joints)] == mujoco.mjtJoint.mjJNT_HINGE.value)
        self._root_mass = tensor(model.body_mass[massive, None, None]).sqrt()
        self._root_inertia = tensor(model.body_inertia[massive, None, :]).sqrt()
        self._armature = tensor(model.dof_armature[model.jnt_dofadr[list(joints)]]).diag()
        for field in ("xpos", "xipos", "ximat", "xanchor", "xaxis"):
            derived(field)

    @property
    def jacobian(self) -> Float[Tensor, "envs 6 joints"]:
        """See `gpusim_rl.sim.Dynamics`."""
        linear, angular = self._velocities(self._derived("xpos")[:, self._body], self._carried)
        return torch.cat([linear, angular], dim=-1)[:, 0].transpose(1, 2)

    @property
    def mass_matrix(self) -> Float[Tensor, "envs joints joints"]:
        """See `gpusim_rl.sim.Dynamics`."""
        centres = self._derived("xipos").index_select(1, self._massive)
        to_world = self._derived("ximat").index_select(1, self._massive).reshape(*centres.shape, 3)
        linear, angular = self._velocities(centres, self._all_carried)
        scaled = torch.cat([self._root_mass * linear, self._root_inertia * (angular @ to_world)], dim=-1)
        scaled = scaled.transpose(1, 2).flatten(2)
        return scaled @ scaled.transpose(1, 2) + self._armature

    def _velocities(
        self, points: Float[Tensor, "envs bodies 3"], carried: Float[Tensor, "bodies joints"]
    ) -> tuple[Float[Tensor, "envs bodies joints 3"], Float[Tensor, "envs bodies joints 3"]]:
        """Returns linear and angular velocity that the unit velocity of each joint gives to each body at its point."""
        anchor, axis = (self._derived(field)[:, None, self._joints] for field in ("xanchor", "xaxis"))
        hinge, slide = carried * self._is_hinge, carried * (1.0 - self._is_hinge)
        angular = hinge[..., None] * axis
        linear = torch.linalg.cross(angular, points[:, :, None] - anchor) + slide[..., None] * axis
        return linear, angular


def _carried_by(model: mujoco.MjModel, joints: Sequence[int], body: int) -> list[float]:
    """Returns 1 for each joint that moves the body, which belongs to it or to one above it, else 0."""
    chain = set()
    while body:
        chain.add(body)
        body = int(model.body_parentid[body])
    return [float(int(model.jnt_bodyid[joint]) in chain) for joint in joints]
