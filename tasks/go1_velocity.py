"""Go1Velocity: Unitree's Go1 tracks commanded velocities."""

from __future__ import annotations

from .robots import Eye, Motor, Robot
from .velocity import VelocityTask

LEGS = ("FR", "FL", "RR", "RL")
ROTOR = 1.11842e-4  # rotor inertia on the motor side of the gear [kg m^2]


class Go1Velocity(VelocityTask):
    """Go1Velocity: walk at commanded velocities, forward, sideways and turning.

    Commands, rewards and curriculum match mjlab 1.6's Go1 velocity task, with the differences listed in `VelocityTask`.
    Go1 starts 1 cm higher: mjlab's height puts feet up to 6.5 mm into the ground.

    Action space: 12 numbers in [-100, 100], joint target offsets from the pose / 0.373 rad (hip and thigh) or 0.249 rad
    (calf): hip, thigh and calf of the front right, front left, rear right and rear left legs.
    """

    robot = Robot(
        name="go1",
        root="trunk",
        torso="trunk",
        imu="imu",
        feet=tuple(f"geom:{leg}_foot_collision" for leg in LEGS),
        soles=LEGS,
        height=0.278,
        pose={"*R_hip_joint": 0.1, "*L_hip_joint": -0.1, "*_thigh_joint": 0.9, "*_calf_joint": -1.8},
        motors={
            "*_hip_joint": Motor.tuned(armature=ROTOR * 6.0**2, effort=23.7),
            "*_thigh_joint": Motor.tuned(armature=ROTOR * 6.0**2, effort=23.7),
            "*_calf_joint": Motor.tuned(armature=ROTOR * 9.0**2, effort=35.55),
        },
        widths={"*_calf_joint": (0.1, 0.6, 0.6), "*": (0.05, 0.3, 0.3)},
        thighs=tuple(f"body:{leg}_thigh" for leg in LEGS),
        shanks=tuple(f"geom:{leg}_calf_collision{i}" for leg in LEGS for i in (1, 2)),
        trot=(1.0, -1.0, -1.0, 1.0),
        elliptic=True,
        eye=Eye(x=0.28, z=0.02, pitch=0.6, near=0.15, far=2.0),
    )
