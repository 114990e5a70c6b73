"""Tasks of Gymnasium and of the DeepMind Control Suite, written like a user's, on the original files.

They follow Gymnasium's `envs/mujoco/*_v5.py` and dm_control's `suite/*.py` (Tassa et al. 2018, arXiv 1801.00690).
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import mujoco
import torch
from torch import Tensor

from gpusim_rl.env import Task, TaskConfig, Terms
from gpusim_rl.env.math import quat_multiply, quat_rotate, quat_rotate_inverse, tolerance
from gpusim_rl.sim import Scene, Sim

GYMNASIUM = Path((find_spec("gymnasium") or sys).origin or "").parent / "envs" / "mujoco" / "assets"  # type: ignore[union-attr]
SUITE = Path(__file__).parent / "robots" / "dm_control"
INFINITY = float("inf")


class Peer(Task[TaskConfig]):
    """Robot with its own file: random start around the reference pose, actions are controls, no termination."""

    Config = TaskConfig
    FILE: ClassVar[Path]
    FRAME_SKIP: ClassVar[int]
    EPISODE: ClassVar[int] = 1000
    START: ClassVar[float] = 0.1

    @classmethod
    def settings(cls) -> TaskConfig:
        """Return rates and limits of the file, decimation and time limit of the peer."""
        model = mujoco.MjModel.from_xml_path(str(cls.FILE))
        physics_hz = 1.0 / model.opt.timestep
        return TaskConfig(
            physics_hz=physics_hz,
            control_hz=physics_hz / cls.FRAME_SKIP,
            episode_length=cls.EPISODE,
            clip_actions=float(model.actuator_ctrlrange.max()),
            clip_observations=None,
            randomize_episode_start=False,
        )

    @classmethod
    def scene(cls, cfg: TaskConfig) -> Scene:
        scene = Scene(cfg.physics_hz)
        scene.add("robot", cls.FILE)
        return scene

    def __init__(self, cfg: TaskConfig, sim: Sim) -> None:
        super().__init__(cfg, sim)
        self.robot = sim.articulation("robot")
        self.num_actions = len(self.robot.actuator_names)

    def reset(self, where: Tensor) -> None:
        joints = len(self.robot.joint_names)
        joint_pos = self.robot.default_joint_pos + self.random.uniform(-self.START, self.START, joints)
        self.robot.set_state(where, joint_pos=joint_pos, joint_vel=self.random.uniform(-0.1, 0.1, joints))

    def apply_action(self, action: Tensor) -> None:
        self.robot.actuate(action)

    def terminated(self) -> Tensor:
        return torch.zeros_like(self.progress, dtype=torch.bool)


# Gymnasium


class Pusher(Peer):
    FILE = GYMNASIUM / "pusher_v5.xml"
    FRAME_SKIP, EPISODE = 5, 100

    def __init__(self, cfg: TaskConfig, sim: Sim) -> None:
        super().__init__(cfg, sim)
        self.ends = self.robot.bodies(["tips_arm", "object", "goal"])

    def observe(self) -> dict[str, Terms]:
        terms = {
            "joint_pos": self.robot.joint_pos[:, :7],
            "joint_vel": self.robot.joint_vel[:, :7],
            "ends": self.ends.pos.flatten(1),
        }
        return {"policy": terms}

    def rewards(self) -> dict[str, Tensor]:
        tip, cylinder, goal = self.ends.pos.unbind(dim=1)
        return {
            "near": -0.5 * (cylinder - tip).norm(dim=1),
            "distance": -(cylinder - goal).norm(dim=1),
            "control": -0.1 * self.actions.square().sum(dim=1),
        }


class Swimmer(Peer):
    FILE = GYMNASIUM / "swimmer.xml"
    FRAME_SKIP = 4

    def __init__(self, cfg: TaskConfig, sim: Sim) -> None:
        super().__init__(cfg, sim)
        self.x_before = torch.zeros(self.num_envs, device=self.device)

    def apply_action(self, action: Tensor) -> None:
        self.x_before.copy_(self.robot.joint_pos[:, 0])
        super().apply_action(action)

    def observe(self) -> dict[str, Terms]:
        return {"policy": {"joint_pos": self.robot.joint_pos[:, 2:], "joint_vel": self.robot.joint_vel}}

    def rewards(self) -> dict[str, Tensor]:
        forward = (self.robot.joint_pos[:, 0] - self.x_before) / self.dt
        return {"forward": forward, "control": -1e-4 * self.actions.square().sum(dim=1)}


class InvertedDoublePendulum(Peer):
    FILE = GYMNASIUM / "inverted_double_pendulum.xml"
    FRAME_SKIP = 5

    @classmethod
    def scene(cls, cfg: TaskConfig) -> Scene:
        scene = super().scene(cfg)
        scene.add_sensor("robot", "limit", "jointlimitfrc", joint="slider")
        return scene

    def __init__(self, cfg: TaskConfig, sim: Sim) -> None:
        super().__init__(cfg, sim)
        self.tip, self.limit = self.robot.sites(["tip"]), self.robot.sensor("limit")

    def reset(self, where: Tensor) -> None:
        super().reset(where)
        start = self.robot.joint_pos.clone()
        start[:, 0] = self.random.uniform(-1.0, 1.0)  # some near the ends of the rail
        self.robot.set_state(where, joint_pos=start)

    def observe(self) -> dict[str, Terms]:
        pos = self.robot.joint_pos
        terms = {
            "cart": pos[:, :1],
            "sin": pos[:, 1:].sin(),
            "cos": pos[:, 1:].cos(),
            "joint_vel": self.robot.joint_vel.clamp(-10.0, 10.0),
            "limit": -pos[:, :1].sign() * self.limit.data.clamp(max=10.0),  # the sensor measures the magnitude
        }
        return {"policy": terms}

    def rewards(self) -> dict[str, Tensor]:
        x, _, y = self.tip.pos[:, 0].unbind(dim=1)
        _, v1, v2 = self.robot.joint_vel.unbind(dim=1)
        return {
            "alive": 10.0 * (~self.terminated()).float(),
            "distance": -0.01 * x**2 - (y - 2.0) ** 2,
            "speed": -1e-3 * v1**2 - 5e-3 * v2**2,
        }

    def terminated(self) -> Tensor:
        return self.tip.pos[:, 0, 2] <= 1.0


class GymnasiumHumanoid(Peer):
    FILE = GYMNASIUM / "humanoid.xml"
    FRAME_SKIP, START = 5, 0.01

    @classmethod
    def scene(cls, cfg: TaskConfig) -> Scene:
        scene = super().scene(cfg)
        names = [scene.model.body(i).name.removeprefix("robot/") for i in scene.bodies_of("robot")]
        scene.add_contact_sensor("robot", names)
        scene.add_effort_sensors("robot")
        return scene

    def __init__(self, cfg: TaskConfig, sim: Sim) -> None:
        super().__init__(cfg, sim)
        names, model = self.robot.body_names, sim.scene.model
        self.bodies, self.contacts = self.robot.bodies(names), self.robot.contacts(names)
        ids = sim.scene.bodies_of("robot")

        def constant(values: object) -> Tensor:
            return torch.as_tensor(values, dtype=torch.float32, device=self.device).expand(self.num_envs, -1, -1)

        self.mass, self.inertia = constant(model.body_mass[ids, None]), constant(model.body_inertia[ids])
        self.centre, self.axes = constant(model.body_ipos[ids]), constant(model.body_iquat[ids])
        self.x_before = torch.zeros(self.num_envs, device=self.device)

    def _centres(self) -> tuple[Tensor, Tensor]:
        """Return centres of mass of the bodies [envs, bodies, 3] and of all [envs, 1, 3]."""
        centres = self.bodies.pos + quat_rotate(self.bodies.quat, self.centre)
        return centres, (self.mass * centres).sum(dim=1, keepdim=True) / self.mass.sum(dim=1, keepdim=True)

    def apply_action(self, action: Tensor) -> None:
        self.x_before.copy_(self._centres()[1][:, 0, 0])
        super().apply_action(action)

    def _inertia(self) -> Tensor:
        """Return each body's inertia about the common centre of mass: xx, yy, zz, xy, xz, yz, mass * lever, mass."""
        centres, middle = self._centres()
        quat = quat_multiply(self.bodies.quat, self.axes)
        unit = torch.eye(3, device=self.device).expand(*quat.shape[:2], 3, 3)
        axes = quat_rotate(quat[..., None, :].expand(-1, -1, 3, -1), unit).transpose(-1, -2)
        lever = centres - middle
        about = (axes * self.inertia[..., None, :]) @ axes.transpose(-1, -2)
        square = lever.square().sum(dim=-1, keepdim=True)[..., None] * unit - lever[..., None] * lever[..., None, :]
        about = about + self.mass[..., None] * square
        rows, columns = [0, 1, 2, 0, 0, 1], [0, 1, 2, 1, 2, 2]
        return torch.cat([about[..., rows, columns], self.mass * lever, self.mass], dim=-1)

    def _velocity(self) -> Tensor:
        """Return each body's angular and linear velocity at the common centre of mass."""
        spin, lever = self.bodies.ang_vel, self._centres()[1] - self.bodies.pos
        return torch.cat([spin, self.bodies.lin_vel + torch.linalg.cross(spin, lever)], dim=-1)

    def _contact(self) -> Tensor:
        """Return each body's contact torque about the common centre of mass, and force."""
        lever, force = self.bodies.pos - self._centres()[1], self.contacts.force
        return torch.cat([self.contacts.torque + torch.linalg.cross(lever, force), force], dim=-1)

    def observe(self) -> dict[str, Terms]:
        robot = self.robot
        terms = {
            "height": robot.root_pos[:, 2:],
            "quat": robot.root_quat,
            "joint_pos": robot.joint_pos,
            "lin_vel": robot.root_lin_vel,
            "ang_vel": robot.root_ang_vel_local,
            "joint_vel": robot.joint_vel,
            "inertia": self._inertia().flatten(1),
            "velocity": self._velocity().flatten(1),
            "joint_effort": robot.joint_effort,
            "contact": self._contact().flatten(1),
        }
        return {"policy": terms}

    def rewards(self) -> dict[str, Tensor]:
        return {
            "forward": 1.25 * (self._centres()[1][:, 0, 0] - self.x_before) / self.dt,
            "alive": 5.0 * (~self.terminated()).float(),
            "control": -0.1 * self.actions.square().sum(dim=1),
            "contact": -(5e-7 * self._contact().square().sum(dim=(1, 2))).clamp(max=10.0),
        }

    def terminated(self) -> Tensor:
        height = self.robot.root_pos[:, 2]
        return ~((height > 1.0) & (height < 2.0))


