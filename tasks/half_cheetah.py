"""HalfCheetah: a planar two-legged cheetah learns to run along +x."""

from __future__ import annotations

from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from .planar import Planar, PlanarConfig


class HalfCheetah(Planar[PlanarConfig]):
    """HalfCheetah: run along +x, as fast as possible.

    Physics, spaces, rewards and time limit match Gymnasium's HalfCheetah-v5, so published returns are comparable.

    Action space: 6 numbers in [-1, 1], torque / 120, 90, 60, 120, 60, 30 N m: hip, knee, ankle of the back leg, then of
    the front leg.

    Observation space:
    | num   | name      | observation                                     | unit  |
    |-------|-----------|-------------------------------------------------|-------|
    | 0     | height    | height of the torso above 0.7 m                 | m     |
    | 1     | angle     | angle of the torso, 0 is horizontal             | rad   |
    | 2-7   | joint_pos | joint positions                                 | rad   |
    | 8-9   | lin_vel   | velocity of the torso along x and z             | m/s   |
    | 10-16 | ang_vel   | angular velocity of the torso, joint velocities | rad/s |

    Reward terms: forward (mean speed along x over the step), control cost. Start: positions +-0.1 around the reference
    pose, velocities normal with a standard deviation of 0.1. Termination: none; running on its back is allowed.
    """

    Config = PlanarConfig
    ROBOT = "cheetah"
    FILE = "half_cheetah.xml"
    INTEGRATOR = "euler"
    GROUND: ClassVar = {"friction": (0.4, 0.1, 0.1), "solimp": (0.0, 0.8, 0.01)}

    def _start_vel(self) -> Float[Tensor, "envs joints"]:
        return self.random.normal(0.0, self.cfg.reset_noise, len(self.robot.joint_names))
