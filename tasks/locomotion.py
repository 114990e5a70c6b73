"""Base of Ant and Humanoid: run to a target far away."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gpusim_rl.env import Task, TaskConfig, Terms
from gpusim_rl.env.math import quat_rotate
from gpusim_rl.files.paths import assets_dir
from gpusim_rl.sim import Scene, Sim

TARGET_DISTANCE = 1000.0  # m; far enough that the direction to it stays +x over an episode


@dataclass(frozen=True, slots=True, kw_only=True)
class LocomotionConfig(TaskConfig):
    """Settings shared by Ant and Humanoid; values are in the yaml of each task."""

    up_weight: float
    heading_weight: float
    action_cost: float
    energy_cost: float
    joint_limit_cost: float
    alive_reward: float
    death_cost: float
    termination_height: float
    joint_vel_scale: float


Cfg = TypeVar("Cfg", bound=LocomotionConfig)


class Locomotion(Task[Cfg]):
    """Robot with a motor at each joint; runs along +x from its reference pose until it falls.

    Subclasses define the energy and joint limit costs.
    """

    ROBOT: ClassVar[str]  # name in the scene and of the MJCF in tasks/assets
    FEET: ClassVar[Sequence[str]]  # bodies with a contact sensor
    EFFORTS: ClassVar[bool] = False  # whether motor torques are observed
    units: ClassVar = {
        "height": "m",
        "lin_vel": "m/s",
        "ang_vel": "rad/s",
        "angles": "rad",
        "directions": "-",
        "joint_pos": "-",
        "joint_vel": "rad/s",
        "joint_effort": "N m",
        "foot_wrench": "N, N m",
        "actions": "-",
    }
    # Arguments of `Scene`. With the Euler integrator a policy can learn to spin through the air on energy from
    # integration errors; limiting the angular velocity prevents this.
    PHYSICS: ClassVar[Mapping[str, Any]]

    @classmethod
    def scene(cls, cfg: Cfg) -> Scene:
        scene = Scene(cfg.physics_hz, **cls.PHYSICS)
        scene.add_ground()
        scene.add(cls.ROBOT, assets_dir() / f"{cls.ROBOT}.xml")
        scene.add_contact_sensor(cls.ROBOT, cls.FEET)
        if cls.EFFORTS:
            scene.add_effort_sensors(cls.ROBOT)
        return scene

    def __init__(self, cfg: Cfg, sim: Sim) -> None:
        super().__init__(cfg, sim)
        self.robot = sim.articulation(self.ROBOT)
        self.feet = self.robot.contacts(self.FEET)
        self.num_actions = len(self.robot.actuator_names)
        self.joint_low, self.joint_high = self.robot.joint_limits.unbind(dim=1)
        self.joint_middle = 0.5 * (self.joint_low + self.joint_high)
        self.joint_range = 0.5 * (self.joint_high - self.joint_low)  # half the range, rad
        # A reference pose can be outside the joint limits, as for Ant's ankles: start at the nearest limit.
        self.start_joint_pos = self.robot.default_joint_pos.clamp(self.joint_low, self.joint_high)
        self.start_high = self.joint_high.clone()  # rad; upper limit of initial positions
        self.potential = torch.zeros(self.num_envs, device=self.device)  # -distance to the target / dt [m/s]
        self.target = torch.tensor([TARGET_DISTANCE, 0.0], device=self.device)
        self.axes = torch.eye(3, device=self.device)[None]
        self.senses = torch.tensor([1.0, 1.0, 1.0, -1.0], device=self.device)[:, None]  # -1: inverse rotation
        self.alive = torch.ones(self.num_envs, device=self.device)
        weights = {
            "progress": 1.0,
            "alive": cfg.alive_reward,
            "up": cfg.up_weight,
            "heading": cfg.heading_weight,
            "action_cost": -cfg.action_cost,
            "energy_cost": -cfg.energy_cost * cfg.joint_vel_scale,
            "joint_limit_cost": -cfg.joint_limit_cost,
        }
        self.terms, self.weights = tuple(weights), torch.tensor(list(weights.values()), device=self.device)[:, None]

    def reset(self, where: Bool[Tensor, " envs"]) -> None:
        num_joints = len(self.robot.joint_names)
        noise = self.random.uniform(-1.0, 1.0, 2, num_joints)
        joint_pos = torch.add(self.start_joint_pos, noise[:, 0], alpha=0.2)
        joint_pos = joint_pos.clamp(self.joint_low, self.start_high)
        self.robot.set_state(where, joint_pos=joint_pos, joint_vel=0.1 * noise[:, 1])
        _, distance = self._to_target()
        torch.where(where, -1.0 / self.dt * distance, self.potential, out=self.potential)

    def apply_action(self, action: Float[Tensor, "envs actions"]) -> None:
        self.robot.actuate(action)

    def observe(self) -> dict[str, Terms]:
        robot = self.robot
        terms = {
            **self._torso(),
            "joint_pos": (robot.joint_pos - self.joint_middle) / self.joint_range,
            "joint_vel": robot.joint_vel,
            **({"joint_effort": robot.joint_effort} if self.EFFORTS else {}),
            "foot_wrench": self.feet.in_body_frame().flatten(1),
            "actions": self.actions,
        }
        return {"policy": terms}

    def rewards(self) -> dict[str, Float[Tensor, " envs"]]:
        to_target, distance = self._to_target()
        forward, _, up = quat_rotate(self.robot.root_quat[:, None], self.axes).unbind(dim=1)
        potential = -1.0 / self.dt * distance
        progress = potential - self.potential
        self.potential.copy_(potential)
        heading = _dot(forward, to_target) / distance
        terms = {
            "progress": progress,
            "alive": self.alive,
            "up": (up[:, 2] > 0.93).float(),
            "heading": (heading / 0.8).clamp(max=1.0),
            "action_cost": self.actions.square().sum(dim=1),
            "energy_cost": self._energy(),
            "joint_limit_cost": self._at_limit(),
        }
        fell = self.terminated()
        values = torch.stack([terms[name] for name in self.terms]).mul_(self.weights).masked_fill_(fell, 0.0)
        return {**dict(zip(self.terms, values.unbind(), strict=True)), "death": self.cfg.death_cost * fell}

    def terminated(self) -> Bool[Tensor, " envs"]:
        return self.robot.root_pos[:, 2] < self.cfg.termination_height

    def _energy(self) -> Float[Tensor, " envs"]:
        """Return |action x joint velocity|, summed over the joints."""
        return (self.actions * self.robot.joint_vel).abs().sum(dim=1)

    @abstractmethod
    def _at_limit(self) -> Float[Tensor, " envs"]:
        """Return the (possibly weighted) number of joints at their limits."""

    def _torso(self) -> Terms:
        """Return the torso's observation terms, 12 numbers: height, velocities, angles, directions."""
        robot = self.robot
        to_target, distance = self._to_target()
        # one rotation: torso axes to the world frame, torso velocity to the torso frame
        vectors = torch.cat([self.axes.expand(self.num_envs, 3, 3), robot.root_lin_vel[:, None]], dim=1)
        forward, left, up, lin_vel = quat_rotate(robot.root_quat[:, None], vectors, self.senses).unbind(dim=1)
        # extrinsic angles about x and z, from the elements of the rotation matrix
        roll, yaw = torch.atan2(left[:, 2], up[:, 2]), torch.atan2(forward[:, 1], forward[:, 0])
        ahead = _dot(forward, to_target)
        angle_to_target = torch.atan2(_cross(forward, to_target), ahead)
        angles = torch.stack([yaw, roll, angle_to_target, up[:, 2], ahead / distance], dim=1)
        return {
            "height": robot.root_pos[:, 2:],
            "lin_vel": lin_vel,
            "ang_vel": robot.root_ang_vel_local,
            "angles": angles[:, :3],
            "directions": angles[:, 3:],
        }

    def _to_target(self) -> tuple[Float[Tensor, "envs 2"], Float[Tensor, " envs"]]:
        """Return the horizontal vector to the target and its length [m]."""
        way = self.target - self.robot.root_pos[:, :2]
        return way, torch.linalg.vector_norm(way, dim=1)


def _dot(a: Float[Tensor, "envs _"], b: Float[Tensor, "envs _"]) -> Float[Tensor, " envs"]:
    """Return a_x b_x + a_y b_y."""
    return torch.addcmul(a[:, 0] * b[:, 0], a[:, 1], b[:, 1])


def _cross(a: Float[Tensor, "envs _"], b: Float[Tensor, "envs _"]) -> Float[Tensor, " envs"]:
    """Return a_x b_y - a_y b_x."""
    return torch.addcmul(a[:, 0] * b[:, 1], a[:, 1], b[:, 0], value=-1.0)
