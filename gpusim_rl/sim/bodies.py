"""Bodies, sites, contacts and sensors of an articulation as views of tensors in MuJoCo's layout."""

from __future__ import annotations

from typing import Protocol

import mujoco
import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gpusim_rl.errors import TaskError, available
from gpusim_rl.sim.fused import fits, wrench_in_body_frame
from gpusim_rl.sim.masks import check_shape, columns, write_where
from gpusim_rl.sim.quaternion import quat_multiply, quat_rotate, quat_rotate_inverse
from gpusim_rl.sim.scene import Scene


class MujocoTensors(Protocol):
    """Simulator interface used by articulations: MuJoCo's arrays as float32 tensors."""

    name: str
    num_envs: int
    device: torch.device
    scene: Scene
    qpos: Float[Tensor, "envs nq"]
    qvel: Float[Tensor, "envs nv"]
    ctrl: Float[Tensor, "envs nu"]
    qfrc_applied: Float[Tensor, "envs nv"]
    xfrc_applied: Float[Tensor, "envs nbody 6"]
    mocap_pos: Float[Tensor, "envs nmocap 3"]
    mocap_quat: Float[Tensor, "envs nmocap 4"]
    moves_mocap: bool  # whether a task moves mocap bodies
    sensordata: Float[Tensor, "envs nsensordata"]
    """Sensor readings of the last physics step, if `Scene.steps_compute_sensors`."""

    def derived(self, field: str) -> Tensor:
        """Return an array derived from the state, [envs, nbody or njnt, ...], kept up to date from now on."""
        ...

    def current_sensors(self, stage: int) -> Float[Tensor, "envs nsensordata"]:
        """Return current readings of sensors up to a stage (`mujoco.mjtStage`), kept up to date from now on."""
        ...

    def wrote_state(self, where: Bool[Tensor, " envs"]) -> None:
        """Record that qpos or qvel was written in the masked worlds."""

    def wrote_mocap(self, where: Bool[Tensor, " envs"]) -> None:
        """Record that mocap_pos or mocap_quat was written in the masked worlds."""

    def uses(self, field: str) -> None:
        """Declare that a task will write an input (qfrc_applied, xfrc_applied, mocap_pos or mocap_quat)."""


