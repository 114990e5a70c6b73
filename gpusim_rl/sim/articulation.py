"""Articulations: their names for every simulator, their state over tensors in MuJoCo's layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import mujoco
import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gpusim_rl.errors import TaskError
from gpusim_rl.sim.dynamics import MujocoDynamics
from gpusim_rl.sim.interface import Contacts
from gpusim_rl.sim.masks import columns, write_columns, write_where
from gpusim_rl.sim.quaternion import quat_rotate, quat_rotate_inverse
from gpusim_rl.sim.scene import Scene
from gpusim_rl.sim.sensors import MujocoSensor, SitesOfBodies, find_elements

_SCALAR = (mujoco.mjtJoint.mjJNT_HINGE.value, mujoco.mjtJoint.mjJNT_SLIDE.value)
_ON_JOINTS = (mujoco.mjtTrn.mjTRN_JOINT.value, mujoco.mjtTrn.mjTRN_JOINTINPARENT.value)
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
        """An array that MuJoCo computes from the state, [envs, nbody or njnt, ...]; kept fresh from now on."""
        ...

    def current_sensors(self, stage: int) -> Float[Tensor, "envs nsensordata"]:
        """What the sensors up to a stage (`mujoco.mjtStage`) read in the current state; kept fresh from now on."""
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
    """The model's `qpos0` in float32; what is within its joint's limits stays within them."""
    pose, scalar = model.qpos0.astype(np.float32), np.isin(model.jnt_type, _SCALAR) & (model.jnt_limited != 0)
    columns, ranges = model.jnt_qposadr[scalar], model.jnt_range[scalar]
    exact, (low, high) = model.qpos0[columns], round_inwards(ranges).T
    within = (ranges[:, 0] <= exact) & (exact <= ranges[:, 1])
    pose[columns] = np.where(within, pose[columns].clip(low, high), pose[columns])
    return pose


class ArticulationLayout:
    """Names, limits, reference pose and places in MuJoCo's arrays of one articulation of a scene."""

    def __init__(self, scene: Scene, name: str, device: torch.device) -> None:
        self.name, self._model = name, scene.model
        model = scene.model
        self._prefix = prefix = scene.prefix(name)

        def strip(full: str) -> str:
            return full.removeprefix(prefix)

        bodies = scene.bodies_of(name)
        if not bodies:
            known = scene.articulation_names
            raise TaskError(f"the scene has no articulation {name!r}; it has {known}")
        self._body_ids = bodies
        self.body_names = [strip(model.body(i).name) for i in bodies]
        root = bodies[0]
        joints = [j for j in range(model.njnt) if model.jnt_bodyid[j] in set(bodies)]
        free = mujoco.mjtJoint.mjJNT_FREE.value
        self._free = bool(joints) and int(model.jnt_type[joints[0]]) == free
        if self._free:
            q, v = int(model.jnt_qposadr[joints[0]]), int(model.jnt_dofadr[joints[0]])
            self._root_q, self._root_v = slice(q, q + 7), slice(v, v + 6)
        joints = [j for j in joints if int(model.jnt_type[j]) in _SCALAR]  # a ball joint's position is not one number
        self.joint_ids = joints
        self.joint_names = [strip(model.joint(j).name) for j in joints]
        # The compiler numbers a tree's joints in one run. So all of them are one slice, views instead of gathers, where
        # no object and no ball joint is between them.
        in_qpos, in_qvel = model.jnt_qposadr[joints].tolist(), model.jnt_dofadr[joints].tolist()
        self._joint_q, self._joint_v = columns(in_qpos, device), columns(in_qvel, device)

        def tensor(values: object) -> Tensor:
            return torch.as_tensor(values, dtype=torch.float32).to(device)

        def limits(ranges: np.ndarray, limited: np.ndarray) -> Tensor:
            return tensor(np.where(limited[:, None], ranges, [-np.inf, np.inf]))

        self.joint_limits = limits(round_inwards(model.jnt_range[joints]), model.jnt_limited[joints])
        pose = reference_pose(model)
        self.default_joint_pos = tensor(pose[in_qpos])
        pos, quat = model.body_pos[root], model.body_quat[root]
        if self._free:
            pos, quat = pose[self._root_q][:3], pose[self._root_q][3:]
        self.default_root_pos, self.default_root_quat = tensor(pos), tensor(quat)

        # Most actuators have one control. What has several (a servo with two targets) is there as `name/0`, `name/1`.
        controls, self.actuator_names = [], []
        for i in (i for i in range(model.nactuator) if self._drives(scene, i)):
            first, number = int(model.actuator_ctrladr[i]), int(model.actuator_ctrlnum[i])
            controls += range(first, first + number)
            label = strip(model.actuator(i).name)
            self.actuator_names += [label] if number == 1 else [f"{label}/{k}" for k in range(number)]
        self.control_limits = limits(model.actuator_ctrlrange[controls], model.actuator_ctrllimited[controls])
        # The sensors of an articulation's joints were added in one run, so they too are one slice.
        self._efforts: slice | None = None
        if name in scene.effort_sensors:
            first = int(model.sensor(f"{prefix}{self.joint_names[0]}/effort").adr[0])
            self._efforts = slice(first, first + len(self.joint_names))
        self._controls = columns(controls, device)

    def _drives(self, scene: Scene, actuator: int) -> bool:
        """Whether an actuator of the scene is this articulation's: of its file, and on no joint of another."""
        model = scene.model
        if not model.actuator(actuator).name.startswith(self._prefix):
            return False
        if int(model.actuator_trntype[actuator]) in _ON_JOINTS:
            return int(model.jnt_bodyid[model.actuator_trnid[actuator, 0]]) in self._body_ids
        return f"{self.name}/" == self._prefix

    def _find_bodies(self, names: Sequence[str]) -> list[int]:
        """Ids in the scene's model; raises TaskError for a name that does not exist."""
        for name in names:
            if name not in self.body_names:
                raise TaskError(f"{self.name!r} has no body {name!r}; it has {self.body_names}")
        return [self._body_ids[self.body_names.index(name)] for name in names]

    def _find_sites(self, names: Sequence[str]) -> tuple[list[int], Tensor, Tensor]:
        """Of sites the ids of their bodies in the scene's model, their places [m] and orientations in those."""
        model, ids = self._model, find_elements("site", names, self.name, self._prefix, self._model)
        pos, quat = (torch.as_tensor(values[ids], dtype=torch.float32) for values in (model.site_pos, model.site_quat))
        device = self.default_root_pos.device
        return [int(body) for body in model.site_bodyid[ids]], pos.to(device), quat.to(device)

    def _check_control(self, control: Any, num_envs: int) -> None:
        names = self.actuator_names
        hint = f"a task that passes its action on has num_actions = {len(names)}"
        check_shape(f"{self.name!r}.actuate(): control", control, (num_envs, len(names)), names, hint)

    def _check_effort(self, effort: Any, num_envs: int) -> None:
        names = self.joint_names
        check_shape(f"{self.name!r}.set_joint_effort(): effort", effort, (num_envs, len(names)), names)

    def _check_state(self, where: Any, state: Mapping[str, Any], num_envs: int) -> None:
        """Raises TaskError for what `set_state` cannot write; a value that is None stays as it is."""
        call, joints = f"{self.name!r}.set_state():", self.joint_names
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


