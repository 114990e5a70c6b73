"""Articulations, and what can be read of them, over tensors in MuJoCo's layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import mujoco
import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gpusim_rl.errors import TaskError, did_you_mean
from gpusim_rl.sim.dynamics import MujocoDynamics
from gpusim_rl.sim.interface import Bodies
from gpusim_rl.sim.masks import columns, write_columns, write_where
from gpusim_rl.sim.quaternion import quat_multiply, quat_rotate, quat_rotate_inverse
from gpusim_rl.sim.scene import Scene

_SCALAR = (mujoco.mjtJoint.mjJNT_HINGE.value, mujoco.mjtJoint.mjJNT_SLIDE.value)
_ROOT_WIDTHS = {"root_pos": 3, "root_quat": 4, "root_lin_vel": 3, "root_ang_vel": 3}


class MujocoTensors(Protocol):
    """What a backend offers to `MujocoArticulation`: float32 tensors of MuJoCo's arrays."""

    num_envs: int
    device: torch.device
    scene: Scene
    qpos: Float[Tensor, "envs nq"]
    qvel: Float[Tensor, "envs nv"]
    ctrl: Float[Tensor, "envs nu"]
    qfrc_applied: Float[Tensor, "envs nv"]
    xfrc_applied: Float[Tensor, "envs nbody 6"]
    sensordata: Float[Tensor, "envs nsensordata"]
    """What the sensors read in the last physics step, if the scene has contact or effort sensors."""

    def derived(self, field: str) -> Tensor:
        """Returns an array that MuJoCo computes from the state, [envs, nbody or njnt, ...]; kept fresh from now on."""
        ...

    def current_sensors(self, stage: int) -> Float[Tensor, "envs nsensordata"]:
        """Returns what sensors up to a stage (`mujoco.mjtStage`) read in the current state; kept fresh from now on."""
        ...

    def wrote_state(self, where: Bool[Tensor, " envs"]) -> None:
        """Says that qpos or qvel of these worlds were written."""
        ...

    def uses(self, field: str) -> None:
        """Says that an input (qfrc_applied, xfrc_applied) is written from now on."""
        ...


def round_inwards(ranges: np.ndarray) -> np.ndarray:
    """Ranges in float32, [..., 2], that are within those in float64: a joint that is set to its limit is not beyond it.

    A limit that acts one digit too early stops the joint, and robots often start at their limits.
    """
    rounded = ranges.astype(np.float32)
    low, high = rounded[..., 0], rounded[..., 1]
    low = np.where(low < ranges[..., 0], np.nextafter(low, np.float32(np.inf)), low)
    high = np.where(high > ranges[..., 1], np.nextafter(high, np.float32(-np.inf)), high)
    return np.stack([low, high], axis=-1)


def reference_pose(model: mujoco.MjModel) -> np.ndarray:
    """Returns the model's `qpos0` in float32; what is within its joint's limits stays within them."""
    pose, scalar = model.qpos0.astype(np.float32), np.isin(model.jnt_type, _SCALAR) & (model.jnt_limited != 0)
    columns, ranges = model.jnt_qposadr[scalar], model.jnt_range[scalar]
    exact, (low, high) = model.qpos0[columns], round_inwards(ranges).T
    within = (ranges[:, 0] <= exact) & (exact <= ranges[:, 1])
    pose[columns] = np.where(within, pose[columns].clip(low, high), pose[columns])
    return pose


def check_shape(what: str, value: object, shape: tuple[int, ...], names: Sequence[str] = (), hint: str = "") -> None:
    """Raises TaskError unless a task hands over a tensor of this shape.

    Torch stretches a smaller tensor without a word: one number to all joints, one env to all envs.
    """
    if isinstance(value, Tensor) and value.shape == shape:
        return
    got = f"has shape {list(value.shape)}" if isinstance(value, Tensor) else f"is a {type(value).__name__}"
    if isinstance(value, Tensor) and value.shape in (shape[1:], (1, *shape[1:])):
        hint = f"for the same in all envs, .expand({', '.join(map(str, shape))})"
    of = f" for {list(names)}" if names else ""
    raise TaskError(f"{what} {got}, expected {list(shape)}{of}" + (f"; {hint}" if hint else ""))


