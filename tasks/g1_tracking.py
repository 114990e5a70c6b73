"""G1Tracking: Unitree's G1 follows motion clips."""

from __future__ import annotations

from .g1_velocity import G1Velocity
from .tracking import TrackingTask


class G1Tracking(TrackingTask):
    """G1Tracking: follow clips; the default one crouches and stands up.

    Bodies, ends and settings are those of mjlab 1.6's tracking task of G1. Its hands have no fingers.

    Action space: 29 numbers in [-100, 100], offset of the joint targets from the pose or the clip / a quarter of the
    largest torque over the stiffness, 0.07 to 0.55 rad: left leg, right leg (hip pitch, roll and yaw, knee, ankle
    pitch and roll), waist yaw, roll and pitch, left arm, right arm (shoulder pitch, roll and yaw, elbow, wrist roll,
    pitch and yaw).

    Observation space: (uniform noise is added to the policy's own motion and to where the anchor is to be)

    | num     | name          | observation                                              | unit  |
    |---------|---------------|----------------------------------------------------------|-------|
    | 0-28    | ref_joint_pos | joint positions of the clip                              | rad   |
    | 29-57   | ref_joint_vel | joint velocities of the clip                             | rad/s |
    | 58-60   | anchor_pos    | torso of the clip, torso frame                           | m     |
    | 61-66   | anchor_axes   | its x and y axis, torso frame                            | -     |
    | 67-69   | lin_vel       | velocity of the IMU, its frame                           | m/s   |
    | 70-72   | ang_vel       | angular velocity of the IMU, its frame                   | rad/s |
    | 73-101  | joint_pos     | joint positions from the pose, plus bias of the encoders | rad   |
    | 102-130 | joint_vel     | joint velocities                                         | rad/s |
    | 131-159 | actions       | last action                                              | -     |

    The critic sees the same without noise and bias, and the bodies: pelvis, torso, and of each side the hip, knee,
    ankle, shoulder, elbow and wrist.

    | num     | name          | observation                                         | unit  |
    |---------|---------------|-----------------------------------------------------|-------|
    | 0-28    | ref_joint_pos | joint positions of the clip                         | rad   |
    | 29-57   | ref_joint_vel | joint velocities of the clip                        | rad/s |
    | 58-60   | anchor_pos    | torso of the clip, torso frame                      | m     |
    | 61-66   | anchor_axes   | its x and y axis, torso frame                       | -     |
    | 67-108  | body_pos      | positions of the 14 bodies, torso frame of the clip | m     |
    | 109-192 | body_axes     | x and y axis of each, torso frame of the clip       | -     |
    | 193-195 | lin_vel       | velocity of the IMU, its frame                      | m/s   |
    | 196-198 | ang_vel       | angular velocity of the IMU, its frame              | rad/s |
    | 199-227 | joint_pos     | joint positions from the pose                       | rad   |
    | 228-256 | joint_vel     | joint velocities                                    | rad/s |
    | 257-285 | actions       | last action                                         | -     |

    Reward terms, x the control step: see `TrackingTask`.

    Start: a frame of a clip, with noise. Termination: torso, an ankle or a wrist too low or too high, or the torso
    tilted; see `TrackingTask`.
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
