"""Conformance suite over all built-in tasks; a new yaml in cfg/task is included automatically."""

from __future__ import annotations

from typing import ClassVar

import pytest

from gpusim_rl.testing.conformance import TaskConformance

# MuJoCo Warp and Newton compile kernels for every scene, up to a minute each, so the default run has only some
# tasks. On MuJoCo, `test_iteration_has_no_host_sync` trains every task.
DEFAULT_RUN = ("Cartpole", "Ant")


class TestTasks(TaskConformance):
    # Start states equal Gymnasium's, with joints slightly beyond their limits and feet in the ground. Those of the
    # tracking tasks are frames of a clip with noise.
    touching = ("HalfCheetah", "Hopper", "Walker2d", "Go1Tracking", "G1Tracking", "HumanoidTracking")
    constant: ClassVar = {"G1Tracking": ("ref_joint_pos", "ref_joint_vel")}  # joints at rest in the clip

    @classmethod
    def trainings(cls):
        for name in cls.entries():
            for sim in ("mujoco", "mjwarp", "newton"):
                yield pytest.param(name, sim, marks=() if name in DEFAULT_RUN else pytest.mark.slow)
