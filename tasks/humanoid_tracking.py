"""HumanoidTracking: a humanoid of 28 hinges follows motion clips."""

from __future__ import annotations

from gpusim_rl.files.paths import assets_dir

from .robots import Motor, Robot
from .tracking import TrackingTask

SIDES = ("right", "left")


def servo(stiffness: float, effort: float) -> Motor:
    """Return a servo of the model; an action of 1 requests half of its largest torque at the start."""
    scale = 0.5 * effort / stiffness
    return Motor(armature=0.02, effort=effort, stiffness=stiffness, damping=0.1 * stiffness, scale=scale)


class HumanoidTracking(TrackingTask):
    """HumanoidTracking: follow clips; the default one walks.

    Model and clips are those of `HumanoidAMP`: clips that Isaac Lab ships fit too.

    Action space: 28 numbers in [-100, 100], offset of the joint targets from the pose or the clip / half of the
    largest torque over the stiffness, 0.17 to 0.42 rad: abdomen, neck, right arm, left arm (shoulder x, y and z,
    elbow), right leg, left leg (hip x, y and z, knee, ankle x, y and z).

    Observation space: (uniform noise is added to the policy's own motion and to where the anchor is to be)

    | num     | name          | observation                                              | unit  |
    |---------|---------------|----------------------------------------------------------|-------|
    | 0-27    | ref_joint_pos | joint positions of the clip                              | rad   |
    | 28-55   | ref_joint_vel | joint velocities of the clip                             | rad/s |
    | 56-58   | anchor_pos    | pelvis of the clip, pelvis frame                         | m     |
    | 59-64   | anchor_axes   | its x and y axis, pelvis frame                           | -     |
    | 65-67   | lin_vel       | velocity of the pelvis, its frame                        | m/s   |
    | 68-70   | ang_vel       | angular velocity of the pelvis, its frame                | rad/s |
    | 71-98   | joint_pos     | joint positions from the pose, plus bias of the encoders | rad   |
    | 99-126  | joint_vel     | joint velocities                                         | rad/s |
    | 127-154 | actions       | last action                                              | -     |

    The critic sees the same without noise and bias, and the bodies: all but the head.

    | num     | name          | observation                                          | unit  |
    |---------|---------------|------------------------------------------------------|-------|
    | 0-27    | ref_joint_pos | joint positions of the clip                          | rad   |
    | 28-55   | ref_joint_vel | joint velocities of the clip                         | rad/s |
    | 56-58   | anchor_pos    | pelvis of the clip, pelvis frame                     | m     |
    | 59-64   | anchor_axes   | its x and y axis, pelvis frame                       | -     |
    | 65-106  | body_pos      | positions of the 14 bodies, pelvis frame of the clip | m     |
    | 107-190 | body_axes     | x and y axis of each, pelvis frame of the clip       | -     |
    | 191-193 | lin_vel       | velocity of the pelvis, its frame                    | m/s   |
    | 194-196 | ang_vel       | angular velocity of the pelvis, its frame            | rad/s |
    | 197-224 | joint_pos     | joint positions from the pose                        | rad   |
    | 225-252 | joint_vel     | joint velocities                                     | rad/s |
    | 253-280 | actions       | last action                                          | -     |

    Reward terms, x the control step: see `TrackingTask`.

    Start: a frame of a clip, with noise. Termination: pelvis, a hand or a foot too low or too high, or the pelvis
    tilted; see `TrackingTask`.
    """

    robot = Robot(
        name="humanoid_28",
        file=assets_dir() / "humanoid_28.xml",
        root="pelvis",
        torso="pelvis",
        imu="imu",
        sites={"imu": ("pelvis", (0.0, 0.0, 0.0))},
        feet=tuple(f"body:{side}_foot" for side in SIDES),
        soles=tuple(f"{side}_sole" for side in SIDES),
        height=0.885,
        pose={},
        motors={
            "neck_*": servo(60.0, 50.0),
            "abdomen_*": servo(600.0, 200.0),
            "*_shoulder_*": servo(200.0, 100.0),
            "*_elbow": servo(150.0, 60.0),
            "*_hip_*": servo(350.0, 200.0),
            "*_knee": servo(300.0, 150.0),
            "*_ankle_*": servo(200.0, 90.0),
        },
        widths={},
    )
    anchor = "pelvis"
    bodies = (
        "pelvis",
        "torso",
        *(f"{side}_{part}" for part in ("upper_arm", "lower_arm", "hand", "thigh", "shin", "foot") for side in SIDES),
    )
    ends = tuple(f"{side}_{part}" for part in ("hand", "foot") for side in SIDES)
