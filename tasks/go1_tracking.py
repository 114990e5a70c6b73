"""Go1Tracking: Unitree's Go1 tracks motion clips."""

from __future__ import annotations

from .go1_velocity import LEGS, Go1Velocity
from .tracking import TrackingTask


class Go1Tracking(TrackingTask):
    """Go1Tracking: track motion clips; the default clip is a trot.

    Action space: 12 numbers in [-100, 100], joint target offsets from the pose or the clip / 0.373 rad (hip and thigh)
    or 0.249 rad (calf): hip, thigh and calf of the front right, front left, rear right and rear left legs.
    """

    robot = Go1Velocity.robot
    anchor = "trunk"
    bodies = ("trunk", *(f"{leg}_{part}" for leg in LEGS for part in ("thigh", "calf")))
    ends = tuple(f"{leg}_calf" for leg in LEGS)