class Bodies:
    """Bodies of an articulation, in the file's body frames; up to date whenever read."""

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
        """Positions of the origins [m], world frame."""
        return self._select("xpos")

    @property
    def quat(self) -> Float[Tensor, "envs bodies 4"]:
        """Orientations, wxyz."""
        return self._select("xquat")

    @property
    def lin_vel(self) -> Float[Tensor, "envs bodies 3"]:
        """Velocities of the origins [m/s], world frame."""
        # cvel is the spatial velocity (angular first) at the tree's centre of mass, world axes
        velocity = self._select("cvel")
        lever = self.pos - self._sim.derived("subtree_com")[:, self._roots]
        return velocity[..., 3:] + torch.linalg.cross(velocity[..., :3], lever)

    @property
    def ang_vel(self) -> Float[Tensor, "envs bodies 3"]:
        """Angular velocities [rad/s], world frame."""
        return self._select("cvel")[..., :3]

    def state(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return positions, orientations and velocities (angular, then linear), in fewer kernels than one by one."""
        pos, velocity = self.pos, self._select("cvel")
        lever = pos - self._sim.derived("subtree_com")[:, self._roots]
        velocity[..., 3:].add_(torch.linalg.cross(velocity[..., :3], lever))
        return pos, self.quat, velocity

    @property
    def wrench(self) -> Float[Tensor, "envs bodies 6"]:
        """Copy of the force [N] and torque [N m] set by `apply_wrench`."""
        return self._sim.xfrc_applied.index_select(1, self._ids)

    def apply_wrench(
        self, force: Float[Tensor, "envs bodies 3"], torque: Float[Tensor, "envs bodies 3"] | None = None
    ) -> None:
        """Apply a force [N] and a torque [N m], world frame, at the centres of mass; held until set again or reset."""
        shape = (self._sim.num_envs, len(self._names), 3)
        check_shape("apply_wrench(): force", force, shape, self._names)
        if torque is not None:
            check_shape("apply_wrench(): torque", torque, shape, self._names)
        self._sim.uses("xfrc_applied")
        torque = torch.zeros_like(force) if torque is None else torque
        self._sim.xfrc_applied.index_copy_(1, self._ids, torch.cat([force, torque], dim=-1))


def mocap_start(model: mujoco.MjModel) -> tuple[np.ndarray, np.ndarray]:
    """Return initial positions [m] and orientations (wxyz) of mocap bodies, float32 [nmocap, 3] and [nmocap, 4]."""
    ids = np.flatnonzero(model.body_mocapid >= 0)
    ids = ids[np.argsort(model.body_mocapid[ids])]
    return model.body_pos[ids].astype(np.float32), model.body_quat[ids].astype(np.float32)


class Mocap:
    """Mocap body, moved by the task; bodies welded or connected to it follow. A reset restores the file's pose.

    Attributes:
        default_pos: Position in the file [m], shape [3].
        default_quat: Orientation in the file, wxyz, shape [4].
    """

    def __init__(self, sim: MujocoTensors, body: int) -> None:
        model = sim.scene.model
        self._sim, self._name, self._id = sim, model.body(body).name, int(model.body_mocapid[body])
        if self._id < 0:
            bodies = [model.body(i).name for i in np.flatnonzero(model.body_mocapid >= 0)]
            hint = available(self._name, bodies)
            raise TaskError(f'body {self._name!r} is not a mocap body: its file lacks mocap="true"', hint=hint)
        sim.uses("mocap_pos")
        sim.uses("mocap_quat")
        pos, quat = (torch.from_numpy(each[self._id]).to(sim.device) for each in mocap_start(model))
        self.default_pos, self.default_quat = pos, quat

    @property
    def pos(self) -> Float[Tensor, "envs 3"]:
        """Position [m], world frame; read-only."""
        return self._sim.mocap_pos[:, self._id]

    @property
    def quat(self) -> Float[Tensor, "envs 4"]:
        """Orientation, wxyz; read-only."""
        return self._sim.mocap_quat[:, self._id]

    def set(
        self,
        where: Bool[Tensor, " envs"],
        *,
        pos: Float[Tensor, "envs 3"] | None = None,
        quat: Float[Tensor, "envs 4"] | None = None,
    ) -> None:
        """Move the body in the masked worlds; omitted values stay unchanged. Raise TaskError for a wrong shape."""
        check_shape(f"mocap {self._name!r}: where", where, (self._sim.num_envs,))
        for name, value, target in (("pos", pos, self.pos), ("quat", quat, self.quat)):
            if value is not None:
                check_shape(f"mocap {self._name!r}: {name}", value, (self._sim.num_envs, target.shape[1]))
                write_where(where[:, None], value, target)
        self._sim.wrote_mocap(where)


class Contacts:
    """Net contact wrench in the last physics step on bodies with a contact sensor; zero after a reset."""

    def __init__(self, sim: MujocoTensors, ids: list[int]) -> None:
        self._sim, scene = sim, sim.scene
        columns = [scene.contact_columns(scene.model.body(i).name) for i in ids]
        self._columns = torch.tensor(columns, device=sim.device)
        self._force_columns = self._columns[:, :3].flatten()

    def _readings(self) -> Tensor:
        return self._sim.sensordata.index_select(1, self._columns.view(-1)).unflatten(1, self._columns.shape)

    def _read(self, data: Tensor) -> tuple[Tensor, Tensor]:
        """Return wrenches about the body origins, [envs, bodies, 2, 3], and body orientations."""
        wrench, contact_pos, body_pos, quat = data.split([6, 3, 3, 4], dim=-1)
        wrench = wrench.unflatten(-1, (2, 3))
        force, torque = wrench.unbind(dim=-2)
        # The sensor's torque is about the force-weighted mean of the contact points.
        torque += torch.linalg.cross(contact_pos - body_pos, force)
        return wrench, quat

    @property
    def force(self) -> Float[Tensor, "envs bodies 3"]:
        """Net contact force on the body [N], world frame."""
        return self._sim.sensordata.index_select(1, self._force_columns).unflatten(1, (-1, 3))

    @property
    def torque(self) -> Float[Tensor, "envs bodies 3"]:
        """Net contact torque about the body's origin [N m], world frame."""
        return self._read(self._readings())[0][..., 1, :]

    def in_body_frame(self) -> Float[Tensor, "envs bodies 6"]:
        """Return force [N] and torque [N m] in the body frame."""
        data = self._readings()
        if fits(data):
            return wrench_in_body_frame(data)
        wrench, quat = self._read(data)
        return quat_rotate_inverse(quat[..., None, :], wrench).flatten(-2)


class Sites:
    """Sites of an articulation, each at a fixed position [m] and orientation (wxyz) in its body's frame."""

    def __init__(self, bodies: Bodies, pos: Float[Tensor, "sites 3"], quat: Float[Tensor, "sites 4"]) -> None:
        self._bodies, self._pos, self._quat = bodies, pos, quat

    def _lever(self) -> Float[Tensor, "envs sites 3"]:
        quat = self._bodies.quat
        return quat_rotate(quat, self._pos.expand(*quat.shape[:-1], 3))

    @property
    def pos(self) -> Float[Tensor, "envs sites 3"]:
        """Positions of the origins [m], world frame."""
        return self._bodies.pos + self._lever()

    @property
    def quat(self) -> Float[Tensor, "envs sites 4"]:
        """Orientations, wxyz."""
        quat = self._bodies.quat
        return quat_multiply(quat, self._quat.expand_as(quat))

    @property
    def lin_vel(self) -> Float[Tensor, "envs sites 3"]:
        """Velocities of the origins [m/s], world frame."""
        return self._bodies.lin_vel + torch.linalg.cross(self._bodies.ang_vel, self._lever())

    @property
    def ang_vel(self) -> Float[Tensor, "envs sites 3"]:
        """Angular velocities [rad/s], world frame."""
        return self._bodies.ang_vel


class Sensor:
    """Sensor in every world, with `size` readings: 3 for a gyro, 4 for an orientation, 1 for a rangefinder."""

    def __init__(self, sim: MujocoTensors, sensor: int) -> None:
        model = sim.scene.model
        self._sim, self._stage = sim, int(model.sensor_needstage[sensor])
        columns = sim.scene.sensor_columns(model.sensor(sensor).name)
        self.size, self._columns = len(columns), slice(columns.start, columns.stop)
        # Contacts in the current state would cost another step. Newton's steps do not compute contact sensors.
        self._late = model.sensor_type[sensor] == mujoco.mjtSensor.mjSENS_CONTACT and sim.name != "newton"
        if not self._late:
            sim.current_sensors(self._stage)

    @property
    def data(self) -> Float[Tensor, "envs size"]:
        """Readings in the current state, under the controls and forces of the last step.

        Units are m, m/s, m/s^2, rad/s, N, N m; orientations are wxyz. An accelerometer reads 9.81 m/s^2 upwards at
        rest; a rangefinder reads -1 without a hit. Contact sensors report the last physics step, and 0 after a reset.
        """
        sensors = self._sim.sensordata if self._late else self._sim.current_sensors(self._stage)
        return sensors[:, self._columns]