class MujocoArticulation:
    """See `gpusim_rl.sim.Articulation`."""

    def __init__(self, sim: MujocoTensors, name: str) -> None:
        scene, model = sim.scene, sim.scene.model
        self._sim, self._scene, self._model, self.name = sim, scene, model, name
        bodies = scene.elements_of(name, "body")
        if not bodies:
            raise TaskError(f"the scene has no articulation {name!r}; it has {scene.articulation_names}")
        joints = scene.elements_of(name, "joint")
        self._body_ids, self.body_names = list(bodies.values()), list(bodies)
        self._joint_ids, self.joint_names = list(joints.values()), list(joints)
        root = self._body_ids[0]
        joint = int(model.body_jntadr[root])
        self._free = joint >= 0 and int(model.jnt_type[joint]) == mujoco.mjtJoint.mjJNT_FREE.value
        if self._free:
            q, v = int(model.jnt_qposadr[joint]), int(model.jnt_dofadr[joint])
            self._root_q, self._root_v = slice(q, q + 7), slice(v, v + 6)
        # The compiler numbers a tree's joints in one run. So all of them are one slice, views instead of gathers, where
        # no object and no ball joint is between them.
        in_qpos, in_qvel = (adr[self._joint_ids].tolist() for adr in (model.jnt_qposadr, model.jnt_dofadr))
        self._joint_q, self._joint_v = columns(in_qpos, sim.device), columns(in_qvel, sim.device)

        self.joint_limits = self._limits(
            round_inwards(model.jnt_range[self._joint_ids]), model.jnt_limited[self._joint_ids]
        )
        pose = reference_pose(model)
        self.default_joint_pos = self._tensor(pose[in_qpos])
        pos, quat = model.body_pos[root], model.body_quat[root]
        if self._free:
            pos, quat = pose[self._root_q][:3], pose[self._root_q][3:]
        self.default_root_pos, self.default_root_quat = self._tensor(pos), self._tensor(quat)

        # Most actuators have one control. What has several (a servo with two targets) is there as `name/0`, `name/1`.
        controls, self.actuator_names = [], []
        for label, i in scene.elements_of(name, "actuator").items():
            first, number = int(model.actuator_ctrladr[i]), int(model.actuator_ctrlnum[i])
            controls += range(first, first + number)
            self.actuator_names += [label] if number == 1 else [f"{label}/{k}" for k in range(number)]
        self._controls = columns(controls, sim.device)
        self.control_limits = self._limits(model.actuator_ctrlrange[controls], model.actuator_ctrllimited[controls])
        # The sensors of an articulation's joints were added in one run, so they too are one slice.
        self._efforts: slice | None = None
        if name in scene.effort_sensors:
            first = scene.sensor_columns(f"{model.joint(self._joint_ids[0]).name}/effort")[0]
            self._efforts = slice(first, first + len(self._joint_ids))

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.as_tensor(values, dtype=torch.float32).to(self._sim.device)

    def _limits(self, ranges: np.ndarray, limited: np.ndarray) -> Tensor:
        return self._tensor(np.where(limited[:, None], ranges, [-np.inf, np.inf]))

    def _find(self, kind: str, names: Sequence[str]) -> list[int]:
        """Returns ids in the scene's model; raises TaskError for a name that does not exist."""
        ids = self._scene.elements_of(self.name, kind)
        for name in names:
            if name not in ids:
                hint = did_you_mean(name, ids)
                there = f".{hint} It has" if hint else "; it has"
                raise TaskError(f"{self.name!r} has no {kind} {name!r}{there} {list(ids) or 'none'}")
        return [ids[name] for name in names]

    # state
    @property
    def root_pos(self) -> Float[Tensor, "envs 3"]:
        if self._free:
            return self._sim.qpos[:, self._root_q][:, :3]
        return self.default_root_pos.expand(self._sim.num_envs, 3)

    @property
    def root_quat(self) -> Float[Tensor, "envs 4"]:
        if self._free:
            return self._sim.qpos[:, self._root_q][:, 3:]
        return self.default_root_quat.expand(self._sim.num_envs, 4)

    @property
    def root_lin_vel(self) -> Float[Tensor, "envs 3"]:
        if self._free:
            return self._sim.qvel[:, self._root_v][:, :3]
        return torch.zeros_like(self.root_pos)

    @property
    def root_ang_vel_local(self) -> Float[Tensor, "envs 3"]:
        if self._free:  # MuJoCo keeps a free joint's angular velocity in the body's frame
            return self._sim.qvel[:, self._root_v][:, 3:]
        return torch.zeros_like(self.root_pos)

    @property
    def root_ang_vel(self) -> Float[Tensor, "envs 3"]:
        return quat_rotate(self.root_quat, self.root_ang_vel_local)

    @property
    def joint_pos(self) -> Float[Tensor, "envs joints"]:
        return self._sim.qpos[:, self._joint_q]

    @property
    def joint_vel(self) -> Float[Tensor, "envs joints"]:
        return self._sim.qvel[:, self._joint_v]

    @property
    def joint_effort(self) -> Float[Tensor, "envs joints"]:
        if self._efforts is None:
            raise TaskError(f"{self.name!r} has no effort sensors; call scene.add_effort_sensors in the task's scene()")
        return self._sim.sensordata[:, self._efforts]

    def bodies(self, names: Sequence[str]) -> MujocoBodies:
        return MujocoBodies(self._sim, self._find("body", names))

    def contacts(self, names: Sequence[str]) -> MujocoContacts:
        return MujocoContacts(self._sim, self._find("body", names))

    def sites(self, names: Sequence[str]) -> SitesOfBodies:
        ids, model = self._find("site", names), self._model
        bodies = MujocoBodies(self._sim, model.site_bodyid[ids].tolist())
        return SitesOfBodies(bodies, self._tensor(model.site_pos[ids]), self._tensor(model.site_quat[ids]))

    def sensor(self, name: str) -> MujocoSensor:
        return MujocoSensor(self._sim, self._find("sensor", [name])[0])

    def dynamics(self, body: str) -> MujocoDynamics:
        sim, (body_id,) = self._sim, self._find("body", [body])
        if not self._joint_ids:
            raise TaskError(f"{self.name!r} has no joints, and so no dynamics of joints")
        return MujocoDynamics(self._model, self._joint_ids, self._body_ids, body_id, sim.derived, sim.device)

    # control
    def actuate(self, control: Float[Tensor, "envs actuators"]) -> None:
        names = self.actuator_names
        hint = f"a task that passes its action on has num_actions = {len(names)}"
        check_shape(f"{self.name!r}.actuate(): control", control, (self._sim.num_envs, len(names)), names, hint)
        write_columns(self._sim.ctrl, self._controls, control)

    def set_joint_effort(self, effort: Float[Tensor, "envs joints"]) -> None:
        names = self.joint_names
        check_shape(f"{self.name!r}.set_joint_effort(): effort", effort, (self._sim.num_envs, len(names)), names)
        self._sim.uses("qfrc_applied")
        write_columns(self._sim.qfrc_applied, self._joint_v, effort)

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
        self._check_state(where, state)
        if root_quat is not None and root_ang_vel is None:
            root_ang_vel = self.root_ang_vel  # it stays in the world frame, MuJoCo's is local
        if root_ang_vel is not None:
            quat = self.root_quat if root_quat is None else root_quat
            state["root_ang_vel"] = quat_rotate_inverse(quat, root_ang_vel)
        mask = where[:, None]
        places = {"joint_pos": (self._sim.qpos, self._joint_q), "joint_vel": (self._sim.qvel, self._joint_v)}
        for name, value in state.items():
            if value is not None:
                target = self.root_ang_vel_local if name == "root_ang_vel" else getattr(self, name)
                write_where(mask, value, target)
                if name in places and not isinstance(places[name][1], slice):  # what was written is a copy
                    write_columns(*places[name], target)
        self._sim.wrote_state(where)

    def _check_state(self, where: Bool[Tensor, " envs"], state: Mapping[str, Tensor | None]) -> None:
        """Raises TaskError for what `set_state` cannot write; a value that is None stays as it is."""
        call, num_envs, joints = f"{self.name!r}.set_state():", self._sim.num_envs, self.joint_names
        if not self._free and any(state[key] is not None for key in _ROOT_WIDTHS):
            raise TaskError(f"{self.name!r} has a fixed base: its root state cannot be set")
        check_shape(f"{call} where", where, (num_envs,))
        if where.dtype != torch.bool:
            raise TaskError(f"{call} where is {where.dtype}, expected torch.bool")
        for key, value in state.items():
            if value is not None and key in _ROOT_WIDTHS:
                check_shape(f"{call} {key}", value, (num_envs, _ROOT_WIDTHS[key]))
            elif value is not None:
                check_shape(f"{call} {key}", value, (num_envs, len(joints)), joints)


