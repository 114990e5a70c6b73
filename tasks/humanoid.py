"""Humanoid: a body with arms and legs learns to run along +x."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gpusim_rl.env import Task, TaskConfig
from gpusim_rl.env.math import euler_xyz, quat_rotate, quat_rotate_inverse, unscale, wrap_angle
from gpusim_rl.paths import assets_dir
from gpusim_rl.sim import Scene, Sim

FEET = ["right_foot", "left_foot"]
TARGET_DISTANCE = 1000.0  # m; far enough that the direction to it stays +x over an episode


@dataclass(frozen=True, slots=True, kw_only=True)
class HumanoidConfig(TaskConfig):
    """Values in cfg/task/Humanoid.yaml."""

    up_weight: float
    heading_weight: float
    action_cost: float
    energy_cost: float
    joint_limit_cost: float
    alive_reward: float
    death_cost: float
    termination_height: float
    ang_vel_scale: float
    joint_vel_scale: float
    force_scale: float


class Humanoid(Task[HumanoidConfig]):
    """Humanoid: run along +x as fast as possible without falling.

    Observations, actions and reward terms are those of IsaacGymEnvs' Humanoid; of the body, only legs touch each other.

    Action space: 21 numbers in [-1, 1], torque / that of the joint's motor (22.5 N m at an ankle to 135 N m at a hip):
    three of the abdomen, six of each leg, three of each arm, the right before the left.

    Observation space:

    | num    | observation                                                      | unit         |
    |--------|------------------------------------------------------------------|--------------|
    | 0      | height of the torso                                              | m            |
    | 1-3    | velocity of the torso, torso frame                               | m/s          |
    | 4-6    | angular velocity of the torso x 0.25, torso frame                | rad/s        |
    | 7-9    | yaw, roll, angle to the target                                   | rad          |
    | 10-11  | projection of the torso's up axis on z, of its heading on target | -            |
    | 12-32  | joint positions, limits mapped to [-1, 1]                        | -            |
    | 33-53  | joint velocities x 0.1                                           | rad/s        |
    | 54-74  | torque of the motors x 0.01                                      | N m          |
    | 75-86  | contact force and torque on the feet x 0.01, foot frame          | N, N m       |
    | 87-107 | last action                                                      | -            |

    Reward terms: progress (metres towards the target per second), alive, up, heading, action cost, energy cost, joints
    at their limits (both more for strong motors), and a penalty for falling that replaces the other terms.

    Start: joints +-0.2 rad and +-0.1 rad/s around the reference pose. Termination: the torso is lower than 0.8 m.
    """

    Config = HumanoidConfig

    @classmethod
    def scene(cls, cfg: HumanoidConfig) -> Scene:
        # As for Ant: with the Euler integrator a policy can learn to live on energy that only the integrator supplies.
        scene = Scene(cfg.physics_hz, integrator="implicit")
        scene.add_ground()
        scene.add("humanoid", assets_dir() / "humanoid.xml")
        scene.add_contact_sensor("humanoid", FEET)
        scene.add_effort_sensors("humanoid")
        return scene

    def __init__(self, cfg: HumanoidConfig, sim: Sim) -> None:
        super().__init__(cfg, sim)
        self.robot = sim.articulation("humanoid")
        self.feet = self.robot.contacts(FEET)
        self.num_actions = len(self.robot.actuator_names)
        self.joint_low, self.joint_high = self.robot.joint_limits.unbind(dim=1)
        motor_torque = torch.as_tensor(sim.scene.model.actuator_gear[:, 0], dtype=torch.float32, device=self.device)
        self.effort_ratio = motor_torque / motor_torque.max()
        self.potential = torch.zeros(self.num_envs, device=self.device)  # -distance to the target / dt [m/s]
        self.target = torch.tensor([TARGET_DISTANCE, 0.0], device=self.device)

    def reset(self, where: Bool[Tensor, " envs"]) -> None:
        num_joints = len(self.robot.joint_names)
        joint_pos = self.robot.default_joint_pos + self.random.uniform(-0.2, 0.2, num_joints)
        self.robot.set_state(
            where,
            joint_pos=joint_pos.clamp(self.joint_low, self.joint_high),
            joint_vel=self.random.uniform(-0.1, 0.1, num_joints),
        )
        self.potential.copy_(torch.where(where, self._potential(), self.potential))

    def apply_action(self, action: Float[Tensor, "envs actions"]) -> None:
        self.robot.actuate(action)

    def observe(self) -> Float[Tensor, "envs obs"]:
        cfg, robot = self.cfg, self.robot
        quat = robot.root_quat
        roll, _, yaw = euler_xyz(quat)
        to_target = self.target - robot.root_pos[:, :2]
        angle_to_target = wrap_angle(torch.atan2(to_target[:, 1], to_target[:, 0]) - yaw)
        return torch.cat(
            [
                robot.root_pos[:, 2:],
                quat_rotate_inverse(quat, robot.root_lin_vel),
                robot.root_ang_vel_local * cfg.ang_vel_scale,
                torch.stack([yaw, roll, angle_to_target, self._up(), self._heading()], dim=1),
                self._scaled_joint_pos(),
                robot.joint_vel * cfg.joint_vel_scale,
                robot.joint_effort * cfg.force_scale,
                self.feet.in_body_frame().flatten(1) * cfg.force_scale,
                self.actions,
            ],
            dim=1,
        )

    def rewards(self) -> dict[str, Float[Tensor, " envs"]]:
        cfg, action = self.cfg, self.actions
        potential = self._potential()
        progress = potential - self.potential
        self.potential.copy_(potential)
        energy = (action * self.robot.joint_vel * cfg.joint_vel_scale).abs() * self.effort_ratio
        # from 0 at 98 % of the way to a limit to 1 at the limit
        at_limit = ((self._scaled_joint_pos().abs() - 0.98) / 0.02).clamp(min=0.0) * self.effort_ratio
        terms = {
            "progress": progress,
            "alive": torch.full_like(progress, cfg.alive_reward),
            "up": cfg.up_weight * (self._up() > 0.93).float(),
            "heading": cfg.heading_weight * (self._heading() / 0.8).clamp(max=1.0),
            "action_cost": -cfg.action_cost * action.square().sum(dim=1),
            "energy_cost": -cfg.energy_cost * energy.sum(dim=1),
            "joint_limit_cost": -cfg.joint_limit_cost * at_limit.sum(dim=1),
        }
        fell = self.terminated()
        terms = {name: torch.where(fell, 0.0, term) for name, term in terms.items()}
        terms["death"] = cfg.death_cost * fell.float()
        return terms

    def terminated(self) -> Bool[Tensor, " envs"]:
        return self.robot.root_pos[:, 2] < self.cfg.termination_height

    def _potential(self) -> Float[Tensor, " envs"]:
        return -torch.linalg.vector_norm(self.target - self.robot.root_pos[:, :2], dim=1) / self.dt

    def _up(self) -> Float[Tensor, " envs"]:
        """Projection of the torso's z axis on the world's z axis: the last element of the rotation matrix."""
        return 1.0 - 2.0 * self.robot.root_quat[:, 1:3].square().sum(dim=1)

    def _heading(self) -> Float[Tensor, " envs"]:
        """Projection of the torso's x axis on the horizontal direction to the target."""
        axis = torch.zeros_like(self.robot.root_pos)
        axis[:, 0] = 1.0
        forward = quat_rotate(self.robot.root_quat, axis)
        direction = torch.nn.functional.normalize(self.target - self.robot.root_pos[:, :2], dim=1)
        return (forward[:, :2] * direction).sum(dim=1)

    def _scaled_joint_pos(self) -> Float[Tensor, "envs joints"]:
        return unscale(self.robot.joint_pos, self.joint_low, self.joint_high)
