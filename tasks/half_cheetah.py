"""HalfCheetah: a cat with two legs in a plane learns to run along +x."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gpusim_rl.env import Task, TaskConfig
from gpusim_rl.paths import assets_dir
from gpusim_rl.sim import Scene, Sim


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfCheetahConfig(TaskConfig):
    """Values in cfg/task/HalfCheetah.yaml."""

    forward_weight: float
    control_cost: float
    reset_noise: float


class HalfCheetah(Task[HalfCheetahConfig]):
    """HalfCheetah: run along +x as fast as possible.

    The physics, every number and the time limit are those of Gymnasium's HalfCheetah-v5: returns compare with published
    ones.

    Action space: 6 numbers in [-1, 1], torque / 120, 90, 60, 120, 60, 30 N m: hip, knee, ankle of the back leg, then of
    the front leg.

    Observation space:

    | num   | observation                                     | unit  |
    |-------|-------------------------------------------------|-------|
    | 0     | height of the torso above 0.7 m                 | m     |
    | 1     | angle of the torso, 0 is horizontal             | rad   |
    | 2-7   | joint positions                                 | rad   |
    | 8-9   | velocity of the torso along x and z             | m/s   |
    | 10-16 | angular velocity of the torso, joint velocities | rad/s |

    Reward terms: forward (mean speed along x over the step), control cost.

    Start: positions +-0.1 around the reference pose, velocities normal with a standard deviation of 0.1. Termination:
    none, it may run on its back.
    """

    Config = HalfCheetahConfig

    @classmethod
    def scene(cls, cfg: HalfCheetahConfig) -> Scene:
        scene = Scene(cfg.physics_hz, cone="pyramidal")
        scene.add_ground(friction=(0.4, 0.1, 0.1), solimp=(0.0, 0.8, 0.01))
        scene.add("cheetah", assets_dir() / "half_cheetah.xml")
        return scene

    def __init__(self, cfg: HalfCheetahConfig, sim: Sim) -> None:
        super().__init__(cfg, sim)
        self.robot = sim.articulation("cheetah")  # joints: x, z and angle of the torso, then those with a motor
        self.num_actions = len(self.robot.actuator_names)
        self.x_before = torch.zeros(self.num_envs, device=self.device)

    def reset(self, where: Bool[Tensor, " envs"]) -> None:
        noise, joints = self.cfg.reset_noise, len(self.robot.joint_names)
        self.robot.set_state(
            where,
            joint_pos=self.robot.default_joint_pos + self.random.uniform(-noise, noise, joints),
            joint_vel=self.random.normal(0.0, noise, joints),
        )

    def apply_action(self, action: Float[Tensor, "envs actions"]) -> None:
        self.x_before.copy_(self.robot.joint_pos[:, 0])
        self.robot.actuate(action)

    def observe(self) -> Float[Tensor, "envs obs"]:
        return torch.cat([self.robot.joint_pos[:, 1:], self.robot.joint_vel], dim=1)

    def rewards(self) -> dict[str, Float[Tensor, " envs"]]:
        speed = (self.robot.joint_pos[:, 0] - self.x_before) / self.dt
        return {
            "forward": self.cfg.forward_weight * speed,
            "control_cost": -self.cfg.control_cost * self.actions.square().sum(dim=1),
        }

    def terminated(self) -> Bool[Tensor, " envs"]:
        return torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
