"""G1Velocity: Unitree's G1 tracks commanded velocities."""

from __future__ import annotations

from .robots import Eye, Motor, Robot
from .velocity import VelocityTask


def planetary(rotors: tuple[float, float, float], gears: tuple[float, float]) -> float:
    """Return the reflected inertia of a two-stage planetary gear, from rotor and carrier inertias [kg m^2]."""
    first, second = gears
    return rotors[0] * (first * second) ** 2 + rotors[1] * second**2 + rotors[2]


SMALL = Motor.tuned(armature=planetary((1.39e-5, 1.7e-6, 1.69e-5), (1 + 46 / 18, 1 + 56 / 16)), effort=25.0)
LINKED = Motor.tuned(armature=2.0 * SMALL.armature, effort=2.0 * SMALL.effort)  # two SMALL motors on a linkage
MIDDLE = Motor.tuned(armature=planetary((4.89e-5, 9.8e-6, 5.33e-5), (4.5, 1 + 48 / 22)), effort=88.0)
LARGE = Motor.tuned(armature=planetary((4.89e-5, 1.09e-5, 7.38e-5), (4.5, 5.0)), effort=139.0)
WRIST = Motor.tuned(armature=planetary((6.8e-6, 0.0, 0.0), (5.0, 5.0)), effort=5.0)


class G1Velocity(VelocityTask):
    """G1Velocity: walk on two legs at commanded velocities (quick: forward only), including sideways and turning.

    Commands, rewards and curriculum match mjlab 1.6's G1 velocity task, with the differences listed in `VelocityTask`.
    The hands have no fingers.

    Action space: 29 numbers in [-100, 100], joint target offsets from the pose / (a quarter of the maximum torque /
    stiffness), 0.07 to 0.55 rad: left leg, right leg (hip pitch, roll and yaw, knee, ankle pitch and roll), waist yaw,
    roll and pitch, left arm, right arm (shoulder pitch, roll and yaw, elbow, wrist roll, pitch and yaw).
    """

    robot = Robot(
        name="g1",
        root="pelvis",
        torso="torso_link",
        imu="imu_in_pelvis",
        feet=("body:left_ankle_roll_link", "body:right_ankle_roll_link"),
        foot_ring=(0.03, 6),
        soles=("left_foot", "right_foot"),
        height=0.76,
        pose={
            "*_hip_pitch_joint": -0.312,
            "*_knee_joint": 0.669,
            "*_ankle_pitch_joint": -0.363,
            "*_elbow_joint": 0.6,
            "*_shoulder_pitch_joint": 0.2,
            "left_shoulder_roll_joint": 0.2,
            "right_shoulder_roll_joint": -0.2,
        },
        motors={
            "*_hip_pitch_joint": MIDDLE,
            "*_hip_roll_joint": LARGE,
            "*_hip_yaw_joint": MIDDLE,
            "*_knee_joint": LARGE,
            "*_ankle_*_joint": LINKED,
            "waist_yaw_joint": MIDDLE,
            "waist_[rp]*_joint": LINKED,
            "*_shoulder_*_joint": SMALL,
            "*_elbow_joint": SMALL,
            "*_wrist_roll_joint": SMALL,
            "*_wrist_[py]*_joint": WRIST,
        },
        widths={
            "*_hip_pitch_joint": (0.05, 0.3, 0.5),
            "*_hip_*_joint": (0.05, 0.15, 0.2),
            "*_knee_joint": (0.05, 0.35, 0.6),
            "*_ankle_pitch_joint": (0.05, 0.25, 0.35),
            "*_ankle_roll_joint": (0.05, 0.1, 0.15),
            "waist_yaw_joint": (0.05, 0.2, 0.3),
            "waist_roll_joint": (0.05, 0.08, 0.08),
            "waist_pitch_joint": (0.05, 0.1, 0.2),
            "*_shoulder_pitch_joint": (0.05, 0.15, 0.5),
            "*_shoulder_roll_joint": (0.05, 0.15, 0.2),
            "*_shoulder_yaw_joint": (0.05, 0.1, 0.15),
            "*_elbow_joint": (0.05, 0.15, 0.35),
            "*_wrist_*_joint": (0.05, 0.3, 0.3),
        },
        eye=Eye(x=0.058, z=0.43, pitch=0.83, near=0.5, far=3.5),
    )