# DeepMind Control Suite


class SuiteWalker(Peer):
    FILE = SUITE / "walker.xml"
    FRAME_SKIP = 10

    def __init__(self, cfg: TaskConfig, sim: Sim) -> None:
        super().__init__(cfg, sim)
        self.bodies = self.robot.bodies(self.robot.body_names)
        self.velocity = self.robot.sensor("torso_subtreelinvel")

    def _height(self) -> Tensor:
        return self.bodies.pos[:, 0, 2]

    def observe(self) -> dict[str, Terms]:
        w, x, y, z = self.bodies.quat.unbind(dim=-1)
        orientations = torch.stack([1.0 - 2.0 * (y * y + z * z), 2.0 * (x * z + w * y)], dim=-1)
        terms = {
            "orientations": orientations.flatten(1),
            "height": self._height()[:, None],
            "velocity": self.robot.joint_vel,
        }
        return {"policy": terms}

    def rewards(self) -> dict[str, Tensor]:
        _, x, y, _ = self.bodies.quat[:, 0].unbind(dim=-1)
        upright = 1.0 - x * x - y * y
        stand = (3.0 * tolerance(self._height(), (1.2, INFINITY), margin=0.6) + upright) / 4.0
        speed = self.velocity.data[:, 0]
        move = tolerance(speed, (1.0, INFINITY), margin=0.5, value_at_margin=0.5, sigmoid="linear")
        return {"walk": stand * (5.0 * move + 1.0) / 6.0}


