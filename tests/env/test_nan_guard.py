"""Tests of the NaN guard: state and action before the first divergence, and their replay."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpusim_rl.env import VecEnv
from gpusim_rl.env.nan_guard import NanGuard, put_state
from gpusim_rl.testing.sync_counter import SyncCounter
from helpers.task_envs import class_env

STATE = {"root_pos": 3, "root_quat": 4, "root_lin_vel": 3, "root_ang_vel": 3, "joint_pos": 8, "joint_vel": 8}


def make_env(task: str, num_envs: int, sim: str = "mujoco", **settings: Any) -> VecEnv:
    env = class_env(task, num_envs, sim=sim, seed=0, **settings)
    env.reset()
    return env


def break_envs(env: VecEnv, *env_ids: int) -> None:
    """Make these envs diverge by an excessive joint speed."""
    articulation = env.sim.articulation(env.sim.scene.articulation_names[0])
    where = torch.zeros(env.num_envs, dtype=torch.bool)
    where[list(env_ids)] = True
    articulation.set_state(where, joint_vel=torch.full_like(articulation.joint_vel, 9e4))


@pytest.mark.parametrize("sim", ["mujoco", "mjwarp"])
def test_first_diverged_env_is_kept_and_replayed(sim):
    env = make_env("Ant", 5, sim)
    random = torch.Generator().manual_seed(1)
    for step in range(1, 8):
        if step in (4, 6):
            break_envs(env, *({3, 4} if step == 4 else {0}))
        action = 2.0 * torch.rand(5, 8, generator=random) - 1.0
        progress = env.progress.clone()
        diverged = env.step(action).diverged
        assert diverged.tolist() == [step == 6, False, False, step == 4, step == 4]
        assert (env.nan_guard.read() is None) == (step < 4)
        if step == 4:
            expected = action[3], int(progress[3]) + 1
    first = env.nan_guard.read()
    assert first is not None
    assert first["env"] == 3 and first["episode_step"] == expected[1]
    assert torch.equal(first["action"], expected[0])
    assert {key: value.numel() for key, value in first["state"]["ant"].items()} == STATE
    assert first["diverged_envs"] == 3
    assert (first["state"]["ant"]["joint_vel"] == 9e4).all()
    assert first["state"]["ant"]["root_quat"].norm().item() == pytest.approx(1.0, abs=1e-4)

    again = make_env("Ant", 2)
    put_state(again.sim, first["state"])
    ant = again.sim.articulation("ant")
    torch.testing.assert_close(ant.root_ang_vel[0], first["state"]["ant"]["root_ang_vel"], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ant.joint_pos[1], first["state"]["ant"]["joint_pos"])
    assert again.step(first["action"].expand(2, -1)).diverged.all()


def test_dump_of_a_fixed_base_has_only_joints():
    env = make_env("Pendulum", 3)
    break_envs(env, 1)
    while env.nan_guard.read() is None:  # the pendulum spins until it diverges
        env.step(torch.zeros(3, 1))
    first = env.nan_guard.read()
    assert first is not None and first["env"] == 1
    assert list(first["state"]["pendulum"]) == ["joint_pos", "joint_vel"]
    put_state(env.sim, first["state"])
    assert env.step(first["action"].expand(3, -1)).diverged.all()


def test_nan_guard_neither_synchronises_nor_allocates():
    env = make_env("Ant", 5)
    guard = NanGuard(env.sim, 8)
    diverged = torch.arange(5) == 2
    none = torch.zeros(5, dtype=torch.bool)
    action = torch.rand(5, 8)
    guard.before_step(action, action)
    kept = [value.data_ptr() for value in vars(guard).values() if isinstance(value, torch.Tensor)]
    with SyncCounter() as syncs:
        for failed in (none, diverged, ~diverged):
            guard.before_step(action, action)
            guard.after_step(failed, env.progress, none)
    assert syncs.total == 0, syncs.locations
    assert kept == [value.data_ptr() for value in vars(guard).values() if isinstance(value, torch.Tensor)]
    first = guard.read()
    assert first is not None and first["env"] == 2
