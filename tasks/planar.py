"""Base of the planar running tasks from Gymnasium's MuJoCo suite."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gpusim_rl.env import Task, TaskConfig, Terms
from gpusim_rl.files.paths import assets_dir
from gpusim_rl.sim import Scene, Sim


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanarConfig(TaskConfig):
    """Settings shared by the planar tasks; values are in the yaml of each task."""

    forward_weight: float
    control_cost: float
    reset_noise: float
    alive_reward: float | None
    max_observed_vel: float | None


Cfg = TypeVar("Cfg", bound=PlanarConfig)


class Planar(Task[Cfg]):
    """Robot in the x-z plane with a motor at each joint; runs along +x from near its reference pose.

    Joints are the torso's x, z and angle, then the motorised joints. An episode ends when the robot is unhealthy.
    """

    ROBOT: ClassVar[str]  # name in the scene
    FILE: ClassVar[str]  # MJCF in tasks/assets
    INTEGRATOR: ClassVar[Literal["euler", "rk4"]] = "rk4"
    GROUND: ClassVar[dict[str, Any]]  # arguments of `add_ground`
    units: ClassVar = {"height": "m", "angle": "rad", "joint_pos": "rad", "lin_vel": "m/s", "ang_vel": "rad/s"}
    sources: ClassVar = {"height": "simulator height", "lin_vel": "simulator velocity"}

    @classmethod
    def scene(cls, cfg: Cfg) -> Scene:
        scene = Scene(cfg.physics_hz, integrator=cls.INTEGRATOR)
        scene.add_ground(**cls.GROUND)
        scene.add(cls.ROBOT, assets_dir() / cls.FILE)
        return scene

    def __init__(self, cfg: Cfg, sim: Sim) -> None:
        super().__init__(cfg, sim)
        self.robot = sim.articulation(self.ROBOT)
        self.num_actions = len(self.robot.actuator_names)
        self.x_before = torch.zeros(self.num_envs, device=self.device)

    def reset(self, where: Bool[Tensor, " envs"]) -> None:
        noise = self.cfg.reset_noise
        joint_pos = self.robot.default_joint_pos + self.random.uniform(-noise, noise, len(self.robot.joint_names))
        self.robot.set_state(where, joint_pos=joint_pos, joint_vel=self._start_vel())

    def apply_action(self, action: Float[Tensor, "envs actions"]) -> None:
        self.x_before.copy_(self.robot.joint_pos[:, 0])
        self.robot.actuate(action)

    def observe(self) -> dict[str, Terms]:
        joint_pos, joint_vel, limit = self.robot.joint_pos, self.robot.joint_vel, self.cfg.max_observed_vel
        if limit is not None:
            joint_vel = joint_vel.clamp(-limit, limit)
        terms = {
            "height": joint_pos[:, 1:2],
            "angle": joint_pos[:, 2:3],
            "joint_pos": joint_pos[:, 3:],
            "lin_vel": joint_vel[:, :2],
            "ang_vel": joint_vel[:, 2:],
        }
        return {"policy": terms}

    def rewards(self) -> dict[str, Float[Tensor, " envs"]]:
        cfg = self.cfg
        terms = {"forward": cfg.forward_weight * ((self.robot.joint_pos[:, 0] - self.x_before) / self.dt)}
        if cfg.alive_reward is not None:
            terms["alive"] = cfg.alive_reward * self._healthy().float()
        return {**terms, "control_cost": -cfg.control_cost * self.actions.square().sum(dim=1)}

    def terminated(self) -> Bool[Tensor, " envs"]:
        return ~self._healthy()

    def _start_vel(self) -> Float[Tensor, "envs joints"]:
        return self.random.uniform(-self.cfg.reset_noise, self.cfg.reset_noise, len(self.robot.joint_names))

    def _healthy(self) -> Bool[Tensor, " envs"]:
        return torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
