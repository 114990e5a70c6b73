"""Our tasks and the conformance suite: a new yaml in cfg/task is checked without a line added to this file."""

from __future__ import annotations

from typing import ClassVar

import pytest

from gpusim_rl.testing.conformance import TaskConformance

# MuJoCo Warp and Newton compile kernels for every scene, up to a minute each: the everyday run proves them on some. On
# MuJoCo, `test_an_iteration_waits_for_nothing` trains every task.
EVERY_DAY = ("Cartpole", "Ant")


class TestTasks(TaskConformance):
    # Their starts are Gymnasium's to the last digit: joints a little beyond their limits, feet in the ground. Those of
    # the tracking tasks are frames of a clip, in which feet stand, with noise.
    touching = ("HalfCheetah", "Hopper", "Walker2d", "Go1Tracking", "G1Tracking", "HumanoidTracking")
    constant: ClassVar = {"G1Tracking": ("ref_joint_pos", "ref_joint_vel")}  # joints that rest in the clip

    @classmethod
    def trainings(cls):
        for name in cls.entries():
            for sim in ("mujoco", "mjwarp", "newton"):
                yield pytest.param(name, sim, marks=() if name in EVERY_DAY else pytest.mark.slow)
