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
from gpusim_rl.env.math import quat_rotate_inverse
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
    sources: ClassVar = {
        "height": "simulator height",
        "lin_vel": "base velocity",
        "ang_vel": "base angular velocity",
        **dict.fromkeys(("angles", "directions"), "simulator target"),
        "joint_vel": "joint velocities",
        "actions": "last action",
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
        # Initial joint positions [rad] and velocities [rad/s]: mean, largest deviation, limits (low, high)
        still, unlimited = torch.zeros_like(self.joint_low), torch.full_like(self.joint_low, torch.inf)
        self.start_mean = torch.stack([self.start_joint_pos, still])
        self.start_spread = torch.tensor([[0.2], [0.1]], device=self.device)
        limits = [self.joint_low, -unlimited, self.joint_high, unlimited]
        self.start_limits = torch.stack(limits).unflatten(0, (2, 2))
        self.target = torch.tensor([TARGET_DISTANCE, 0.0, 0.0], device=self.device)
        self.minus_horizontal = torch.tensor([-1.0, -1.0, 0.0], device=self.device)
        _, self.start_distance = self._to_target(self.robot.default_root_pos)  # `reset` leaves the root there
        self.distance = torch.zeros(self.num_envs, device=self.device)  # to the target [m]
        self.axes = torch.eye(3, device=self.device).expand(self.num_envs, 3, 3)
        self.alive = torch.ones(self.num_envs, device=self.device)
        weights = {
            "progress": 1.0 / self.dt,  # of m per control step
            "alive": cfg.alive_reward,
            "up": cfg.up_weight,
            "heading": cfg.heading_weight / 0.8,
            "action_cost": -cfg.action_cost,
            "energy_cost": -cfg.energy_cost * cfg.joint_vel_scale,
            "joint_limit_cost": -cfg.joint_limit_cost,
            "death": 0.0,
        }
        self.terms, self.weights = tuple(weights), torch.tensor(list(weights.values()), device=self.device)[:, None]
        self.after_fall = torch.zeros_like(self.weights)  # rewards of the step in which the robot falls
        self.after_fall[self.terms.index("death")] = cfg.death_cost

    def reset(self, where: Bool[Tensor, " envs"]) -> None:
        noise = self.random.uniform(-1.0, 1.0, *self.start_mean.shape)
        start = torch.addcmul(self.start_mean, noise, self.start_spread).clamp(*self.start_limits)
        self.robot.set_state(where, joint_pos=start[:, 0], joint_vel=start[:, 1])
        torch.where(where, self.start_distance, self.distance, out=self.distance)

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
        to_target, distance = self._to_target(self.robot.root_pos)
        up, heading = self._in_torso_frame(self.axes[:, 2:], to_target[:, None]).unbind(dim=1)
        progress = self.distance - distance
        self.distance.copy_(distance)
        terms = {
            "progress": progress,
            "alive": self.alive,
            "up": (up[:, 2] > 0.93).float(),
            "heading": heading[:, 0].clamp(max=0.8),
            "action_cost": self.actions.square().sum(dim=1),
            "energy_cost": self._energy(),
            "joint_limit_cost": self._at_limit(),
            "death": self.alive,
        }
        values = torch.stack([terms[name] for name in self.terms]).mul_(self.weights)
        values = torch.where(self.terminated(), self.after_fall, values)
        return dict(zip(self.terms, values.unbind(), strict=True))

    def terminated(self) -> Bool[Tensor, " envs"]:
        return self.robot.root_pos[:, 2] < self.cfg.termination_height

    def _energy(self) -> Float[Tensor, " envs"]:
        """Return |action x joint velocity|, summed over the joints."""
        return (self.actions * self.robot.joint_vel).abs().sum(dim=1)

    @abstractmethod
    def _at_limit(self) -> Float[Tensor, " envs"]:
        """Return the (possibly weighted) number of joints at their limits."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        _, distance = self._to_target(self.robot.root_pos)  # for an old checkpoint, which lacks `distance`
        torch.where(self.distance > 0.0, self.distance, distance, out=self.distance)

    def _torso(self) -> Terms:
        """Return the torso's observation terms, 12 numbers: height, velocities, angles, directions."""
        robot = self.robot
        to_target, _ = self._to_target(robot.root_pos)
        to_the_right = torch.linalg.cross(to_target, self.axes[:, 2])  # of the target
        vectors = self.axes, to_target[:, None], to_the_right[:, None], robot.root_lin_vel[:, None]
        # Rows 0 to 2 are the rotation matrix; column 0 has the components along the torso's forward axis.
        seen = self._in_torso_frame(*vectors)
        # extrinsic angle about z, and angle to the target; then extrinsic angle about x
        yaw, angle_to_target = torch.atan2(seen[:, 1::3, 0], seen[:, 0::3, 0]).unbind(dim=1)
        roll = torch.atan2(seen[:, 2, 1], seen[:, 2, 2])
        angles = torch.stack([yaw, roll, angle_to_target, seen[:, 2, 2], seen[:, 3, 0]], dim=1)
        return {
            "height": robot.root_pos[:, 2:],
            "lin_vel": seen[:, 5],
            "ang_vel": robot.root_ang_vel_local,
            "angles": angles[:, :3],
            "directions": angles[:, 3:],
        }

    def _to_target(self, pos: Float[Tensor, "*envs 3"]) -> tuple[Float[Tensor, "*envs 3"], Float[Tensor, "*envs"]]:
        """Return the horizontal unit vector to the target and the distance [m]."""
        way = torch.addcmul(self.target, pos, self.minus_horizontal)
        distance = torch.linalg.vector_norm(way, dim=-1)
        return way / distance[..., None], distance

    def _in_torso_frame(self, *vectors: Float[Tensor, "envs _ 3"]) -> Float[Tensor, "envs vectors 3"]:
        return quat_rotate_inverse(self.robot.root_quat[:, None], torch.cat(vectors, dim=1))
