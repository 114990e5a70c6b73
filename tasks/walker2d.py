"""Walker2d: a planar two-legged robot learns to walk along +x."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Bool
from torch import Tensor

from .planar import Planar, PlanarConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Walker2dConfig(PlanarConfig):
    """Settings of Walker2d; values are in cfg/task/Walker2d.yaml."""

    min_height: float
    max_height: float
    max_angle: float


class Walker2d(Planar[Walker2dConfig]):
    """Walker2d: walk along +x, as fast as possible without falling.

    Physics, spaces, rewards and time limit match Gymnasium's Walker2d-v5, so published returns are comparable.

    Action space: 6 numbers in [-1, 1], torque / 100 N m: hip, knee, ankle of the right leg, then of the left.

    Observation space:
    | num   | name      | observation                                                  | unit  |
    |-------|-----------|--------------------------------------------------------------|-------|
    | 0     | height    | height of the torso                                          | m     |
    | 1     | angle     | angle of the torso, 0 is upright                             | rad   |
    | 2-7   | joint_pos | joint positions                                              | rad   |
    | 8-9   | lin_vel   | velocity of the torso along x and z, within +-10             | m/s   |
    | 10-16 | ang_vel   | angular velocity of the torso, joint velocities, within +-10 | rad/s |

    Reward terms: forward (mean speed along x over the step), alive (while healthy), control cost. Start: all positions
    and velocities +-0.005 around standing. Termination: unhealthy, that is, the torso's height is outside 0.8 to 2 m,
    or the torso leans by more than 1 rad.
    """

    Config = Walker2dConfig
    ROBOT = "walker"
    FILE = "walker2d.xml"
    GROUND: ClassVar = {"friction": (0.7, 0.1, 0.1)}

    def _healthy(self) -> Bool[Tensor, " envs"]:
        cfg = self.cfg
        _, height, angle, *_ = self.robot.joint_pos.unbind(dim=1)
        return (height > cfg.min_height) & (height < cfg.max_height) & (angle.abs() < cfg.max_angle)
