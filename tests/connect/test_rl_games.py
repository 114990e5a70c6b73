"""rl_games adapter."""

from __future__ import annotations

import pytest
import torch

from gpusim_rl import connect
from helpers.reference_env import NUM_ENVS, make


def test_spaces_match_environment():
    info = connect.RlGamesEnv(make(critic=True, clip_actions=0.5)).get_env_info()
    assert info["observation_space"].shape == (4,) and info["state_space"].shape == (8,)
    assert info["observation_space"].high.tolist() == [5.0] * 4  # clip_observations
    assert info["action_space"].high.tolist() == [0.5] and info["agents"] == info["value_size"] == 1
    assert connect.RlGamesEnv(make()).get_env_info()["state_space"] is None


def test_critic_observations_are_states():
    from rl_games.common.ivecenv import IVecEnv

    env = connect.RlGamesEnv(make(critic=True))
    assert isinstance(env, IVecEnv) and env.get_number_of_agents() == 1
    obs, *_ = env.step(torch.zeros(NUM_ENVS, 1))
    assert torch.equal(obs["states"], env.env.look()["critic"])


def test_reset_starts_new_episodes():
    env = connect.RlGamesEnv(make())
    env.step(torch.ones(NUM_ENVS, 1))
    assert env.env.progress.tolist() == [1] * NUM_ENVS
    assert env.reset().shape == (NUM_ENVS, 4)
    assert env.env.progress.tolist() == [0] * NUM_ENVS


@pytest.mark.parametrize("critic", [False, True])
def test_rl_games_finds_registered_env(critic):
    from rl_games.common import vecenv

    from gpusim_rl.connect.rl_games import register

    env = register(make(critic=critic), "registered")
    assert vecenv.create_vec_env("registered", NUM_ENVS, seed=1) is env