class MujocoBodies:
    """See `gpusim_rl.sim.Bodies`."""

    def __init__(self, sim: MujocoTensors, ids: list[int]) -> None:
        self._sim = sim
        self._names = [sim.scene.model.body(i).name for i in ids]
        self._ids = torch.tensor(ids, device=sim.device)
        roots = sim.scene.model.body_rootid[ids].tolist()
        self._roots = columns(roots[:1] if len(set(roots)) == 1 else roots, sim.device)
        for field in ("xpos", "xquat", "cvel", "subtree_com"):
            sim.derived(field)

    def _select(self, field: str) -> Tensor:
        return self._sim.derived(field).index_select(1, self._ids)

    @property
    def pos(self) -> Float[Tensor, "envs bodies 3"]:
        return self._select("xpos")

    @property
    def quat(self) -> Float[Tensor, "envs bodies 4"]:
        return self._select("xquat")

    @property
    def lin_vel(self) -> Float[Tensor, "envs bodies 3"]:
        # cvel is the spatial velocity (angular first) at the tree's centre of mass, world axes
        velocity = self._select("cvel")
        lever = self.pos - self._sim.derived("subtree_com")[:, self._roots]
        return velocity[..., 3:] + torch.linalg.cross(velocity[..., :3], lever)

    @property
    def ang_vel(self) -> Float[Tensor, "envs bodies 3"]:
        return self._select("cvel")[..., :3]

    @property
    def wrench(self) -> Float[Tensor, "envs bodies 6"]:
        return self._sim.xfrc_applied.index_select(1, self._ids)

    def apply_wrench(
        self, force: Float[Tensor, "envs bodies 3"], torque: Float[Tensor, "envs bodies 3"] | None = None
    ) -> None:
        shape = (self._sim.num_envs, len(self._names), 3)
        check_shape("apply_wrench(): force", force, shape, self._names)
        if torque is not None:
            check_shape("apply_wrench(): torque", torque, shape, self._names)
        self._sim.uses("xfrc_applied")
        torque = torch.zeros_like(force) if torque is None else torque
        self._sim.xfrc_applied.index_copy_(1, self._ids, torch.cat([force, torque], dim=-1))


