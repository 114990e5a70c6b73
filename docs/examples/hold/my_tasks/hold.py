"""Hold: an arm keeps its hand at a point while random forces push it."""

# ruff: noqa: D102  # gpusim_rl.Task documents the hooks

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from gpusim_rl.env import Task, TaskConfig
from gpusim_rl.env.math import solve_positive_definite
from gpusim_rl.sim import Scene, Sim


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldConfig(TaskConfig):
    """Settings of Hold; values are in Hold.yaml."""

    stiffness: float
    damping: float
    step: float
    push: float


class Hold(Task[HoldConfig]):
    """Hold: the hand stays at a point while random forces push it.

    Action space: 3 numbers in [-1, 1]: displacement of the hand / `step`, in the world frame.

    Observation space:

    | num | name      | observation                | unit  |
    |-----|-----------|----------------------------|-------|
    | 0-2 | joint_pos | joint positions            | rad   |
    | 3-5 | joint_vel | joint velocities           | rad/s |
    | 6-8 | way       | from the hand to the point | m     |

    Reward per step: 1 at the point, 0.37 at a distance of 0.1 m.

    Start: joints within +-0.2 rad of a bent pose, point within +-0.15 m of `middle`. No termination.
    """

    Config = HoldConfig
    units: ClassVar = {"joint_pos": "rad", "joint_vel": "rad/s", "way": "m"}

    @classmethod
    def scene(cls, cfg: HoldConfig) -> Scene:
        scene = Scene(cfg.physics_hz, integrator="implicitfast")
        scene.add("arm", Path(__file__).parent / "assets" / "hold.xml")
        scene.add_actuators("arm", "*", kind="position", stiffness=cfg.stiffness, damping=cfg.damping)
        return scene

    def __init__(self, cfg: HoldConfig, sim: Sim) -> None:
        super().__init__(cfg, sim)
        self.arm = sim.articulation("arm")
        self.hand = self.arm.bodies(["hand"])
        self.dynamics = self.arm.dynamics("hand")
        self.num_actions = 3
        self.middle = torch.tensor([0.35, 0.0, 0.35], device=self.device)  # m
        self.start = torch.tensor([0.0, -0.6, 1.4], device=self.device)  # rad
        self.damped = 0.1**2 * torch.eye(3, device=self.device)
        self.goal = torch.zeros(self.num_envs, 3, device=self.device)  # m
        self.scales = {"joint_vel": 0.1}

    def apply_action(self, action: Tensor) -> None:
        j = self.dynamics.jacobian[:, :3]
        way = self.cfg.step * action
        turn = (j.mT @ solve_positive_definite(j @ j.mT + self.damped, way[..., None]))[..., 0]
        self.arm.actuate(self.arm.joint_pos + turn)
        self.hand.apply_wrench(self.cfg.push * self.random.uniform(-1.0, 1.0, 1, 3))

    def observe(self) -> dict[str, dict[str, Tensor]]:
        return {"policy": {"joint_pos": self.arm.joint_pos, "joint_vel": self.arm.joint_vel, "way": self._way()}}

    def rewards(self) -> dict[str, Tensor]:
        return {"hold": (-10.0 * self._distance()).exp()}

    def terminated(self) -> Tensor:
        return torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)

    def stats(self) -> dict[str, Tensor]:
        return {"near": (self._distance() < 0.05).float()}

    def reset(self, where: Tensor) -> None:
        self.arm.set_state(where, joint_pos=self.start + self.random.uniform(-0.2, 0.2, 3))
        goal = self.middle + self.random.uniform(-0.15, 0.15, 3)
        self.goal.copy_(torch.where(where[:, None], goal, self.goal))

    def _way(self) -> Tensor:
        return self.goal - self.hand.pos[:, 0]

    def _distance(self) -> Tensor:
        return torch.linalg.vector_norm(self._way(), dim=1)
