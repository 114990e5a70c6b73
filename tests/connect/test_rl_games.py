"""Our environments as rl_games'."""

from __future__ import annotations

import pytest
import torch
from rl_games.common import vecenv
from rl_games.common.ivecenv import IVecEnv

from gpusim_rl.connect import RlGamesEnv
from gpusim_rl.connect.rl_games import register
from helpers.reference_env import NUM_ENVS, ReferenceEnv, count_syncs, make


def test_spaces():
    info = RlGamesEnv(make(critic=True, clip_actions=0.5)).get_env_info()
    assert info["observation_space"].shape == (4,) and info["state_space"].shape == (8,)
    assert info["observation_space"].high.tolist() == [5.0] * 4  # clip_observations
    assert info["action_space"].high.tolist() == [0.5] and info["agents"] == info["value_size"] == 1
    assert RlGamesEnv(make()).get_env_info()["state_space"] is None


def test_it_steps_as_our_environment_does():
    reference, env = ReferenceEnv(critic=True), RlGamesEnv(make(critic=True))
    assert isinstance(env, IVecEnv) and env.get_number_of_agents() == 1
    ends = torch.zeros(2)
    for _ in range(40):
        action = reference.action()
        ours, (obs, rewards, dones, infos) = reference.step(action), env.step(action)
        assert torch.equal(obs["obs"], ours.obs["policy"]) and torch.equal(obs["states"], ours.obs["critic"])
        assert torch.equal(rewards, ours.reward)
        assert torch.equal(dones, ours.done)
        assert torch.equal(infos["time_outs"], ours.truncated)
        ends += torch.stack([ours.terminated.sum(), ours.truncated.sum()])
    assert ends.min() > 3, "the task's end and the time limit were both seen"


def test_a_reset_begins_new_episodes():
    env = RlGamesEnv(make())
    env.step(torch.ones(NUM_ENVS, 1))
    assert env.env.progress.tolist() == [1] * NUM_ENVS
    assert env.reset().shape == (NUM_ENVS, 4)
    assert env.env.progress.tolist() == [0] * NUM_ENVS


def test_a_diverged_env_is_reported_as_truncated():
    env = RlGamesEnv(make(speed_at=3))
    for _ in range(3):
        _, rewards, dones, infos = env.step(torch.zeros(NUM_ENVS, 1))
    assert dones.tolist() == infos["time_outs"].tolist() == [False, True, *[False] * 6]
    assert rewards[1] == 0.0


@pytest.mark.parametrize("critic", [False, True])
def test_rl_games_finds_it_by_name(critic):
    env = register(make(critic=critic), "registered")
    assert vecenv.create_vec_env("registered", NUM_ENVS, seed=1) is env


def test_a_step_waits_for_nothing():
    env = RlGamesEnv(make(critic=True))
    syncs = count_syncs(env.env, lambda: env.step(torch.zeros(NUM_ENVS, 1)))
    assert syncs.total == 0, syncs.locations
