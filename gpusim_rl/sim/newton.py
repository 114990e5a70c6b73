"""`sim=newton`: Newton with its MuJoCo solver, from the same scene.

Newton imports the scene's MJCF and keeps a state of its own: quaternions xyzw, and for a free body
the velocity of its centre of mass. Here it looks like every other simulator: quaternions wxyz,
velocities of body origins.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mujoco
import numpy as np
import torch
import warp as wp
from jaxtyping import Bool, Float
from torch import Tensor

from gpusim_rl.errors import ConfigError, TaskError, import_extra
from gpusim_rl.settings.schema import SimConfig
from gpusim_rl.sim.articulation import ArticulationLayout, check_contact_sensors, check_wrench
from gpusim_rl.sim.dynamics import MujocoDynamics
from gpusim_rl.sim.interface import not_finite
from gpusim_rl.sim.mjwarp import DROPPED, MjwarpSim, estimate_buffers
from gpusim_rl.sim.mujoco import MAX_STATE
from gpusim_rl.sim.newton_model import (
    check_scene,
    collided_geoms,
    import_scene,
    inertia_tensors,
    lacks_option,
    make_solver,
)
from gpusim_rl.sim.option import USUAL
from gpusim_rl.sim.params import FIELDS, LIMITED, Param, Params, model_values
from gpusim_rl.sim.quaternion import quat_rotate, quat_rotate_inverse
from gpusim_rl.sim.rays import MujocoRays
from gpusim_rl.sim.scene import Scene
from gpusim_rl.sim.sensors import MujocoSensor, SitesOfBodies, find_elements
from gpusim_rl.sim.warp import WarpGraphs
from gpusim_rl.sim.warp_params import WarpParams

if TYPE_CHECKING:
    import newton
else:
    newton = import_extra("newton", "newton", "sim=newton")

_FREE = mujoco.mjtJoint.mjJNT_FREE.value


class NewtonSim:
    """`num_envs` worlds on one device; see `gpusim_rl.sim.Sim`.

    State tensors are views of one Newton state, which is stepped in place. As with `sim=mjwarp`,
    step, reset and refresh are Warp graphs.
    """

    name = "newton"

    def __init__(self, scene: Scene, num_envs: int, cfg: SimConfig, device: torch.device) -> None:
        self.scene = scene
        self.num_envs = num_envs
        self.device = device
        model = scene.model
        self.dt = float(model.opt.timestep)
        check_scene(model)
        self._graphs = WarpGraphs(device, cfg.graph)
        with self._graphs.scope(), warnings.catch_warnings():
            # Newton pins exact versions of MuJoCo; our tests compare the physics instead.
            warnings.simplefilter("ignore", newton.NewtonWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                self._model = import_scene(scene, num_envs)
                rows, contacts = estimate_buffers(scene.model)
                rows, contacts = cfg.njmax or scene.njmax or rows, cfg.nconmax or contacts
                self.buffers = f"sim.njmax={rows} sim.nconmax={contacts}"
                self._solver = make_solver(self._model, scene, cfg, rows, contacts)
            except (NotImplementedError, ValueError) as error:
                reason = str(error).strip().splitlines()[0]
                raise ConfigError(f"sim=newton cannot simulate this scene: {reason}; try sim=mjwarp") from None
            self._state = self._model.state()
            self._control: Any = self._model.control()
            # Newton's masks have a last entry for what belongs to no world.
            self._reset_where = wp.zeros(num_envs + 1, dtype=wp.bool)
        self._check_layout()

        state, control, solved = self._state, self._control, self._solver.mjw_data
        self.joint_q = self._per_world(state.joint_q)
        self.joint_qd = self._per_world(state.joint_qd)
        self.body_q = self._per_world(state.body_q)
        self.body_qd = self._per_world(state.body_qd)
        self.body_com = self._per_world(self._model.body_com)
        self.joint_f = self._per_world(control.joint_f)
        self.body_f = self._per_world(state.body_f)  # force, torque at the centre of mass; world frame
        self.ctrl = torch.zeros(num_envs, 0, device=device)
        if scene.model.nu:
            self.ctrl = self._per_world(control.mujoco.ctrl)
        # Newton clears the solver's flags in every step; ours stay until the reset.
        self._overflow_of_step = wp.to_torch(solved.overflow)
        self._overflow = torch.zeros_like(self._overflow_of_step)
        self._reset_mask = wp.to_torch(self._reset_where)

        # Contacts come from the solver's external forces on bodies in the last physics step.
        self.contact_bodies = list(scene.contact_sensors)
        ids = [scene.model.body(body).id for body in self.contact_bodies]
        self._contact_ids = torch.tensor(ids, dtype=torch.int64, device=device)
        roots = scene.model.body_rootid[ids]
        self._contact_roots = torch.as_tensor(roots, dtype=torch.int64).to(device)
        self._cfrc_ext, self._subtree_com, self._xpos, self._xquat = (
            wp.to_torch(array) for array in (solved.cfrc_ext, solved.subtree_com, solved.xpos, solved.xquat)
        )
        # Force of the actuators on each dof in the last physics step.
        self._efforts = wp.to_torch(solved.qfrc_actuator) if scene.effort_sensors else None
        self.joint_effort = torch.zeros(num_envs, scene.model.nv if scene.effort_sensors else 0, device=device)
        # force [N], torque about the body's origin [N m], orientation wxyz
        self.contact_data = torch.zeros(num_envs, len(ids), 10, device=device)
        self._derives = False
        order = list(range(scene.model.nq))
        for joint in np.flatnonzero(scene.model.jnt_type == _FREE):
            first = int(scene.model.jnt_qposadr[joint]) + 3
            order[first : first + 4] = [first + 3, first, first + 1, first + 2]
        self._qpos_from_joint_q = torch.tensor(order, device=device)
        # Newton counts a joint's position from the pose that the file draws, MuJoCo from its `ref` there.
        ref = np.zeros(scene.model.nq, dtype=np.float32)
        scalar = scene.model.jnt_qposadr[scene.model.jnt_type != _FREE]
        ref[scalar] = scene.model.qpos0[scalar]
        self.ref = torch.from_numpy(ref).to(device) if ref.any() else None

        self._cfg = cfg
        self._mirror: MjwarpSim | None = None
        self._free_joints = [
            (int(model.jnt_qposadr[j]), int(model.jnt_dofadr[j]), int(model.jnt_bodyid[j]) - 1)
            for j in np.flatnonzero(model.jnt_type == _FREE)
        ]
        self._geoms = torch.as_tensor(collided_geoms(model), device=device)
        self._solver_values: dict[str, Tensor] = {}
        self._warp_params = WarpParams(scene, self._solver.mjw_model, num_envs, self._graphs, device, self.wrote_state)
        self._params = Params(scene, device, self._expand, self._wrote_param)

        # What the solver carries from step to step beside Newton's state.
        self._carried = [a for a in (solved.qacc_warmstart, solved.act, solved.time) if a.size]

        self._written = torch.ones(num_envs, dtype=torch.bool, device=device)
        self._written_on_host = self._written.numpy() if device.type == "cpu" else None
        self._diverged = torch.zeros(num_envs, dtype=torch.bool, device=device)
        self._graphs.synchronize()
        self.refresh()

    def _per_world(self, array: Any) -> Tensor:
        view = wp.to_torch(array)
        return view.view(self.num_envs, view.shape[0] // self.num_envs, *view.shape[1:])

    def _check_layout(self) -> None:
        # Everything here reads Newton's arrays by MuJoCo's numbers: bodies, coordinates, actuators.
        solved, model = self._solver.mj_model, self.scene.model
        sizes = ("nbody", "njnt", "nq", "nv", "nu")
        same = all(getattr(solved, size) == getattr(model, size) for size in sizes)
        labels = self._model.body_label[: model.nbody - 1]
        same = same and len(self._model.body_label) == self.num_envs * (model.nbody - 1)
        same = same and all(label.endswith(f"/{model.body(i + 1).name}") for i, label in enumerate(labels))
        same = same and np.array_equal(solved.jnt_qposadr, model.jnt_qposadr)
        if not same:
            raise ConfigError("sim=newton imports this scene with other bodies or joints than MuJoCo; try sim=mjwarp")
        of_settings = {"timestep", *USUAL}
        for name in (name for name in dir(model.opt) if not name.startswith("_") and name not in of_settings):
            if not np.allclose(getattr(solved.opt, name), getattr(model.opt, name), rtol=1e-5):
                raise lacks_option(name, getattr(model.opt, name))

    def articulation(self, name: str) -> NewtonArticulation:
        return NewtonArticulation(self, name)

    def param(self, name: str, articulation: str | None = None, elements: Sequence[str] | None = None) -> Param:
        return self._params.find(name, articulation, elements)

    def _expand(self, field: str) -> Tensor:
        if field == "body_inertia":
            self._take_axes()
        values, of_scene = self._warp_params.expand(field), model_values(self.scene.model, field)
        expected = torch.as_tensor(of_scene, dtype=torch.float32).to(self.device)
        if FIELDS[field].of == "geom":
            # The solver has only the geoms that can touch something: these values are copied to it.
            self._solver_values[field] = values
            values = expected.expand(self.num_envs, *expected.shape).clone()
            expected, solver_values = expected[self._geoms], self._solver_values[field]
        else:
            solver_values = values
        if field in LIMITED:  # where there is no limit, the numbers mean nothing
            limited = torch.as_tensor(getattr(self.scene.model, LIMITED[field]) != 0, device=self.device)
            expected, solver_values = expected[limited], solver_values[:, limited]
        if not torch.allclose(solver_values, expected.expand_as(solver_values), rtol=1e-3, atol=1e-6):
            raise ConfigError(f"sim=newton imports this scene with other {field} than MuJoCo; try sim=mjwarp")
        if field not in LIMITED:
            solver_values.copy_(expected)  # to the last digit
        return values

    def _take_axes(self) -> None:
        """Gives the solver the scene's principal axes of inertia; it has found its own ones, maybe in another order."""
        solved, model = self._solver.mj_model, self.scene.model
        ours, theirs = (inertia_tensors(each) for each in (model, solved))
        off, largest = (np.abs(tensors).max(axis=(1, 2)) for tensors in (ours - theirs, ours))
        if np.any(off > 1e-9 + 1e-3 * largest):
            raise ConfigError("sim=newton imports this scene with other body_inertia than MuJoCo; try sim=mjwarp")
        for name in ("body_inertia", "body_iquat"):
            array = wp.to_torch(getattr(self._solver.mjw_model, name))
            array.copy_(torch.as_tensor(getattr(model, name), dtype=torch.float32).expand_as(array))

    def _wrote_param(self, field: str, where: Bool[Tensor, " envs"]) -> None:
        if field in self._solver_values:
            self._solver_values[field].copy_(self._params.values[field].index_select(1, self._geoms))
        if field == "body_ipos":  # Newton's velocities are those of the centres of mass
            self.body_com.copy_(self._params.values[field][:, 1:])
        self._warp_params.wrote(field, where)

    def mirror(self) -> MjwarpSim:
        """The same worlds in MuJoCo Warp, from which it can be read what Newton does not compute.

        It is never stepped: it follows the state of Newton. It has the scene's parameters, not those that were changed
        in some worlds.
        """
        if self._mirror is None:
            self._mirror = MjwarpSim(self.scene, self.num_envs, self._cfg, self.device)
            self._update_mirror()
        return self._mirror

    def _update_mirror(self) -> None:
        mirror = self._mirror
        if mirror is None:
            return
        mirror.qpos.copy_(self.scene_qpos())
        mirror.qvel.copy_(self.joint_qd)
        for q, v, body in self._free_joints:
            # Newton: velocity of the centre of mass, and angular velocity in the world frame. MuJoCo: velocity of the
            # origin, and angular velocity in the body's frame.
            quat = _to_wxyz(self.joint_q[:, q + 3 : q + 7])
            lin_vel, ang_vel = self.joint_qd[:, v : v + 6].split(3, dim=1)
            lever = quat_rotate(quat, self.body_com[:, body])
            mirror.qvel[:, v : v + 3] = lin_vel - torch.linalg.cross(ang_vel, lever)
            mirror.qvel[:, v + 3 : v + 6] = quat_rotate_inverse(quat, ang_vel)
        mirror.ctrl.copy_(self.ctrl)
        mirror.qfrc_applied.copy_(self.joint_f)
        mirror.xfrc_applied[:, 1:].copy_(self.body_f)
        mirror.wrote_state(torch.ones_like(self._diverged))
        mirror.refresh()

    def follow_bodies(self) -> None:
        """Says that body poses and velocities are read from now on."""
        if not self._derives:
            self._derives = True
            self._written.fill_(True)
            self.refresh()

    def wrote_state(self, where: Bool[Tensor, " envs"]) -> None:
        """Says that joint_q or joint_qd of these worlds were written."""
        self._written |= where

    @property
    def diverged(self) -> Bool[Tensor, " envs"]:
        return self._diverged

    @property
    def bad_inputs(self) -> Bool[Tensor, " envs"]:
        return not_finite((self.ctrl, self.joint_f, self.body_f))

    @property
    def overflow(self) -> Bool[Tensor, " envs"]:
        return (self._overflow & DROPPED) != 0

    def rays(self, num_rays: int, ignore: Sequence[str] = ()) -> MujocoRays:
        return self.mirror().rays(num_rays, ignore)

    def step(self, substeps: int) -> None:
        self._warp_params.derive()
        for _ in range(substeps):
            self._graphs.run("step", self._step)
            self._overflow |= self._overflow_of_step
        if self.contact_bodies:
            self.contact_data.copy_(self._read_contacts())
        if self._efforts is not None:
            self.joint_effort.copy_(self._efforts)
        if self.scene.max_angular_velocity is not None:
            self.scene.limit_rotation(self.joint_qd)  # a free joint's last three numbers, as in MuJoCo
            if self._derives:
                self._graphs.run("bodies", self._eval_bodies)
        self._update_mirror()
        self._written.zero_()
        # amax hands NaN on, and a comparison with NaN is false
        fastest = torch.maximum(self.joint_q.abs().amax(dim=1), self.joint_qd.abs().amax(dim=1))
        torch.logical_not(fastest < MAX_STATE, out=self._diverged)

    def _step(self) -> None:
        self._solver.step(self._state, self._state, self._control, None, self.dt)

    def _read_contacts(self) -> Float[Tensor, "envs bodies 10"]:
        # Of the state that the last physics step began with, as are the forces. cfrc_ext is the
        # torque about the tree's centre of mass, and the force, that act on a body.
        wrench = self._cfrc_ext.index_select(1, self._contact_ids)
        torque, force = wrench.split(3, dim=-1)
        com = self._subtree_com.index_select(1, self._contact_roots)
        lever = com - self._xpos.index_select(1, self._contact_ids)
        torque = torque + torch.linalg.cross(lever, force)
        return torch.cat([force, torque, self._xquat.index_select(1, self._contact_ids)], dim=-1)

    def reset(self, where: Bool[Tensor, " envs"]) -> None:
        self._reset_mask[:-1].copy_(where)
        self._graphs.run("reset", self._reset)
        mask = where[:, None]
        self.ctrl.masked_fill_(mask, 0.0)
        self.joint_f.masked_fill_(mask, 0.0)
        self.body_f.masked_fill_(mask[..., None], 0.0)
        self._overflow.masked_fill_(where, 0)
        self.contact_data.masked_fill_(mask[..., None], 0.0)
        self.joint_effort.masked_fill_(mask, 0.0)
        self._written |= where

    def _reset(self) -> None:
        self._solver.reset(self._state, world_mask=self._reset_where)

    def refresh(self) -> None:
        self._warp_params.derive()
        if not self._derives and self._mirror is None:
            return  # nothing follows the state, and this is known before any data
        if self._written_on_host is not None and not self._written_on_host.any():
            return  # a shortcut for the CPU only, where a mask is read at no cost
        if self._derives:
            self._graphs.run("bodies", self._eval_bodies)
        self._update_mirror()
        self._written.zero_()

    def _eval_bodies(self) -> None:
        state: Any = self._state
        newton.eval_fk(self._model, state.joint_q, state.joint_qd, state)

    def scene_qpos(self) -> Float[Tensor, "envs nq"]:
        qpos = self.joint_q.index_select(1, self._qpos_from_joint_q)
        return qpos if self.ref is None else qpos + self.ref

    def _tensors(self) -> dict[str, Tensor]:
        names = (
            "joint_q",
            "joint_qd",
            "body_q",
            "body_qd",
            "body_f",
            "ctrl",
            "joint_f",
            "contact_data",
            "joint_effort",
        )
        tensors = {name: getattr(self, name) for name in names}
        tensors |= {"joint_effort": self.joint_effort, "overflow": self._overflow, "written": self._written}
        tensors |= {"diverged": self._diverged}
        carried = [wp.to_torch(array) for array in self._carried]
        return tensors | {f"carried_{i}": tensor for i, tensor in enumerate(carried)}

    def state_dict(self) -> dict[str, Any]:
        tensors = {name: tensor.clone() for name, tensor in self._tensors().items()}
        return {**tensors, "params": self._params.state_dict(), "constants": self._warp_params.constants()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._params.load_state_dict(state.get("params", {}))
        for field in self._solver_values:
            self._wrote_param(field, torch.ones_like(self._diverged))
        self._warp_params.load_constants(state.get("constants", {}))
        for name, tensor in self._tensors().items():
            tensor.copy_(state[name])
        self._update_mirror()

    def close(self) -> None:
        """Frees the graphs; the simulation cannot be used afterwards."""
        self._graphs.close()


def _to_wxyz(quat: Float[Tensor, "*batch 4"]) -> Float[Tensor, "*batch 4"]:
    return quat.roll(1, dims=-1)


def _to_xyzw(quat: Float[Tensor, "*batch 4"]) -> Float[Tensor, "*batch 4"]:
    return quat.roll(-1, dims=-1)


class NewtonArticulation(ArticulationLayout):
    """See `gpusim_rl.sim.Articulation`."""

    def __init__(self, sim: NewtonSim, name: str) -> None:
        super().__init__(sim.scene, name, sim.device)
        if not isinstance(self._joint_q, slice) or not isinstance(self._controls, slice):
            raise TaskError(f"sim=newton: the joints or actuators of {name!r} are not one run; try sim=mjwarp")
        self._sim = sim
        # Newton has no body for the world: its bodies are one number behind MuJoCo's.
        self._com = sim.body_com[0, self._body_ids[0] - 1]

    # state
    @property
    def root_pos(self) -> Float[Tensor, "envs 3"]:
        if self._free:
            return self._sim.joint_q[:, self._root_q][:, :3]
        return self.default_root_pos.expand(self._sim.num_envs, 3)

    @property
    def root_quat(self) -> Float[Tensor, "envs 4"]:
        if self._free:
            return _to_wxyz(self._sim.joint_q[:, self._root_q][:, 3:])
        return self.default_root_quat.expand(self._sim.num_envs, 4)

    @property
    def root_lin_vel(self) -> Float[Tensor, "envs 3"]:
        if self._free:
            velocity = self._sim.joint_qd[:, self._root_v]
            return velocity[:, :3] - self._com_velocity(self.root_quat, velocity[:, 3:])
        return torch.zeros_like(self.root_pos)

    @property
    def root_ang_vel(self) -> Float[Tensor, "envs 3"]:
        if self._free:
            return self._sim.joint_qd[:, self._root_v][:, 3:]
        return torch.zeros_like(self.root_pos)

    @property
    def root_ang_vel_local(self) -> Float[Tensor, "envs 3"]:
        return quat_rotate_inverse(self.root_quat, self.root_ang_vel)

    @property
    def joint_pos(self) -> Float[Tensor, "envs joints"]:
        drawn = self._sim.joint_q[:, self._joint_q]
        return drawn if self._sim.ref is None else drawn + self._sim.ref[self._joint_q]

    @property
    def joint_vel(self) -> Float[Tensor, "envs joints"]:
        return self._sim.joint_qd[:, self._joint_v]

    @property
    def joint_effort(self) -> Float[Tensor, "envs joints"]:
        if self._efforts is None:
            raise TaskError(f"{self.name!r} has no effort sensors; call scene.add_effort_sensors in the task's scene()")
        return self._sim.joint_effort[:, self._joint_v]

    def _com_velocity(self, quat: Float[Tensor, "envs 4"], ang_vel: Float[Tensor, "envs 3"]) -> Float[Tensor, "envs 3"]:
        """Velocity of the root's centre of mass relative to its origin [m/s]."""
        return torch.linalg.cross(ang_vel, quat_rotate(quat, self._com.expand_as(ang_vel)))

    def bodies(self, names: Sequence[str]) -> NewtonBodies:
        return NewtonBodies(self._sim, self._find_bodies(names))

    def contacts(self, names: Sequence[str]) -> NewtonContacts:
        self._find_bodies(names)
        return NewtonContacts(self._sim, [f"{self._prefix}{body}" for body in names])

    def sites(self, names: Sequence[str]) -> SitesOfBodies:
        ids, pos, quat = self._find_sites(names)
        return SitesOfBodies(NewtonBodies(self._sim, ids), pos, quat)

    def sensor(self, name: str) -> MujocoSensor:
        (sensor,) = find_elements("sensor", [name], self.name, self._prefix, self._model)
        return MujocoSensor(self._sim.mirror(), self._model, sensor)

    def dynamics(self, body: str) -> MujocoDynamics:
        mirror, (body_id,) = self._sim.mirror(), self._find_bodies([body])
        if not self._joint_ids:
            raise TaskError(f"{self.name!r} has no joints, and so no dynamics of joints")
        return MujocoDynamics(self._model, self._joint_ids, self._body_ids, body_id, mirror.derived, mirror.device)

    # control
    def actuate(self, control: Float[Tensor, "envs actuators"]) -> None:
        self._check_control(control, self._sim.num_envs)
        self._sim.ctrl[:, self._controls].copy_(control)

    def set_joint_effort(self, effort: Float[Tensor, "envs joints"]) -> None:
        self._check_effort(effort, self._sim.num_envs)
        self._sim.joint_f[:, self._joint_v].copy_(effort)

    def set_state(
        self,
        where: Bool[Tensor, " envs"],
        *,
        root_pos: Float[Tensor, "envs 3"] | None = None,
        root_quat: Float[Tensor, "envs 4"] | None = None,
        root_lin_vel: Float[Tensor, "envs 3"] | None = None,
        root_ang_vel: Float[Tensor, "envs 3"] | None = None,
        joint_pos: Float[Tensor, "envs joints"] | None = None,
        joint_vel: Float[Tensor, "envs joints"] | None = None,
    ) -> None:
        state = {
            "root_pos": root_pos,
            "root_quat": root_quat,
            "root_lin_vel": root_lin_vel,
            "root_ang_vel": root_ang_vel,
            "joint_pos": joint_pos,
            "joint_vel": joint_vel,
        }
        self._check_state(where, state, self._sim.num_envs)
        if joint_pos is not None and self._sim.ref is not None:
            joint_pos = joint_pos - self._sim.ref[self._joint_q]
        writes = [(self._sim.joint_q[:, self._joint_q], joint_pos), (self.joint_vel, joint_vel)]
        if any(value is not None for value in (root_quat, root_lin_vel, root_ang_vel)):
            # The velocity of the centre of mass depends on all three.
            quat = self.root_quat if root_quat is None else root_quat
            ang_vel = self.root_ang_vel if root_ang_vel is None else root_ang_vel
            lin_vel = self.root_lin_vel if root_lin_vel is None else root_lin_vel
            velocity = torch.cat([lin_vel + self._com_velocity(quat, ang_vel), ang_vel], dim=1)
            writes.append((self._sim.joint_qd[:, self._root_v], velocity))
            writes.append((self._sim.joint_q[:, self._root_q][:, 3:], _to_xyzw(quat)))
        if root_pos is not None:
            writes.append((self.root_pos, root_pos))
        mask = where[:, None]
        for target, value in writes:
            if value is not None:
                target.copy_(torch.where(mask, value, target))
        self._sim.wrote_state(where)


class NewtonBodies:
    """See `gpusim_rl.sim.Bodies`."""

    def __init__(self, sim: NewtonSim, ids: list[int]) -> None:
        self._sim = sim
        self._names = [sim.scene.model.body(i).name for i in ids]
        self._ids = torch.tensor([i - 1 for i in ids], device=sim.device)
        self._com = sim.body_com[0].index_select(0, self._ids)
        sim.follow_bodies()

    @property
    def pos(self) -> Float[Tensor, "envs bodies 3"]:
        return self._sim.body_q.index_select(1, self._ids)[..., :3]

    @property
    def quat(self) -> Float[Tensor, "envs bodies 4"]:
        return _to_wxyz(self._sim.body_q.index_select(1, self._ids)[..., 3:])

    @property
    def lin_vel(self) -> Float[Tensor, "envs bodies 3"]:
        lin_vel, ang_vel = self._sim.body_qd.index_select(1, self._ids).split(3, dim=-1)
        lever = quat_rotate(self.quat, self._com.expand_as(ang_vel))
        return lin_vel - torch.linalg.cross(ang_vel, lever)

    @property
    def ang_vel(self) -> Float[Tensor, "envs bodies 3"]:
        return self._sim.body_qd.index_select(1, self._ids)[..., 3:]

    @property
    def wrench(self) -> Float[Tensor, "envs bodies 6"]:
        return self._sim.body_f.index_select(1, self._ids)

    def apply_wrench(
        self, force: Float[Tensor, "envs bodies 3"], torque: Float[Tensor, "envs bodies 3"] | None = None
    ) -> None:
        check_wrench(self._names, self._sim.num_envs, force, torque)
        torque = torch.zeros_like(force) if torque is None else torque
        self._sim.body_f.index_copy_(1, self._ids, torch.cat([force, torque], dim=-1))


class NewtonContacts:
    """See `gpusim_rl.sim.Contacts`."""

    def __init__(self, sim: NewtonSim, bodies: list[str]) -> None:
        check_contact_sensors(sim.scene, bodies)
        self._sim = sim
        columns = [sim.contact_bodies.index(body) for body in bodies]
        self._columns = torch.tensor(columns, device=sim.device)

    def _read(self) -> tuple[Tensor, Tensor, Tensor]:
        data = self._sim.contact_data.index_select(1, self._columns)
        force, torque, quat = data.split([3, 3, 4], dim=-1)
        return force, torque, quat

    @property
    def force(self) -> Float[Tensor, "envs bodies 3"]:
        return self._read()[0]

    @property
    def torque(self) -> Float[Tensor, "envs bodies 3"]:
        return self._read()[1]

    def in_body_frame(self) -> Float[Tensor, "envs bodies 6"]:
        force, torque, quat = self._read()
        wrench = torch.stack([force, torque], dim=-2)
        return quat_rotate_inverse(quat[..., None, :], wrench).flatten(-2)