class MujocoContacts:
    """See `gpusim_rl.sim.Contacts`; reads the sensors of `Scene.add_contact_sensor`."""

    def __init__(self, sim: MujocoTensors, ids: list[int]) -> None:
        self._sim, scene = sim, sim.scene
        columns = [scene.contact_columns(scene.model.body(i).name) for i in ids]
        self._columns = torch.tensor(columns, device=sim.device)
        self._force_columns = self._columns[:, :3].flatten()

    def _read(self) -> tuple[Tensor, Tensor]:
        """Returns contact wrenches about the bodies' origins, [envs, bodies, 2, 3], and orientations of the bodies."""
        data = self._sim.sensordata.index_select(1, self._columns.view(-1)).unflatten(1, self._columns.shape)
        wrench, contact_pos, body_pos, quat = data.split([6, 3, 3, 4], dim=-1)
        wrench = wrench.unflatten(-1, (2, 3))
        force, torque = wrench.unbind(dim=-2)
        # The sensor reports the torque about the force-weighted mean of the contact points; without contact force
        # and torque are zero.
        torque += torch.linalg.cross(contact_pos - body_pos, force)
        return wrench, quat

    @property
    def force(self) -> Float[Tensor, "envs bodies 3"]:
        return self._sim.sensordata.index_select(1, self._force_columns).unflatten(1, (-1, 3))

    @property
    def torque(self) -> Float[Tensor, "envs bodies 3"]:
        return self._read()[0][..., 1, :]

    def in_body_frame(self) -> Float[Tensor, "envs bodies 6"]:
        wrench, quat = self._read()
        return quat_rotate_inverse(quat[..., None, :], wrench).flatten(-2)


class SitesOfBodies:
    """See `gpusim_rl.sim.Sites`: points that are fixed to bodies, on any simulator that has `bodies`.

    Args:
        bodies: Body of each site.
        pos: Positions of the sites in the frames of their bodies [m].
        quat: Orientations of the sites in these frames, wxyz.
    """

    def __init__(self, bodies: Bodies, pos: Float[Tensor, "sites 3"], quat: Float[Tensor, "sites 4"]) -> None:
        self._bodies, self._pos, self._quat = bodies, pos, quat

    def _lever(self) -> Float[Tensor, "envs sites 3"]:
        quat = self._bodies.quat
        return quat_rotate(quat, self._pos.expand(*quat.shape[:-1], 3))

    @property
    def pos(self) -> Float[Tensor, "envs sites 3"]:
        return self._bodies.pos + self._lever()

    @property
    def quat(self) -> Float[Tensor, "envs sites 4"]:
        quat = self._bodies.quat
        return quat_multiply(quat, self._quat.expand_as(quat))

    @property
    def lin_vel(self) -> Float[Tensor, "envs sites 3"]:
        return self._bodies.lin_vel + torch.linalg.cross(self._bodies.ang_vel, self._lever())

    @property
    def ang_vel(self) -> Float[Tensor, "envs sites 3"]:
        return self._bodies.ang_vel


class MujocoSensor:
    """See `gpusim_rl.sim.Sensor`."""

    def __init__(self, sim: MujocoTensors, sensor: int) -> None:
        model = sim.scene.model
        self._sim, self._stage = sim, int(model.sensor_needstage[sensor])
        columns = sim.scene.sensor_columns(model.sensor(sensor).name)
        self.size, self._columns = len(columns), slice(columns.start, columns.stop)
        sim.current_sensors(self._stage)

    @property
    def data(self) -> Float[Tensor, "envs size"]:
        return self._sim.current_sensors(self._stage)[:, self._columns]
