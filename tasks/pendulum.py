"""Pendulum: a torque-limited pendulum swings up and stays up."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gpusim_rl.env import Task, TaskConfig, Terms
from gpusim_rl.env.math import wrap_angle
from gpusim_rl.files.paths import assets_dir
from gpusim_rl.sim import Scene, Sim


@dataclass(frozen=True, slots=True, kw_only=True)
class PendulumConfig(TaskConfig):
    """Settings of Pendulum; values are in cfg/task/Pendulum.yaml."""

    max_torque: float
    velocity_cost: float
    torque_cost: float


class Pendulum(Task[PendulumConfig]):
    """Pendulum: swing up and stay upright, from any angle, with a motor too weak to lift the rod directly.

    Rod, reward, time step and torque limit match Gymnasium's Pendulum-v1, so returns can be compared: -150 per episode
    is good, -1200 is random. Differences: gravity is 9.81, not 10 m/s^2; the velocity has no limit.

    Action space: 1 number in [-1, 1], the torque / `max_torque`.

    Observation space:
    | num | name    | observation                    | unit  |
    |-----|---------|--------------------------------|-------|
    | 0   | cos     | cosine of the angle, 1 upright | -     |
    | 1   | sin     | sine of the angle              | -     |
    | 2   | ang_vel | angular velocity               | rad/s |

    Reward per step: -(angle^2 + 0.1 velocity^2 + 0.001 torque^2), of the state before the action. Start: any angle,
    velocity +-1 rad/s. No termination.
    """

    Config = PendulumConfig
    units: ClassVar = {"cos": "-", "sin": "-", "ang_vel": "rad/s"}
    sources: ClassVar = {
        "cos": "cosine of pendulum/hinge",
        "sin": "sine of pendulum/hinge",
        "ang_vel": "velocity of pendulum/hinge",
    }

    @classmethod
    def scene(cls, cfg: PendulumConfig) -> Scene:
        scene = Scene(cfg.physics_hz)
        scene.add_ground()
        scene.add("pendulum", assets_dir() / "pendulum.xml")
        return scene

    def __init__(self, cfg: PendulumConfig, sim: Sim) -> None:
        super().__init__(cfg, sim)
        self.robot = sim.articulation("pendulum")
        self.num_actions = 1
        self.state_cost = torch.zeros(2, self.num_envs, device=self.device)  # of angle and velocity before the step

    def reset(self, where: Bool[Tensor, " envs"]) -> None:
        noise = self.random.uniform(-1.0, 1.0, 2, 1)
        self.robot.set_state(where, joint_pos=math.pi * noise[:, 0], joint_vel=noise[:, 1])

    def apply_action(self, action: Float[Tensor, "envs actions"]) -> None:
        angle, velocity = wrap_angle(self.robot.joint_pos[:, 0]), self.robot.joint_vel[:, 0]
        self.state_cost[0].copy_(angle.square())
        self.state_cost[1].copy_(self.cfg.velocity_cost * velocity.square())
        self.robot.actuate(action * self.cfg.max_torque)

    def observe(self) -> dict[str, Terms]:
        angle = self.robot.joint_pos
        return {"policy": {"cos": angle.cos(), "sin": angle.sin(), "ang_vel": self.robot.joint_vel}}

    def rewards(self) -> dict[str, Float[Tensor, " envs"]]:
        torque = self.actions[:, 0] * self.cfg.max_torque
        return {
            "angle": -self.state_cost[0],
            "velocity": -self.state_cost[1],
            "torque": -self.cfg.torque_cost * torque.square(),
        }

    def terminated(self) -> Bool[Tensor, " envs"]:
        return torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