class SuiteHumanoid(Peer):
    FILE = SUITE / "humanoid.xml"
    FRAME_SKIP = 5

    def __init__(self, cfg: TaskConfig, sim: Sim) -> None:
        super().__init__(cfg, sim)
        self.torso, self.head = self.robot.bodies(["torso"]), self.robot.bodies(["head"])
        self.ends = self.robot.bodies(["left_hand", "left_foot", "right_hand", "right_foot"])
        self.velocity = self.robot.sensor("torso_subtreelinvel")

    def _vertical(self) -> Tensor:
        """Return the components of the torso's axes along the world's z."""
        up = torch.tensor([0.0, 0.0, 1.0], device=self.device).expand(self.num_envs, 3)
        return quat_rotate_inverse(self.robot.root_quat, up)

    def observe(self) -> dict[str, Terms]:
        robot = self.robot
        ways = self.ends.pos - self.torso.pos
        terms = {
            "joint_angles": robot.joint_pos,
            "head_height": self.head.pos[:, 0, 2:],
            "extremities": quat_rotate_inverse(self.torso.quat.expand(-1, 4, -1), ways).flatten(1),
            "torso_vertical": self._vertical(),
            "com_velocity": self.velocity.data,
            "velocity": torch.cat([robot.root_lin_vel, robot.root_ang_vel_local, robot.joint_vel], dim=1),
        }
        return {"policy": terms}

    def rewards(self) -> dict[str, Tensor]:
        standing = tolerance(self.head.pos[:, 0, 2], (1.4, INFINITY), margin=0.35)
        upright = self._vertical()[:, 2]
        upright = tolerance(upright, (0.9, INFINITY), margin=1.9, value_at_margin=0.0, sigmoid="linear")
        effort = tolerance(self.actions, margin=1.0, value_at_margin=0.0, sigmoid="quadratic").mean(dim=1)
        speed = self.velocity.data[:, :2].norm(dim=1)
        move = tolerance(speed, (1.0, INFINITY), margin=1.0, value_at_margin=0.0, sigmoid="linear")
        return {"walk": standing * upright * (4.0 + effort) / 5.0 * (5.0 * move + 1.0) / 6.0}
