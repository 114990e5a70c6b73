"""AllegroHand: the Allegro Hand turns a cube to one goal orientation after another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from .in_hand import InHand, InHandConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class AllegroHandConfig(InHandConfig):
    """Settings of AllegroHand; values are in cfg/task/AllegroHand.yaml."""

    observation_type: Literal["full_no_vel", "full", "full_state"]


class AllegroHand(InHand):
    """AllegroHand: turn a cube to one goal orientation after another, in the hand, without dropping it.

    The recipe is IsaacGymEnvs' AllegroHand with the differences in `InHand`. The cube starts 2 cm higher, clear of the
    fingers, and 1 cm closer to the wrist (y = -0.19 m; original: -0.20 m); it weighs 80 g (original: 110 g); joint
    limits match the real hand and are narrower than in the original model.

    Action space: 16 numbers in [-1, 1], position targets between the lower and upper joint limits: four each for index,
    middle and ring finger and thumb, from the palm outwards.

    Observation space: (`full_state`; see `OBSERVATIONS` for the others)
    | num   | name         | observation                                      | unit  |
    |-------|--------------|--------------------------------------------------|-------|
    | 0-15  | joint_pos    | joint positions, limits mapped to [-1, 1]        | -     |
    | 16-31 | joint_vel    | joint velocities x 0.2                           | rad/s |
    | 32-47 | joint_effort | actuator torques on the joints x 10              | N m   |
    | 48-50 | cube_pos     | position of the cube                             | m     |
    | 51-54 | cube_quat    | orientation of the cube                          | -     |
    | 55-57 | cube_lin_vel | velocity of the cube                             | m/s   |
    | 58-60 | cube_ang_vel | angular velocity of the cube x 0.2               | rad/s |
    | 61-63 | goal_pos     | vector from the cube to the goal position        | m     |
    | 64-67 | goal_quat    | goal orientation                                 | -     |
    | 68-71 | to_goal      | rotation from the goal orientation to the cube's | -     |
    | 72-87 | actions      | last action                                      | -     |

    Reward terms: see `InHand`. Start: the cube in any orientation, +-1 cm around a point above the palm; joints at up
    to 20 % of their limits. Termination: the cube is 0.24 m or more from the goal position.
    """

    Config = AllegroHandConfig
    HAND = "allegro_hand.xml"
    CUBE_START = (0.0, -0.19, 0.58)
    GOAL = (0.0, -0.19, 0.52)
    OBSERVATIONS: ClassVar = {
        "full_no_vel": "joint_pos cube_pos cube_quat goal_pos goal_quat to_goal actions",
        "full": "joint_pos joint_vel cube_pos cube_quat cube_lin_vel cube_ang_vel goal_pos goal_quat to_goal actions",
        "full_state": (
            "joint_pos joint_vel joint_effort cube_pos cube_quat cube_lin_vel cube_ang_vel goal_pos goal_quat to_goal"
            " actions"
        ),
    }
