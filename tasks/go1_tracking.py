"""Go1Tracking: Unitree's Go1 follows motion clips."""

from __future__ import annotations

from .go1_velocity import LEGS, Go1Velocity
from .tracking import TrackingTask


class Go1Tracking(TrackingTask):
    """Go1Tracking: follow clips; the default one is a trot.

    Action space: 12 numbers in [-100, 100], offset of the joint targets from the pose or the clip / 0.373 rad (hip
    and thigh) or 0.249 rad (calf): hip, thigh and calf of the legs front right, front left, rear right, rear left.

    Observation space: (uniform noise is added to the policy's own motion and to where the anchor is to be)

    | num   | name          | observation                                              | unit  |
    |-------|---------------|----------------------------------------------------------|-------|
    | 0-11  | ref_joint_pos | joint positions of the clip                              | rad   |
    | 12-23 | ref_joint_vel | joint velocities of the clip                             | rad/s |
    | 24-26 | anchor_pos    | trunk of the clip, trunk frame                           | m     |
    | 27-32 | anchor_axes   | its x and y axis, trunk frame                            | -     |
    | 33-35 | lin_vel       | velocity of the IMU, its frame                           | m/s   |
    | 36-38 | ang_vel       | angular velocity of the IMU, its frame                   | rad/s |
    | 39-50 | joint_pos     | joint positions from the pose, plus bias of the encoders | rad   |
    | 51-62 | joint_vel     | joint velocities                                         | rad/s |
    | 63-74 | actions       | last action                                              | -     |

    The critic sees the same without noise and bias, and the bodies: trunk, and thigh and calf of each leg.

    | num     | name          | observation                                        | unit  |
    |---------|---------------|----------------------------------------------------|-------|
    | 0-11    | ref_joint_pos | joint positions of the clip                        | rad   |
    | 12-23   | ref_joint_vel | joint velocities of the clip                       | rad/s |
    | 24-26   | anchor_pos    | trunk of the clip, trunk frame                     | m     |
    | 27-32   | anchor_axes   | its x and y axis, trunk frame                      | -     |
    | 33-59   | body_pos      | positions of the 9 bodies, trunk frame of the clip | m     |
    | 60-113  | body_axes     | x and y axis of each, trunk frame of the clip      | -     |
    | 114-116 | lin_vel       | velocity of the IMU, its frame                     | m/s   |
    | 117-119 | ang_vel       | angular velocity of the IMU, its frame             | rad/s |
    | 120-131 | joint_pos     | joint positions from the pose                      | rad   |
    | 132-143 | joint_vel     | joint velocities                                   | rad/s |
    | 144-155 | actions       | last action                                        | -     |

    Reward terms, x the control step: see `TrackingTask`.

    Start: a frame of a clip, with noise. Termination: trunk or a calf too low or too high, or the trunk tilted; see
    `TrackingTask`.
    """

    robot = Go1Velocity.robot
    anchor = "trunk"
    bodies = ("trunk", *(f"{leg}_{part}" for leg in LEGS for part in ("thigh", "calf")))
    ends = tuple(f"{leg}_calf" for leg in LEGS)
