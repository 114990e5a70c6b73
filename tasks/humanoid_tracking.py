"""HumanoidTracking: a humanoid with 28 hinges tracks motion clips."""

from __future__ import annotations

from gpusim_rl.files.paths import assets_dir

from .robots import Motor, Robot
from .tracking import TrackingTask

SIDES = ("right", "left")


def servo(stiffness: float, effort: float) -> Motor:
    """Return a motor with this stiffness [N m/rad]; an action of 1 initially commands half of `effort` [N m]."""
    scale = 0.5 * effort / stiffness
    return Motor(armature=0.02, effort=effort, stiffness=stiffness, damping=0.1 * stiffness, scale=scale)


class HumanoidTracking(TrackingTask):
    """HumanoidTracking: track motion clips; in the default clip, the humanoid walks.

    Model and clips are shared with `HumanoidAMP`; Isaac Lab's clips work too.

    Action space: 28 numbers in [-100, 100], joint target offsets from the pose or the clip / (half the maximum torque /
    stiffness), 0.17 to 0.42 rad: abdomen, neck, right arm, left arm (shoulder x, y and z, elbow), right leg, left leg
    (hip x, y and z, knee, ankle x, y and z).
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
