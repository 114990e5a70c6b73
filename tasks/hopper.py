"""Hopper: a planar one-legged robot learns to hop along +x."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool
from torch import Tensor

from .planar import Planar, PlanarConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class HopperConfig(PlanarConfig):
    """Settings of Hopper; values are in cfg/task/Hopper.yaml."""

    min_height: float
    max_angle: float
    max_state: float


class Hopper(Planar[HopperConfig]):
    """Hopper: hop along +x, as fast as possible without falling.

    Physics, spaces, rewards and time limit match Gymnasium's Hopper-v5, so published returns are comparable.

    Action space: 3 numbers in [-1, 1], torque / 200 N m: hip, knee, ankle.

    Observation space:
    | num  | name      | observation                                                  | unit  |
    |------|-----------|--------------------------------------------------------------|-------|
    | 0    | height    | height of the torso                                          | m     |
    | 1    | angle     | angle of the torso, 0 is upright                             | rad   |
    | 2-4  | joint_pos | joint positions                                              | rad   |
    | 5-6  | lin_vel   | velocity of the torso along x and z, within +-10             | m/s   |
    | 7-10 | ang_vel   | angular velocity of the torso, joint velocities, within +-10 | rad/s |

    Reward terms: forward (mean speed along x over the step), alive (while healthy), control cost. Start: all positions
    and velocities +-0.005 around standing. Termination: unhealthy, that is, the torso is below 0.7 m or leans by more
    than 0.2 rad, or any other position or velocity exceeds +-100.
    """

    Config = HopperConfig
    ROBOT = "hopper"
    FILE = "hopper.xml"
    GROUND: ClassVar = {"solimp": (0.8, 0.8, 0.01), "margin": 0.001}

    def _healthy(self) -> Bool[Tensor, " envs"]:
        cfg, pos = self.cfg, self.robot.joint_pos
        height, angle = pos[:, 1], pos[:, 2]
        state = torch.cat([pos[:, 2:], self.robot.joint_vel], dim=1)
        within = (state.abs() < cfg.max_state).all(dim=1)
        return within & (height > cfg.min_height) & (angle.abs() < cfg.max_angle)
