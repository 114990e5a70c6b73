"""T1Velocity: Booster's T1 tracks commanded velocities."""

from __future__ import annotations

from .robots import Eye, Motor, Robot
from .velocity import VelocityTask


def motor(effort: float, stiffness: float, damping: float) -> Motor:
    """Return a motor with the armature and action scale shared by all T1 motors."""
    return Motor(armature=0.03, effort=effort, stiffness=stiffness, damping=damping, scale=0.25)


class T1Velocity(VelocityTask):
    """T1Velocity: walk on two legs at commanded velocities (quick: forward only), including sideways and turning.

    The recipe is mjlab's for G1, as in `G1Velocity`. Model, pose, torques and servos come from holosoma, with two
    differences: the soles have G1's friction, and joints have no dry friction.

    Action space: 29 numbers in [-100, 100], joint target offsets from the pose / 0.25 rad: head yaw and pitch, left
    arm, right arm (shoulder pitch and roll, elbow pitch and yaw, wrist pitch and yaw, hand roll), waist, left leg,
    right leg (hip pitch, roll and yaw, knee, ankle pitch and roll).
    """

    robot = Robot(
        name="t1",
        root="Trunk",
        torso="Trunk",
        imu="imu",
        feet=("body:left_foot_link", "body:right_foot_link"),
        foot_ring=(0.03, 6),
        soles=("left_sole", "right_sole"),
        height=0.68,
        pose={
            "*_Shoulder_Pitch": 0.2,
            "Left_Shoulder_Roll": -1.35,
            "Right_Shoulder_Roll": 1.35,
            "Left_Elbow_Yaw": -0.5,
            "Right_Elbow_Yaw": 0.5,
            "*_Hip_Pitch": -0.2,
            "*_Knee_Pitch": 0.4,
            "*_Ankle_Pitch": -0.25,
        },
        motors={
            "*Head_*": motor(7.0, 5.0, 0.5),
            "*_Shoulder_*": motor(18.0, 20.0, 0.5),
            "*_Elbow_*": motor(18.0, 20.0, 0.5),
            "*_Wrist_*": motor(18.0, 20.0, 0.5),
            "*_Hand_*": motor(18.0, 20.0, 0.5),
            "Waist": motor(30.0, 200.0, 5.0),
            "*_Hip_Pitch": motor(45.0, 200.0, 5.0),
            "*_Hip_[RY]*": motor(30.0, 200.0, 5.0),
            "*_Knee_Pitch": motor(60.0, 200.0, 5.0),
            "*_Ankle_*": motor(12.0, 50.0, 3.0),
        },
        widths={
            "*Head_*": (0.05, 0.1, 0.1),
            "*_Shoulder_Pitch": (0.05, 0.15, 0.5),
            "*_Shoulder_Roll": (0.05, 0.15, 0.2),
            "*_Elbow_*": (0.05, 0.15, 0.35),
            "*_Wrist_*": (0.05, 0.3, 0.3),
            "*_Hand_*": (0.05, 0.3, 0.3),
            "Waist": (0.05, 0.2, 0.3),
            "*_Hip_Pitch": (0.05, 0.3, 0.5),
            "*_Hip_[RY]*": (0.05, 0.15, 0.2),
            "*_Knee_Pitch": (0.05, 0.35, 0.6),
            "*_Ankle_Pitch": (0.05, 0.25, 0.35),
            "*_Ankle_Roll": (0.05, 0.1, 0.15),
        },
        eye=Eye(x=0.14, z=0.4, pitch=0.83, near=0.5, far=3.5),
    )
