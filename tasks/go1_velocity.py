"""Go1Velocity: Unitree's Go1 follows commanded velocities."""

from __future__ import annotations

from .velocity import Motor, Robot, VelocityTask

ROTOR = 1.11842e-4  # inertia of the rotor, before the gear [kg m^2]


class Go1Velocity(VelocityTask):
    """Go1Velocity: walk with the commanded velocities, forward, sideways and turning.

    Commands, observations, rewards, randomisation and curriculum are those of mjlab 1.6's velocity task of Go1.
    Differences: it starts 1 cm higher, for at mjlab's height feet begin up to 6.5 mm in the ground; a foot that touches
    another leg is in contact too; friction, encoder bias and the trunk's centre of mass are random with `randomize`.

    Action space: 12 numbers in [-100, 100], offset of the joint targets from the pose / 0.373 rad (hip and thigh) or
    0.249 rad (calf): hip, thigh and calf of the legs front right, front left, rear right, rear left.

    Observation space: (uniform noise is added to all of the policy's but commands and last action)

    | num   | name      | observation                                              | unit            |
    |-------|-----------|----------------------------------------------------------|-----------------|
    | 0-2   | lin_vel   | velocity of the IMU, its frame                           | m/s             |
    | 3-5   | ang_vel   | angular velocity of the IMU, its frame                   | rad/s           |
    | 6-8   | gravity   | direction of gravity, trunk frame                        | -               |
    | 9-20  | joint_pos | joint positions from the pose, plus bias of the encoders | rad             |
    | 21-32 | joint_vel | joint velocities                                         | rad/s           |
    | 33-44 | actions   | last action                                              | -               |
    | 45-47 | command   | commanded x, y velocity and yaw rate                     | m/s, m/s, rad/s |

    The critic sees the same without noise and bias, and the feet:

    | num   | name          | observation                                          | unit            |
    |-------|---------------|------------------------------------------------------|-----------------|
    | 0-2   | lin_vel       | velocity of the IMU, its frame                       | m/s             |
    | 3-5   | ang_vel       | angular velocity of the IMU, its frame               | rad/s           |
    | 6-8   | gravity       | direction of gravity, trunk frame                    | -               |
    | 9-20  | joint_pos     | joint positions from the pose                        | rad             |
    | 21-32 | joint_vel     | joint velocities                                     | rad/s           |
    | 33-44 | actions       | last action                                          | -               |
    | 45-47 | command       | commanded x, y velocity and yaw rate                 | m/s, m/s, rad/s |
    | 48-51 | foot_height   | middle of each foot above the ground                 | m               |
    | 52-55 | air_time      | time since each foot left the ground                 | s               |
    | 56-59 | contact       | 1 for feet on the ground, else 0                     | -               |
    | 60-71 | contact_force | sign(f) log(1 + abs(f)) of the forces on feet, world | log(1 + N)      |

    With `terrain=rough` both have a part more, at the end of the policy's: 187 heights of the trunk above the ground.

    Reward terms, x the control step: `VelocityTask.rewards`.

    Start: the pose, 2 to 6 cm above the ground, any yaw; a random command, anew every 3 to 8 s. Termination: a tilt of
    more than 70 degrees.
    """

    robot = Robot(
        name="go1",
        height=0.278,
        pose={"*R_hip_joint": 0.1, "*L_hip_joint": -0.1, "*_thigh_joint": 0.9, "*_calf_joint": -1.8},
        motors=(
            Motor(joints=("*_hip_joint", "*_thigh_joint"), armature=ROTOR * 6.0**2, effort=23.7),
            Motor(joints=("*_calf_joint",), armature=ROTOR * 9.0**2, effort=35.55),
        ),
        feet=("FR_foot", "FL_foot", "RR_foot", "RL_foot"),
        soles=("FR", "FL", "RR", "RL"),
        imu="imu",
        widths={"*_calf_joint": (0.1, 0.6, 0.6), "*": (0.05, 0.3, 0.3)},
    )
