"""Humanoid: a humanoid learns to run along +x."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from gpusim_rl.sim import Sim

from .locomotion import Locomotion, LocomotionConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class HumanoidConfig(LocomotionConfig):
    """Settings of Humanoid; values are in cfg/task/Humanoid.yaml."""

    ang_vel_scale: float
    force_scale: float


class Humanoid(Locomotion[HumanoidConfig]):
    """Humanoid: run along +x, as fast as possible without falling.

    Observations, actions and reward terms match IsaacGymEnvs' Humanoid. The only self-collisions are between the legs.

    Action space: 21 numbers in [-1, 1], torque / maximum torque of the joint's motor (22.5 N m at an ankle to 135 N m
    at a hip): three for the abdomen, six for each leg, three for each arm, right before left.

    Observation space:
    | num    | name         | observation                                                                 | unit   |
    |--------|--------------|-----------------------------------------------------------------------------|--------|
    | 0      | height       | height of the torso                                                         | m      |
    | 1-3    | lin_vel      | velocity of the torso, torso frame                                          | m/s    |
    | 4-6    | ang_vel      | angular velocity of the torso x 0.25, torso frame                           | rad/s  |
    | 7-9    | angles       | yaw, roll, angle to the target                                              | rad    |
    | 10-11  | directions   | torso up axis projected onto z, heading projected onto the target direction | -      |
    | 12-32  | joint_pos    | joint positions, limits mapped to [-1, 1]                                   | -      |
    | 33-53  | joint_vel    | joint velocities x 0.1                                                      | rad/s  |
    | 54-74  | joint_effort | motor torques x 0.01                                                        | N m    |
    | 75-86  | foot_wrench  | contact force and torque on the feet x 0.01, foot frame                     | N, N m |
    | 87-107 | actions      | last action                                                                 | -      |

    Reward terms: as in Ant; energy and joint limits cost more for strong motors. Start: joints +-0.2 rad and +-0.1
    rad/s around the reference pose, legs not turned inwards. Termination: the torso is below 0.8 m.
    """

    Config = HumanoidConfig
    ROBOT = "humanoid"
    FEET = ("right_foot", "left_foot")
    EFFORTS = True
    # Half the speed of Euler with pyramidal cones, but Euler needs more than twice as many steps to learn.
    PHYSICS: ClassVar = {"integrator": "implicit", "cone": "elliptic"}

    def __init__(self, cfg: HumanoidConfig, sim: Sim) -> None:
        super().__init__(cfg, sim)
        motor_torque = torch.as_tensor(sim.scene.model.actuator_gear[:, 0], dtype=torch.float32, device=self.device)
        self.effort_ratio = motor_torque / motor_torque.max()
        self.near_limit = 0.98 * self.joint_range  # rad from the middle
        self.limit_weight = self.effort_ratio / (self.joint_range - self.near_limit)  # 1/rad
        hips = [self.robot.joint_names.index(f"{side}_hip_x") for side in ("right", "left")]
        self.start_limits[1, 0, hips] = 0.0  # further inwards, the legs would penetrate each other
        self.scales = {
            "ang_vel": cfg.ang_vel_scale,
            "joint_vel": cfg.joint_vel_scale,
            "joint_effort": cfg.force_scale,
            "foot_wrench": cfg.force_scale,
        }

    def _energy(self) -> Float[Tensor, " envs"]:
        return (self.actions * self.robot.joint_vel * self.effort_ratio).abs().sum(dim=1)

    def _at_limit(self) -> Float[Tensor, " envs"]:
        # 0 up to 98 % of the way to a limit, then linear to 1 at the limit
        near = ((self.robot.joint_pos - self.joint_middle).abs() - self.near_limit).clamp(min=0.0)
        return (near * self.limit_weight).sum(dim=1)
