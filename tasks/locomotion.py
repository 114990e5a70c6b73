"""Running to a target far away: the common base of Ant and Humanoid."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gpusim_rl.env import Task, TaskConfig
from gpusim_rl.env.math import quat_rotate, quat_rotate_inverse, wrap_angle
from gpusim_rl.paths import assets_dir
from gpusim_rl.sim import Scene, Sim

TARGET_DISTANCE = 1000.0  # m; far enough that the direction to it stays +x over an episode


@dataclass(frozen=True, slots=True, kw_only=True)
class LocomotionConfig(TaskConfig):
    """Values in the yaml of each task."""

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
    """A robot with a motor at each joint starts near its reference pose and runs along +x until it falls.

    Subclasses add the rest of the observation, and the costs of energy and of joints at their limits.
    """

    ROBOT: ClassVar[str]
    """Name of the robot in the scene, and of its MJCF in tasks/assets."""
    FEET: ClassVar[Sequence[str]]
    """Bodies with a contact sensor."""

    @classmethod
    def scene(cls, cfg: Cfg) -> Scene:
        # PhysX limits angular velocity to 64 rad/s, MuJoCo does not. With the Euler integrator a policy can learn to
        # spin through the air on energy that comes from integration errors.
        scene = Scene(cfg.physics_hz, integrator="implicit")
        scene.add_ground()
        scene.add(cls.ROBOT, assets_dir() / f"{cls.ROBOT}.xml")
        scene.add_contact_sensor(cls.ROBOT, cls.FEET)
        return scene

    def __init__(self, cfg: Cfg, sim: Sim) -> None:
        super().__init__(cfg, sim)
        self.robot = sim.articulation(self.ROBOT)
        self.feet = self.robot.contacts(self.FEET)
        self.num_actions = len(self.robot.actuator_names)
        self.joint_low, self.joint_high = self.robot.joint_limits.unbind(dim=1)
        self.joint_middle = 0.5 * (self.joint_low + self.joint_high)
        self.joint_range = 0.5 * (self.joint_high - self.joint_low)  # half the range, rad
        # A reference pose may lie outside the range of the joints, as that of Ant's ankles: start at the nearest limit.
        self.start_joint_pos = self.robot.default_joint_pos.clamp(self.joint_low, self.joint_high)
        self.start_high = self.joint_high.clone()  # rad; no joint starts beyond it
        self.potential = torch.zeros(self.num_envs, device=self.device)  # -distance to the target / dt [m/s]
        self.target = torch.tensor([TARGET_DISTANCE, 0.0], device=self.device)
        self.x_axis = torch.tensor([[1.0, 0.0, 0.0]], device=self.device)

    def reset(self, where: Bool[Tensor, " envs"]) -> None:
        num_joints = len(self.robot.joint_names)
        noise = self.random.uniform(-1.0, 1.0, 2, num_joints)
        joint_pos = self.start_joint_pos + 0.2 * noise[:, 0]
        self.robot.set_state(
            where,
            joint_pos=joint_pos.clamp(self.joint_low, self.start_high),
            joint_vel=0.1 * noise[:, 1],
        )
        self.potential.copy_(torch.where(where, self._potential(), self.potential))

    def apply_action(self, action: Float[Tensor, "envs actions"]) -> None:
        self.robot.actuate(action)

    def rewards(self) -> dict[str, Float[Tensor, " envs"]]:
        cfg = self.cfg
        potential = self._potential()
        progress = potential - self.potential
        self.potential.copy_(potential)
        terms = {
            "progress": progress,
            "alive": torch.full_like(progress, cfg.alive_reward),
            "up": cfg.up_weight * (self._up() > 0.93).float(),
            "heading": cfg.heading_weight * (self._heading(self._forward()) / 0.8).clamp(max=1.0),
            "action_cost": -cfg.action_cost * self.actions.square().sum(dim=1),
            "energy_cost": -cfg.energy_cost * self._energy(),
            "joint_limit_cost": -cfg.joint_limit_cost * self._at_limit(),
        }
        fell = self.terminated()
        terms = {name: term.masked_fill(fell, 0.0) for name, term in terms.items()}
        terms["death"] = cfg.death_cost * fell.float()
        return terms

    def terminated(self) -> Bool[Tensor, " envs"]:
        return self.robot.root_pos[:, 2] < self.cfg.termination_height

    def _energy(self) -> Float[Tensor, " envs"]:
        """|action x scaled joint velocity|, summed over the joints."""
        return (self.actions * self.robot.joint_vel * self.cfg.joint_vel_scale).abs().sum(dim=1)

    @abstractmethod
    def _at_limit(self) -> Float[Tensor, " envs"]:
        """Number of joints at their limits; a subclass may weight them."""

    def _torso(self, ang_vel_scale: float = 1.0) -> list[Float[Tensor, "envs _"]]:
        """The first 12 numbers of the observation: height, velocities, angles, directions."""
        robot, quat = self.robot, self.robot.root_quat
        w, x, y, z = quat.unbind(dim=1)
        up, forward = self._up(), self._forward()
        # extrinsic angles about x and z, from the elements of the rotation matrix that the rewards need anyway
        roll, yaw = torch.atan2(2.0 * (w * x + y * z), up), torch.atan2(forward[:, 1], forward[:, 0])
        to_target = self.target - robot.root_pos[:, :2]
        angle_to_target = wrap_angle(torch.atan2(to_target[:, 1], to_target[:, 0]) - yaw)
        return [
            robot.root_pos[:, 2:],
            quat_rotate_inverse(quat, robot.root_lin_vel),
            robot.root_ang_vel_local * ang_vel_scale,
            torch.stack([yaw, roll, angle_to_target, up, self._heading(forward)], dim=1),
        ]

    def _potential(self) -> Float[Tensor, " envs"]:
        return -torch.linalg.vector_norm(self.target - self.robot.root_pos[:, :2], dim=1) / self.dt

    def _up(self) -> Float[Tensor, " envs"]:
        """Projection of the torso's z axis on the world frame's z axis: the last element of the rotation matrix."""
        return 1.0 - 2.0 * self.robot.root_quat[:, 1:3].square().sum(dim=1)

    def _forward(self) -> Float[Tensor, "envs 2"]:
        """The torso's x axis, projected on the ground."""
        return quat_rotate(self.robot.root_quat, self.x_axis)[:, :2]

    def _heading(self, forward: Float[Tensor, "envs 2"]) -> Float[Tensor, " envs"]:
        """Projection of the torso's x axis on the horizontal direction to the target."""
        direction = torch.nn.functional.normalize(self.target - self.robot.root_pos[:, :2], dim=1)
        return (forward * direction).sum(dim=1)

    def _scaled_joint_pos(self) -> Float[Tensor, "envs joints"]:
        """Joint positions, limits mapped to [-1, 1]."""
        return (self.robot.joint_pos - self.joint_middle) / self.joint_range
