"""Ant: a four-legged robot learns to run along +x."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from gpusim_rl.sim import Sim

from .locomotion import Locomotion, LocomotionConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class AntConfig(LocomotionConfig):
    """Settings of Ant; values are in cfg/task/Ant.yaml."""

    contact_scale: float


class Ant(Locomotion[AntConfig]):
    """Ant: run along +x, as fast as possible without falling.

    Observations, actions and reward terms match IsaacGymEnvs' Ant.

    Action space: 8 numbers in [-1, 1], torque / 15 N m: hip and ankle of legs 1 to 4.

    Observation space:
    | num   | name        | observation                                                                 | unit   |
    |-------|-------------|-----------------------------------------------------------------------------|--------|
    | 0     | height      | height of the torso                                                         | m      |
    | 1-3   | lin_vel     | velocity of the torso, torso frame                                          | m/s    |
    | 4-6   | ang_vel     | angular velocity of the torso, torso frame                                  | rad/s  |
    | 7-9   | angles      | yaw, roll, angle to the target                                              | rad    |
    | 10-11 | directions  | torso up axis projected onto z, heading projected onto the target direction | -      |
    | 12-19 | joint_pos   | joint positions, limits mapped to [-1, 1]                                   | -      |
    | 20-27 | joint_vel   | joint velocities x 0.2                                                      | rad/s  |
    | 28-51 | foot_wrench | contact force and torque on the feet x 0.1, foot frame                      | N, N m |
    | 52-59 | actions     | last action                                                                 | -      |

    Reward terms (see `Locomotion.rewards`): progress (speed towards the target [m/s]), alive, up, heading, action cost,
    energy cost, joints at their limits, and a penalty for falling that replaces the other terms. Start: joints +-0.2
    rad and +-0.1 rad/s around the reference pose. Termination: the torso is below 0.31 m.
    """

    Config = AntConfig
    ROBOT = "ant"
    FEET = ("front_left_foot", "front_right_foot", "back_left_foot", "back_right_foot")
    PHYSICS: ClassVar = {"max_angular_velocity": 15.0}  # rad/s

    def __init__(self, cfg: AntConfig, sim: Sim) -> None:
        super().__init__(cfg, sim)
        self.near_high = self.joint_middle + 0.99 * self.joint_range  # rad
        self.scales = {"joint_vel": cfg.joint_vel_scale, "foot_wrench": cfg.contact_scale}

    def _at_limit(self) -> Float[Tensor, " envs"]:
        return (self.robot.joint_pos > self.near_high).sum(dim=1, dtype=torch.float32)
