"""Our tasks and the conformance suite: a new yaml in cfg/task is checked without a line added to this file."""

from __future__ import annotations

import pytest

from gpusim_rl.testing.conformance import TaskConformance

# MuJoCo Warp compiles kernels for every scene, up to a minute each: the everyday run proves it on some.
EVERY_DAY = ("Cartpole", "Ant")
# Newton compiles its kernels again for every scene: two scenes prove the protocol.
NEWTON = ("Cartpole", "Ant")


class TestTasks(TaskConformance):
    # Their starts are Gymnasium's to the last digit: joints a little beyond their limits, feet in the ground.
    touching = ("HalfCheetah", "Hopper", "Walker2d")

    @classmethod
    def trainings(cls):
        for name in cls.entries():
            yield name, "mujoco"
            yield pytest.param(name, "mjwarp", marks=() if name in EVERY_DAY else pytest.mark.slow)
            if name in NEWTON:
                yield name, "newton"