def check_shape(what: str, value: Any, shape: tuple[int, ...], names: Sequence[str] = (), hint: str = "") -> None:
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


def check_wrench(bodies: Sequence[str], num_envs: int, force: Any, torque: Any) -> None:
    """Raises TaskError unless force and torque have shape [num_envs, bodies, 3]; a torque may be None."""
    shape = (num_envs, len(bodies), 3)
    check_shape("apply_wrench(): force", force, shape, bodies)
    if torque is not None:
        check_shape("apply_wrench(): torque", torque, shape, bodies)


def check_contact_sensors(scene: Scene, bodies: Sequence[str]) -> None:
    """Raises TaskError for a body (`<articulation>/<body>`) without a contact sensor."""
    for body in bodies:
        if body not in scene.contact_sensors:
            raise TaskError(f"body {body!r} has no contact sensor; call scene.add_contact_sensor in the task's scene()")


class MujocoArticulation(ArticulationLayout):
    """See `gpusim_rl.sim.Articulation`."""

    def __init__(self, sim: MujocoTensors, name: str) -> None:
        super().__init__(sim.scene, name, sim.device)
        self._sim = sim

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
        return MujocoBodies(self._sim, self._find_bodies(names))

    def contacts(self, names: Sequence[str]) -> Contacts:
        self._find_bodies(names)
        return MujocoContacts(self._sim, [f"{self._prefix}{body}" for body in names])

    def sites(self, names: Sequence[str]) -> SitesOfBodies:
        ids, pos, quat = self._find_sites(names)
        return SitesOfBodies(MujocoBodies(self._sim, ids), pos, quat)

    def sensor(self, name: str) -> MujocoSensor:
        (sensor,) = find_elements("sensor", [name], self.name, self._prefix, self._model)
        return MujocoSensor(self._sim, self._model, sensor)

    def dynamics(self, body: str) -> MujocoDynamics:
        sim, (body_id,) = self._sim, self._find_bodies([body])
        if not self.joint_ids:
            raise TaskError(f"{self.name!r} has no joints, and so no dynamics of joints")
        return MujocoDynamics(sim.scene.model, self.joint_ids, self._body_ids, body_id, sim.derived, sim.device)

    # control
    def actuate(self, control: Float[Tensor, "envs actuators"]) -> None:
        self._check_control(control, self._sim.num_envs)
        write_columns(self._sim.ctrl, self._controls, control)

    def set_joint_effort(self, effort: Float[Tensor, "envs joints"]) -> None:
        self._check_effort(effort, self._sim.num_envs)
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
        self._check_state(where, state, self._sim.num_envs)
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
        check_wrench(self._names, self._sim.num_envs, force, torque)
        self._sim.uses("xfrc_applied")
        torque = torch.zeros_like(force) if torque is None else torque
        self._sim.xfrc_applied.index_copy_(1, self._ids, torch.cat([force, torque], dim=-1))


class MujocoContacts:
    """See `gpusim_rl.sim.Contacts`; reads the sensors of `Scene.add_contact_sensor`."""

    def __init__(self, sim: MujocoTensors, bodies: list[str]) -> None:
        self._sim = sim
        model, sensors = sim.scene.model, sim.scene.contact_sensors
        check_contact_sensors(sim.scene, bodies)
        columns = []
        for body in bodies:
            for name in (sensors[body].wrench, sensors[body].body_pos, sensors[body].body_quat):
                sensor = model.sensor(name).id
                first = model.sensor_adr[sensor]
                columns += range(first, first + model.sensor_dim[sensor])
        self._columns = torch.tensor(columns, device=sim.device).view(len(bodies), -1)
        self._force_columns = self._columns[:, :3].flatten()

    def _read(self) -> tuple[Tensor, Tensor]:
        """Contact wrench about the body's origin, shape [envs, bodies, 2, 3], and orientation, of one physics step."""
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
