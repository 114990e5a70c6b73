"""ShadowHand: the Shadow Dexterous Hand turns a cube to one goal orientation after another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from gpusim_rl.sim import Scene, Sim

from .in_hand import InHand, InHandConfig

FINGERTIPS = ["ffdistal", "mfdistal", "rfdistal", "lfdistal", "thdistal"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowHandConfig(InHandConfig):
    """Settings of ShadowHand; values are in cfg/task/ShadowHand.yaml."""

    observation_type: Literal["openai", "full_no_vel", "full", "full_state"]


class ShadowHand(InHand):
    """ShadowHand: turn a cube to one goal orientation after another, in the hand, without dropping it.

    The recipe is IsaacGymEnvs' ShadowHand with the differences in `InHand` and an 80 g cube (original: 156 g).

    Action space: 20 numbers in [-1, 1], position targets between the lower and upper joint limits: wrist (WRJ1, WRJ0),
    first, middle and ring finger (FFJ3, FFJ2, FFJ1), little finger (LFJ4 to LFJ1), thumb (THJ4 to THJ0). FFJ1, MFJ1,
    RFJ1 and LFJ1 each bend the two outer joints of a finger together.

    Observation space: (`full_state`; see `OBSERVATIONS` for the others)
    | num     | name         | observation                                                         | unit             |
    |---------|--------------|---------------------------------------------------------------------|------------------|
    | 0-23    | joint_pos    | joint positions, limits mapped to [-1, 1]                           | -                |
    | 24-47   | joint_vel    | joint velocities x 0.2                                              | rad/s            |
    | 48-71   | joint_effort | actuator torques on the joints x 10                                 | N m              |
    | 72-74   | cube_pos     | position of the cube                                                | m                |
    | 75-78   | cube_quat    | orientation of the cube                                             | -                |
    | 79-81   | cube_lin_vel | velocity of the cube                                                | m/s              |
    | 82-84   | cube_ang_vel | angular velocity of the cube x 0.2                                  | rad/s            |
    | 85-87   | goal_pos     | vector from the cube to the goal position                           | m                |
    | 88-91   | goal_quat    | goal orientation                                                    | -                |
    | 92-95   | to_goal      | rotation from the goal orientation to the cube's                    | -                |
    | 96-160  | tip_state    | position, orientation, velocity, angular velocity of each fingertip | m, -, m/s, rad/s |
    | 161-190 | tip_force    | contact force and torque on each fingertip x 10, fingertip frame    | N, N m           |
    | 191-210 | actions      | last action                                                         | -                |

    Reward terms: see `InHand`. Start: the cube in any orientation, +-1 cm around a point above the palm; joints at up
    to 20 % of their limits. Termination: the cube is 0.24 m or more from the goal position.
    """

    Config = ShadowHandConfig
    HAND = "shadow_hand.xml"
    CUBE_START = (0.0, -0.39, 0.60)
    GOAL = (0.0, -0.39, 0.56)
    OBSERVATIONS: ClassVar = {
        "openai": "tip_pos cube_pos to_goal actions",
        "full_no_vel": "joint_pos cube_pos cube_quat goal_pos goal_quat to_goal tip_pos actions",
        "full": (
            "joint_pos joint_vel cube_pos cube_quat cube_lin_vel cube_ang_vel goal_pos goal_quat to_goal tip_state"
            " actions"
        ),
        "full_state": (
            "joint_pos joint_vel joint_effort cube_pos cube_quat cube_lin_vel cube_ang_vel goal_pos goal_quat to_goal"
            " tip_state tip_force actions"
        ),
    }

    @classmethod
    def scene(cls, cfg: InHandConfig) -> Scene:
        scene = super().scene(cfg)
        scene.add_contact_sensor("hand", FINGERTIPS)
        scene.njmax = 144  # 115 observed, with the fingers around the cube
        return scene

    def __init__(self, cfg: InHandConfig, sim: Sim) -> None:
        super().__init__(cfg, sim)
        self.tips = self.hand.bodies(FINGERTIPS)
        self.tip_contacts = self.hand.contacts(FINGERTIPS)
        self.scales = {**self.scales, "tip_force": cfg.force_scale}

    def _terms(self) -> dict[str, Float[Tensor, "envs _"]]:
        tips, pos = self.tips, self.tips.pos
        state = torch.cat([pos, tips.quat, tips.lin_vel, tips.ang_vel], dim=2)
        return {
            **super()._terms(),
            "tip_pos": pos.flatten(1),
            "tip_state": state.flatten(1),
            "tip_force": self.tip_contacts.in_body_frame().flatten(1),
        }
