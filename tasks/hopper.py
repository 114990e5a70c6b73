"""Hopper: a one-legged robot in a plane learns to hop along +x."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gpusim_rl.env import Task, TaskConfig
from gpusim_rl.paths import assets_dir
from gpusim_rl.sim import Scene, Sim


@dataclass(frozen=True, slots=True, kw_only=True)
class HopperConfig(TaskConfig):
    """Values in cfg/task/Hopper.yaml."""

    forward_weight: float
    alive_reward: float
    control_cost: float
    min_height: float
    max_angle: float
    max_state: float
    max_observed_vel: float
    reset_noise: float


class Hopper(Task[HopperConfig]):
    """Hopper: hop along +x as fast as possible without falling.

    The physics, every number and the time limit are those of Gymnasium's Hopper-v5: returns compare with published
    ones.

    Action space: 3 numbers in [-1, 1], torque / 200 N m: hip, knee, ankle.

    Observation space:

    | num  | observation                                                     | unit  |
    |------|-----------------------------------------------------------------|-------|
    | 0    | height of the torso                                             | m     |
    | 1    | angle of the torso, 0 is upright                                | rad   |
    | 2-4  | joint positions                                                 | rad   |
    | 5-6  | velocity of the torso along x and z, within +-10                | m/s   |
    | 7-10 | angular velocity of the torso, joint velocities, within +-10    | rad/s |

    Reward terms: forward (mean speed along x over the step), alive (while it is healthy), control cost.

    Start: all positions and velocities +-0.005 around standing. Termination: it is not healthy, that is, the torso is
    lower than 0.7 m or leans by more than 0.2 rad, or any other position or velocity is beyond +-100.
    """

    Config = HopperConfig

    @classmethod
    def scene(cls, cfg: HopperConfig) -> Scene:
        scene = Scene(cfg.physics_hz, integrator="rk4", cone="pyramidal")
        scene.add_ground(solimp=(0.8, 0.8, 0.01), margin=0.001)
        scene.add("hopper", assets_dir() / "hopper.xml")
        return scene

    def __init__(self, cfg: HopperConfig, sim: Sim) -> None:
        super().__init__(cfg, sim)
        self.robot = sim.articulation("hopper")  # joints: x, z and angle of the torso, then those with a motor
        self.num_actions = len(self.robot.actuator_names)
        self.x_before = torch.zeros(self.num_envs, device=self.device)

    def reset(self, where: Bool[Tensor, " envs"]) -> None:
        noise, joints = self.cfg.reset_noise, len(self.robot.joint_names)
        self.robot.set_state(
            where,
            joint_pos=self.robot.default_joint_pos + self.random.uniform(-noise, noise, joints),
            joint_vel=self.random.uniform(-noise, noise, joints),
        )

    def apply_action(self, action: Float[Tensor, "envs actions"]) -> None:
        self.x_before.copy_(self.robot.joint_pos[:, 0])
        self.robot.actuate(action)

    def observe(self) -> Float[Tensor, "envs obs"]:
        limit = self.cfg.max_observed_vel
        return torch.cat([self.robot.joint_pos[:, 1:], self.robot.joint_vel.clamp(-limit, limit)], dim=1)

    def rewards(self) -> dict[str, Float[Tensor, " envs"]]:
        cfg = self.cfg
        speed = (self.robot.joint_pos[:, 0] - self.x_before) / self.dt
        return {
            "forward": cfg.forward_weight * speed,
            "alive": cfg.alive_reward * self._healthy().float(),
            "control_cost": -cfg.control_cost * self.actions.square().sum(dim=1),
        }

    def terminated(self) -> Bool[Tensor, " envs"]:
        return ~self._healthy()

    def _healthy(self) -> Bool[Tensor, " envs"]:
        cfg, pos = self.cfg, self.robot.joint_pos
        height, angle = pos[:, 1], pos[:, 2]
        state = torch.cat([pos[:, 2:], self.robot.joint_vel], dim=1)
        within = (state.abs() < cfg.max_state).all(dim=1)
        return within & (height > cfg.min_height) & (angle.abs() < cfg.max_angle)
