"""Stable-Baselines3 adapter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import gpusim_rl
from gpusim_rl import connect
from helpers.reference_env import NUM_ENVS, ReferenceEnv, make


@pytest.fixture(autouse=True)
def no_logs_in_tmp(monkeypatch, tmp_path):
    monkeypatch.setenv("SB3_LOGDIR", str(tmp_path))  # default: a folder in /tmp per training


def test_adapter_implements_sb3_interface():
    from stable_baselines3.common.vec_env import VecEnv as Sb3VecEnv
    from stable_baselines3.common.vec_env import VecMonitor

    env = connect.Sb3Env(make(critic=True, clip_actions=0.5))
    assert isinstance(env, Sb3VecEnv) and env.num_envs == NUM_ENVS
    assert env.observation_space.shape == (4,) and env.action_space.high.tolist() == [0.5]
    obs = env.reset()
    assert obs.shape == (NUM_ENVS, 4) and obs.dtype == np.float32
    assert env.observation_space.contains(obs[0])
    obs, reward, done, infos = env.step(np.stack([env.action_space.sample() for _ in range(NUM_ENVS)]))
    assert obs.shape == (NUM_ENVS, 4) and obs.dtype == reward.dtype == np.float32
    assert reward.shape == (NUM_ENVS,) and done.shape == (NUM_ENVS,) and done.dtype == bool
    assert infos == [{}] * NUM_ENVS
    assert env.render_mode is None and env.get_attr("max_episode_length", [0, 3]) == [12, 12]
    assert env.env_is_wrapped(VecMonitor) == [False] * NUM_ENVS  # type: ignore[arg-type]
    env.set_attr("note", "x")
    assert env.has_attr("note") and not env.has_attr("no_such_thing")


def test_info_at_episode_end_has_return_and_length():
    reference, env = ReferenceEnv(), connect.Sb3Env(make(), reward_scale=0.5)
    returns, lengths = torch.zeros(NUM_ENVS), torch.zeros(NUM_ENVS)
    for _ in range(40):
        action = reference.action()
        ours, (*_, infos) = reference.step(action), env.step(action.numpy())
        returns, lengths = returns + ours.reward, lengths + 1
        for env_id, info in enumerate(infos):
            if not ours.done[env_id]:
                assert info == {}
                continue
            assert np.array_equal(info["terminal_observation"], ours.final_obs["policy"][env_id].numpy())
            assert info["episode"]["r"] == pytest.approx(returns[env_id].item(), abs=1e-5)
            assert info["episode"]["l"] == lengths[env_id]
        returns, lengths = returns.masked_fill(ours.done, 0.0), lengths.masked_fill(ours.done, 0.0)


def test_diverged_env_ends_with_previous_observation():
    env = connect.Sb3Env(make(speed_at=3))
    for _ in range(3):
        before = env._last.numpy()
        *_, infos = env.step(np.zeros((NUM_ENVS, 1)))
    assert "episode" not in infos[1] and np.array_equal(infos[1]["terminal_observation"], before[1])


def test_returns_cover_whole_episodes():
    env = connect.Sb3Env(make(randomize_episode_start=True, max_force=1e-3, reset_distance=100.0))
    infos = [info for _ in range(24) for info in env.step(np.zeros((NUM_ENVS, 1)))[3] if info]
    lengths = [info["episode"]["l"] for info in infos if "episode" in info]
    assert set(lengths) == {12} and NUM_ENVS <= len(lengths) < 2 * NUM_ENVS <= len(infos)


def test_seed_fixes_all_random_numbers():
    noise = {"observations": {"pole_vel": {"noise": 0.5}}}
    env = connect.Sb3Env(gpusim_rl.make_env("Cartpole", num_envs=NUM_ENVS, device="cpu", seed=3, task=noise))
    env.seed(7)
    first = env.reset()
    assert not np.array_equal(env.reset(), first)
    env.step(np.zeros((NUM_ENVS, 1)))  # new noise
    env.seed(7)
    assert np.array_equal(env.reset(), first)


def test_adapter_works_with_sb3_wrappers_and_evaluation():
    from stable_baselines3 import PPO
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.vec_env import VecCheckNan, VecMonitor, VecNormalize

    env = VecNormalize(VecCheckNan(VecMonitor(connect.Sb3Env(make())), raise_exception=True), norm_reward=False)
    model = PPO("MlpPolicy", env, n_steps=8, batch_size=32, n_epochs=1, device="cpu", seed=1)
    model.learn(8 * NUM_ENVS)
    env.training = False
    _, lengths = evaluate_policy(model, env, n_eval_episodes=10, return_episode_rewards=True)
    assert len(lengths) == 10 and max(lengths) <= 12


def test_truncated_episode_bootstraps_final_observation():
    from stable_baselines3 import PPO

    # only the time limit ends episodes; actions hardly matter
    reference = ReferenceEnv(max_force=1e-3, reset_distance=100.0)
    reference.env.reset()  # SB3 starts with a reset
    for _ in range(12):
        last = reference.step(torch.zeros(NUM_ENVS, 1))
    assert last.truncated.all()
    env = connect.Sb3Env(make(max_force=1e-3, reset_distance=100.0))
    model = PPO("MlpPolicy", env, n_steps=12, batch_size=96, n_epochs=1, learning_rate=0.0, device="cpu", gamma=0.9)
    model.learn(12 * NUM_ENVS)
    value = model.policy.predict_values(last.final_obs["policy"])[:, 0].detach()
    expected = last.reward + 0.9 * value
    assert np.allclose(model.rollout_buffer.rewards[-1], expected.numpy(), atol=1e-3)
