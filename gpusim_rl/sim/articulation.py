"""Articulations as views of tensors in MuJoCo's layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mujoco
import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gpusim_rl.errors import TaskError, available
from gpusim_rl.sim.bodies import Bodies, Contacts, Mocap, MujocoTensors, Sensor, Sites
from gpusim_rl.sim.dynamics import Dynamics
from gpusim_rl.sim.masks import check_shape, columns, read_columns, write_columns, write_where
from gpusim_rl.sim.quaternion import quat_rotate, quat_rotate_inverse

_SCALAR = (mujoco.mjtJoint.mjJNT_HINGE.value, mujoco.mjtJoint.mjJNT_SLIDE.value)
_ROOT_WIDTHS = {"root_pos": 3, "root_quat": 4, "root_lin_vel": 3, "root_ang_vel": 3, "root_ang_vel_local": 3}


def round_inwards(ranges: np.ndarray) -> np.ndarray:
    """Round ranges [..., 2] inwards to float32, because robots often start exactly at a joint limit."""
    rounded = ranges.astype(np.float32)
    low, high = rounded[..., 0], rounded[..., 1]
    low = np.where(low < ranges[..., 0], np.nextafter(low, np.float32(np.inf)), low)
    high = np.where(high > ranges[..., 1], np.nextafter(high, np.float32(-np.inf)), high)
    return np.stack([low, high], axis=-1)


def reference_pose(model: mujoco.MjModel) -> np.ndarray:
    """Return the model's `qpos0` in float32; rounding never moves a joint out of its limits."""
    pose, scalar = model.qpos0.astype(np.float32), np.isin(model.jnt_type, _SCALAR) & (model.jnt_limited != 0)
    columns, ranges = model.jnt_qposadr[scalar], model.jnt_range[scalar]
    exact, (low, high) = model.qpos0[columns], round_inwards(ranges).T
    within = (ranges[:, 0] <= exact) & (exact <= ranges[:, 1])
    pose[columns] = np.where(within, pose[columns].clip(low, high), pose[columns])
    return pose


