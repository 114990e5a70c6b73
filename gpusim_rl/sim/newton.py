"""`sim=newton`: Newton with its MuJoCo solver, built from the same scene.

Tasks read and write the data of its solver, MuJoCo Warp, from which Newton's own state is updated. That state has xyzw
quaternions, velocities of free bodies at the centre of mass, and joint positions relative to the file's pose.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mujoco
import numpy as np
import torch
import warp as wp
from jaxtyping import Bool, Float
from torch import Tensor

from gpusim_rl.settings.schema import SimConfig
from gpusim_rl.sim.articulation import reference_pose
from gpusim_rl.sim.mjwarp import MjwarpSim
from gpusim_rl.sim.newton_check import check_import
from gpusim_rl.sim.newton_model import collided_geoms, make_solver
from gpusim_rl.sim.params import FIELDS, LIMITED, model_values
from gpusim_rl.sim.quaternion import quat_rotate
from gpusim_rl.sim.rays import Rays
from gpusim_rl.sim.scene import Scene
from gpusim_rl.sim.warp import WarpGraphs
from gpusim_rl.sim.warp_sim import WarpSim


class NewtonSim(WarpSim):
    """Scene imported by Newton; a physics step is a step of Newton's solver."""

    name = "newton"

    def __init__(self, scene: Scene, num_envs: int, cfg: SimConfig, device: torch.device) -> None:
        self._cfg, graphs = cfg, WarpGraphs(device, cfg.graph)
        with graphs.scope():
            self._solver = solver = make_solver(scene, num_envs, cfg)
            self._newton_state: Any = solver.model.state()
            self._control: Any = solver.model.control()
        super().__init__(scene, num_envs, device, graphs, solver.mjw_model, solver.mjw_data, cfg.num_threads)
        check_import(scene, solver, num_envs)
        self._geoms = torch.as_tensor(collided_geoms(scene.model), device=device)

        # Each step overwrites the inputs and overflow flags in the solver's data.
        if scene.model.nu:
            self.ctrl = self._per_world(self._control.mujoco.ctrl)
        self.qfrc_applied = self._per_world(self._control.joint_f)[:, : scene.model.nv]
        self.xfrc_applied = torch.zeros_like(self.xfrc_applied)
        self._overflow_of_step, self._overflow = self._overflow, torch.zeros_like(self._overflow)
        self._make_newton_views()
        self._make_sensors()

        self._mirror: MjwarpSim | None = None
        self._solver_values: dict[str, Tensor] = {}
        start = torch.from_numpy(reference_pose(scene.model)).to(device)  # XML has only six digits
        for qpos in (self.qpos, self._view(self._model.qpos0)):
            qpos.copy_(start.expand_as(qpos))

    def _per_world(self, array: Any) -> Tensor:
        view = wp.to_torch(array)
        return view.view(self.num_envs, view.shape[0] // self.num_envs, *view.shape[1:])

    def _make_newton_views(self) -> None:
        model, state = self.scene.model, self._newton_state
        # After MuJoCo's coordinates come coordinates of loop-closing joints, which the solver treats as constraints.
        self._joint_q = self._per_world(state.joint_q)[:, : model.nq]
        self._joint_qd = self._per_world(state.joint_qd)[:, : model.nv]
        self._body_f = self._per_world(state.body_f)  # force, torque at the centre of mass; world frame
        self._body_com = self._per_world(self._solver.model.body_com)
        free = np.flatnonzero(model.jnt_type == mujoco.mjtJoint.mjJNT_FREE.value)
        self._free_joints = [
            (int(model.jnt_qposadr[j]), int(model.jnt_dofadr[j]), int(model.jnt_bodyid[j]) - 1) for j in free
        ]
        reference = reference_pose(model)
        for q, _, _ in self._free_joints:
            reference[q : q + 7] = 0.0
        self._reference = torch.from_numpy(reference).to(self.device)

    def _make_sensors(self) -> None:
        # Newton imports no sensors; contacts come from the solver's external forces on bodies.
        scene, model = self.scene, self.scene.model

        def tensor(numbers: Sequence[int]) -> Tensor:
            return torch.tensor(numbers, dtype=torch.int64, device=self.device)

        self._cfrc_ext, self._qfrc_actuator = self._view(self._data.cfrc_ext), self._view(self._data.qfrc_actuator)
        self._sensors_apart = scene.steps_compute_sensors
        self.sensordata = torch.zeros(self.num_envs, model.nsensordata, device=self.device)
        bodies = [model.body(body).id for body in scene.contact_sensors]
        self._contact_bodies, self._contact_roots = tensor(bodies), tensor(model.body_rootid[bodies].tolist())
        # Force, torque and orientation. The torque is about the body's origin: contact point and position stay zero.
        columns = [scene.contact_columns(body) for body in scene.contact_sensors]
        self._contact_columns = tensor([column for each in columns for column in (*each[:6], *each[12:])])
        joints = [joint for name in scene.effort_sensors for joint in scene.elements_of(name, "joint").values()]
        self._effort_dofs = tensor(model.jnt_dofadr[joints].tolist())
        self._effort_columns = tensor([scene.sensor_columns(f"{model.joint(i).name}/effort")[0] for i in joints])

    def _expand(self, field: str) -> Tensor:
        values = super()._expand(field)
        if FIELDS[field].pictures or field in LIMITED:  # rendering only, or meaningless without a limit
            return values
        expected = torch.as_tensor(model_values(self.scene.model, field), dtype=torch.float32).to(self.device)
        if FIELDS[field].of == "geom":  # values of all geoms, copied to the solver's `_geoms` after each write
            self._solver_values[field] = values
            values = expected.expand(self.num_envs, *expected.shape).clone()
            expected = expected[self._geoms]
        self._solver_values.get(field, values).copy_(expected)  # XML has only six digits
        return values

    def _wrote_param(self, field: str, where: Bool[Tensor, " envs"]) -> None:
        self._copy_param(field)
        super()._wrote_param(field, where)

    def _copy_param(self, field: str) -> None:
        values = self._params.values[field]
        if field in self._solver_values:
            self._solver_values[field].copy_(values.index_select(1, self._geoms))
        if field == "body_ipos":  # Newton's velocities refer to centres of mass
            self._body_com.copy_(values[:, 1:])

    def mirror(self) -> MjwarpSim:
        """Return a copy of the worlds in MuJoCo Warp for sensors and rays; randomised parameters are not copied."""
        if self._mirror is None:
            self._mirror = MjwarpSim(self.scene, self.num_envs, self._cfg, self.device)
            self._start_following()
        return self._mirror

    def current_sensors(self, stage: int) -> Float[Tensor, "envs nsensordata"]:
        return self.mirror().current_sensors(stage)

    def rays(self, num_rays: int, ignore: Sequence[str] = ()) -> Rays:
        return self.mirror().rays(num_rays, ignore)

    def _follow_state(self) -> None:
        super()._follow_state()
        if (mirror := self._mirror) is not None:
            for name in ("qpos", "qvel", "ctrl", "qfrc_applied", "xfrc_applied", "mocap_pos", "mocap_quat"):
                getattr(mirror, name).copy_(getattr(self, name))
            mirror.wrote_state(torch.ones_like(self.diverged))
            mirror.refresh()

    def _advance(self, substeps: int) -> None:
        self._write_newton_state()
        for _ in range(substeps):
            self._graphs.run("step", self._step)
            self._overflow |= self._overflow_of_step

    def _step(self) -> None:
        self._solver.step(self._newton_state, self._newton_state, self._control, None, self.dt)

    def _write_newton_state(self) -> None:
        torch.sub(self.qpos, self._reference, out=self._joint_q)
        self._joint_qd.copy_(self.qvel)
        for q, v, body in self._free_joints:
            quat = self.qpos[:, q + 3 : q + 7]
            self._joint_q[:, q + 3 : q + 7] = quat.roll(-1, dims=1)
            ang_vel = quat_rotate(quat, self.qvel[:, v + 3 : v + 6])  # MuJoCo stores it in the body's frame
            lever = quat_rotate(quat, self._body_com[:, body])
            self._joint_qd[:, v : v + 3] += torch.linalg.cross(ang_vel, lever)
            self._joint_qd[:, v + 3 : v + 6] = ang_vel
        self._body_f.copy_(self.xfrc_applied[:, 1:])

    def _sense_step(self) -> None:
        # All values are from the start of the last physics step. cfrc_ext: torque about the tree's COM, then force.
        bodies = self._contact_bodies
        torque, force = self._cfrc_ext.index_select(1, bodies).split(3, dim=-1)
        com = self._derived["subtree_com"].index_select(1, self._contact_roots)
        torque = torque + torch.linalg.cross(com - self._derived["xpos"].index_select(1, bodies), force)
        quat = self._derived["xquat"].index_select(1, bodies)
        self.sensordata.index_copy_(1, self._contact_columns, torch.cat([force, torque, quat], dim=-1).flatten(1))
        efforts = self._qfrc_actuator.index_select(1, self._effort_dofs)
        self.sensordata.index_copy_(1, self._effort_columns, efforts)

    def reset(self, where: Bool[Tensor, " envs"]) -> None:
        super().reset(where)
        mask = where[:, None]
        self.ctrl.masked_fill_(mask, 0.0)
        self.qfrc_applied.masked_fill_(mask, 0.0)
        self.xfrc_applied.masked_fill_(mask[..., None], 0.0)
        self._overflow.masked_fill_(where, 0)

    def _own_state(self) -> dict[str, Tensor]:
        inputs = {name: getattr(self, name) for name in ("ctrl", "qfrc_applied", "xfrc_applied")}
        return {**super()._own_state(), **inputs, "overflow": self._overflow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        for field in self._params.values:
            self._copy_param(field)
