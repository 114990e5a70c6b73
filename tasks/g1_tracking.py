"""G1Tracking: Unitree's G1 tracks motion clips."""

from __future__ import annotations

from .g1_velocity import G1Velocity
from .tracking import TrackingTask


class G1Tracking(TrackingTask):
    """G1Tracking: track motion clips; in the default clip, G1 crouches and stands up.

    Bodies, terminations and settings match mjlab 1.6's G1 tracking task. The hands have no fingers.

    Action space: 29 numbers in [-100, 100], joint target offsets from the pose or the clip / (a quarter of the maximum
    torque / stiffness), 0.07 to 0.55 rad: left leg, right leg (hip pitch, roll and yaw, knee, ankle pitch and roll),
    waist yaw, roll and pitch, left arm, right arm (shoulder pitch, roll and yaw, elbow, wrist roll, pitch and yaw).
    """

    robot = G1Velocity.robot
    anchor = "torso_link"
    bodies = (
        "pelvis",
        "left_hip_roll_link",
        "left_knee_link",
        "left_ankle_roll_link",
        "right_hip_roll_link",
        "right_knee_link",
        "right_ankle_roll_link",
        "torso_link",
        "left_shoulder_roll_link",
        "left_elbow_link",
        "left_wrist_yaw_link",
        "right_shoulder_roll_link",
        "right_elbow_link",
        "right_wrist_yaw_link",
    )
    ends = ("left_ankle_roll_link", "right_ankle_roll_link", "left_wrist_yaw_link", "right_wrist_yaw_link")