class Articulation:
    """Articulation created by `Scene.add`. Its tensors over all worlds may be views: do not write to them.

    Get bodies, sites, sensors, mocap bodies and dynamics once, in the task's `__init__`. Methods raise TaskError for
    unknown names and wrong shapes; nothing is broadcast.

    Attributes:
        name: Name in the scene.
        free_root: Whether the root moves freely; otherwise the base is fixed.
        joint_names: Names of hinges and slides, in file order.
        body_names: Names of bodies, in file order.
        actuator_names: Names of controls, in the order of `actuate`: from the file, then from `Scene.add_actuators`.
        joint_limits: Joint limits [rad or m], shape [joints, 2]; infinite if unlimited. Rounded inwards to float32.
        control_limits: Control limits in the actuators' units, shape [actuators, 2]; infinite if unlimited.
        default_joint_pos: Joint positions of the reference pose [rad or m], shape [joints].
        default_root_pos: Root position of the reference pose [m], shape [3].
        default_root_quat: Root orientation of the reference pose, wxyz, shape [4].
    """

    def __init__(self, sim: MujocoTensors, name: str) -> None:
        scene, model = sim.scene, sim.scene.model
        self._sim, self._scene, self._model, self.name = sim, scene, model, name
        bodies = scene.elements_of(name, "body")
        if not bodies:
            raise TaskError(f"no articulation {name!r}", hint=available(name, scene.articulation_names))
        joints = scene.elements_of(name, "joint")
        self._body_ids, self.body_names = list(bodies.values()), list(bodies)
        self._joint_ids, self.joint_names = list(joints.values()), list(joints)
        root = self._body_ids[0]
        joint = int(model.body_jntadr[root])
        self.free_root = joint >= 0 and int(model.jnt_type[joint]) == mujoco.mjtJoint.mjJNT_FREE.value
        if self.free_root:
            q, v = int(model.jnt_qposadr[joint]), int(model.jnt_dofadr[joint])
            self._root_q, self._root_v = slice(q, q + 7), slice(v, v + 6)
        self._root_mocap = int(model.body_mocapid[root])
        self._mocaps = columns([i for i in model.body_mocapid[self._body_ids].tolist() if i >= 0], sim.device)
        # A slice of consecutive joints gives views instead of gathers.
        in_qpos, in_qvel = (adr[self._joint_ids].tolist() for adr in (model.jnt_qposadr, model.jnt_dofadr))
        self._joint_q, self._joint_v = columns(in_qpos, sim.device), columns(in_qvel, sim.device)

        ranges = round_inwards(model.jnt_range[self._joint_ids])
        self.joint_limits = self._limits(ranges, model.jnt_limited[self._joint_ids])
        pose = reference_pose(model)
        self.default_joint_pos = self._tensor(pose[in_qpos])
        pos, quat = model.body_pos[root], model.body_quat[root]
        if self.free_root:
            pos, quat = pose[self._root_q][:3], pose[self._root_q][3:]
        self.default_root_pos, self.default_root_quat = self._tensor(pos), self._tensor(quat)

        # Multiple controls of an actuator (a servo with two targets) are named `name/0`, `name/1`.
        controls, self.actuator_names = [], []
        for label, i in scene.elements_of(name, "actuator").items():
            first, number = int(model.actuator_ctrladr[i]), int(model.actuator_ctrlnum[i])
            controls += range(first, first + number)
            self.actuator_names += [label] if number == 1 else [f"{label}/{k}" for k in range(number)]
        self._controls = columns(controls, sim.device)
        self.control_limits = self._limits(model.actuator_ctrlrange[controls], model.actuator_ctrllimited[controls])
        self._efforts: slice | None = None
        if name in scene.effort_sensors:
            first = scene.sensor_columns(f"{model.joint(self._joint_ids[0]).name}/effort")[0]
            self._efforts = slice(first, first + len(self._joint_ids))

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.as_tensor(values, dtype=torch.float32).to(self._sim.device)

    def _limits(self, ranges: np.ndarray, limited: np.ndarray) -> Tensor:
        return self._tensor(np.where(limited[:, None], ranges, [-np.inf, np.inf]))

    def _find(self, kind: str, names: Sequence[str]) -> list[int]:
        ids = self._scene.elements_of(self.name, kind)
        for name in names:
            if name not in ids:
                raise TaskError(f"{self.name!r} has no {kind} {name!r}", hint=available(name, ids))
        return [ids[name] for name in names]

    @property
    def root_pos(self) -> Float[Tensor, "envs 3"]:
        """Position of the root body [m], world frame."""
        if self.free_root:
            return self._sim.qpos[:, self._root_q][:, :3]
        if self._root_mocap >= 0:
            return self._sim.mocap_pos[:, self._root_mocap]
        return self.default_root_pos.expand(self._sim.num_envs, 3)

    @property
    def root_quat(self) -> Float[Tensor, "envs 4"]:
        """Orientation of the root body, wxyz."""
        if self.free_root:
            return self._sim.qpos[:, self._root_q][:, 3:]
        if self._root_mocap >= 0:
            return self._sim.mocap_quat[:, self._root_mocap]
        return self.default_root_quat.expand(self._sim.num_envs, 4)

    @property
    def root_lin_vel(self) -> Float[Tensor, "envs 3"]:
        """Velocity of the root body's origin [m/s], world frame."""
        if self.free_root:
            return self._sim.qvel[:, self._root_v][:, :3]
        return torch.zeros_like(self.root_pos)

    @property
    def root_ang_vel_local(self) -> Float[Tensor, "envs 3"]:
        """Angular velocity of the root body [rad/s], body frame."""
        if self.free_root:  # MuJoCo uses the body frame
            return self._sim.qvel[:, self._root_v][:, 3:]
        return torch.zeros_like(self.root_pos)

    @property
    def root_ang_vel(self) -> Float[Tensor, "envs 3"]:
        """Angular velocity of the root body [rad/s], world frame."""
        return quat_rotate(self.root_quat, self.root_ang_vel_local)

    @property
    def joint_pos(self) -> Float[Tensor, "envs joints"]:
        """Joint positions [rad or m]."""
        return self._sim.qpos[:, self._joint_q]

    @property
    def joint_vel(self) -> Float[Tensor, "envs joints"]:
        """Joint velocities [rad/s or m/s]."""
        return self._sim.qvel[:, self._joint_v]

    @property
    def joint_effort(self) -> Float[Tensor, "envs joints"]:
        """Actuator force on each joint in the last physics step [N m or N], 0 after a reset."""
        if self._efforts is None:
            raise TaskError(f"{self.name!r} has no effort sensors", hint="Try scene.add_effort_sensors in scene()")
        return self._sim.sensordata[:, self._efforts]

    @property
    def mocap_poses(self) -> Float[Tensor, "envs poses"]:
        """Positions [m] and orientations (wxyz) of mocap bodies, 7 numbers each; empty if no task moves them."""
        if not self._sim.moves_mocap:
            return torch.zeros(self._sim.num_envs, 0, device=self._sim.device)
        poses = [read_columns(each, self._mocaps) for each in (self._sim.mocap_pos, self._sim.mocap_quat)]
        return torch.cat(poses, dim=-1).flatten(1)

    def bodies(self, names: Sequence[str]) -> Bodies:
        """Select bodies by name."""
        return Bodies(self._sim, self._find("body", names))

    def mocap(self, name: str) -> Mocap:
        """Return a mocap body, which the task moves with `Mocap.set`."""
        return Mocap(self._sim, self._find("body", [name])[0])

    def contacts(self, names: Sequence[str]) -> Contacts:
        """Return the contact wrenches of bodies with a contact sensor (`Scene.add_contact_sensor`)."""
        return Contacts(self._sim, self._find("body", names))

    def sites(self, names: Sequence[str]) -> Sites:
        """Select sites by name."""
        ids, model = self._find("site", names), self._model
        bodies = Bodies(self._sim, model.site_bodyid[ids].tolist())
        return Sites(bodies, self._tensor(model.site_pos[ids]), self._tensor(model.site_quat[ids]))

    def sensor(self, name: str) -> Sensor:
        """Return a sensor from the file or from `Scene.add_sensor`; only requested sensors are computed.

        Position and velocity sensors (gyro, frame position, rangefinder, ...) cost about as much as body poses. Force
        and acceleration sensors (accelerometer, force, torque, touch, actuator force) cost about one physics step per
        control step.
        """
        return Sensor(self._sim, self._find("sensor", [name])[0])

    def dynamics(self, body: str) -> Dynamics:
        """Return the articulation's mass matrix and a body's Jacobian; per-world masses are ignored."""
        (body_id,) = self._find("body", [body])
        if not self._joint_ids:
            raise TaskError(f"{self.name!r} has no joints: dynamics() requires at least one")
        return Dynamics(self._sim, self._joint_ids, self._body_ids, body_id)

    def actuate(self, control: Float[Tensor, "envs actuators"]) -> None:
        """Set the controls, in the order of `actuator_names`; they stay in effect until set again or reset."""
        names = self.actuator_names
        hint = f"Try num_actions = {len(names)} if each action is one control"
        check_shape(f"{self.name!r}.actuate(): control", control, (self._sim.num_envs, len(names)), names, hint)
        write_columns(self._sim.ctrl, self._controls, control)

    def set_joint_effort(self, effort: Float[Tensor, "envs joints"]) -> None:
        """Apply an additional effort to each joint [N m or N]; it stays in effect until set again or reset."""
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
        root_ang_vel_local: Float[Tensor, "envs 3"] | None = None,
        joint_pos: Float[Tensor, "envs joints"] | None = None,
        joint_vel: Float[Tensor, "envs joints"] | None = None,
        mocap_poses: Float[Tensor, "envs poses"] | None = None,
    ) -> None:
        """Write the masked worlds' state; omitted values stay unchanged. Root velocities: world frame, or `_local`."""
        state = {"root_pos": root_pos, "root_quat": root_quat, "joint_pos": joint_pos, "joint_vel": joint_vel}
        state |= {"root_lin_vel": root_lin_vel, "root_ang_vel": root_ang_vel, "root_ang_vel_local": root_ang_vel_local}
        self._check_state(where, state)
        if mocap_poses is not None:
            values = mocap_poses.view(self._sim.num_envs, -1, 7)
            for target, value in ((self._sim.mocap_pos, values[..., :3]), (self._sim.mocap_quat, values[..., 3:])):
                value = torch.where(where[:, None, None], value, read_columns(target, self._mocaps))
                write_columns(target, self._mocaps, value)
        if root_quat is not None and root_ang_vel is None and root_ang_vel_local is None:
            root_ang_vel = self.root_ang_vel  # unchanged in the world frame; MuJoCo stores it in the body frame
        if root_ang_vel is not None:
            quat = self.root_quat if root_quat is None else root_quat
            state["root_ang_vel_local"], state["root_ang_vel"] = quat_rotate_inverse(quat, root_ang_vel), None
        places = {"joint_pos": (self._sim.qpos, self._joint_q), "joint_vel": (self._sim.qvel, self._joint_v)}
        for name, value in state.items():
            if value is not None:
                target = getattr(self, name)
                write_where(where[:, None], value, target)
                if name in places and not isinstance(places[name][1], slice):  # `target` is a copy
                    write_columns(*places[name], target)
        self._sim.wrote_state(where)

    def _check_state(self, where: Bool[Tensor, " envs"], state: Mapping[str, Tensor | None]) -> None:
        call, num_envs, joints = f"{self.name!r}.set_state():", self._sim.num_envs, self.joint_names
        if not self.free_root and any(state[key] is not None for key in _ROOT_WIDTHS):
            hint = f"Try .mocap({self.body_names[0]!r}).set(where, pos=...)" if self._root_mocap >= 0 else ""
            raise TaskError(f"{call} cannot set the root state of a fixed base", hint=hint)
        if state["root_ang_vel"] is not None and state["root_ang_vel_local"] is not None:
            raise TaskError(key=f"{call} root_ang_vel", expected="the world or the local frame", got="both")
        check_shape(f"{call} where", where, (num_envs,))
        if where.dtype != torch.bool:
            raise TaskError(key=f"{call} where", expected="torch.bool", got=where.dtype)
        for key, value in state.items():
            names = () if key in _ROOT_WIDTHS else joints
            if value is not None:
                check_shape(f"{call} {key}", value, (num_envs, _ROOT_WIDTHS.get(key, len(joints))), names)
