"""Tasks as Gymnasium environments, against Gymnasium's checker and its vector env."""

from __future__ import annotations

import sys

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import gpusim_rl.connect.gymnasium_out as ours
from gpusim_rl.errors import ConfigError

N, LENGTH = 3, 5
SHORT = {"device": "cpu", "task": {"episode_length": LENGTH}}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("discrete", [False, True])
def test_gymnasium_checker_passes(discrete, monkeypatch):
    monkeypatch.setattr(ours, "PICTURE", 48)  # renders faster
    env = gym.make("gpusim_rl/Cartpole-v0", device="cpu", render_mode="rgb_array", task={"discrete": discrete})
    check_env(env.unwrapped, skip_render_check=discrete)
    assert env.unwrapped.metadata["render_fps"] == 60
    if not discrete:
        picture = env.unwrapped.render()
        assert picture.shape == (48, 48, 3) and picture.std() > 5
    env.close()


def test_id_with_module_needs_no_import(monkeypatch):
    monkeypatch.delitem(sys.modules, ours.__name__)
    monkeypatch.delitem(gym.registry, "gpusim_rl/Pendulum-v0")
    env = gym.make(f"{ours.__name__}:gpusim_rl/Pendulum-v0", device="cpu")
    assert env.reset()[0].shape == (3,)
    env.close()


def test_seeds_fix_starts_and_steps():
    def play(seed: int) -> np.ndarray:
        obs, _ = envs.reset(seed=seed)
        return np.stack([obs, *(envs.step(action)[0] for action in actions)])

    envs = gym.make_vec("gpusim_rl/Cartpole-v0", num_envs=N, **SHORT)
    actions = np.random.default_rng(0).uniform(-1, 1, (2 * LENGTH, N, 1)).astype(np.float32)
    first, other, again = play(1), play(2), play(1)
    assert np.array_equal(first, again) and not np.array_equal(first[0], other[0])
    assert np.ptp(first[0], axis=0).min() > 0, "starts differ between envs"
    envs.close()


def reference(mode: AutoresetMode) -> SyncVectorEnv:
    """Build Gymnasium's vector env of our single envs: other starts, same reset schedule."""
    return SyncVectorEnv([lambda: ours.TaskEnv("Cartpole", **SHORT)] * N, autoreset_mode=mode)


@pytest.mark.parametrize("mode", AutoresetMode)
def test_episodes_follow_gymnasium_autoreset(mode):
    envs, model = gym.make_vec("gpusim_rl/Cartpole-v0", num_envs=N, autoreset_mode=mode, **SHORT), reference(mode)
    assert envs.observation_space == model.observation_space and envs.action_space == model.action_space
    assert envs.metadata["autoreset_mode"] == mode
    for env in (envs, model):
        env.reset(seed=0)
    before = None
    for number in range(3 * LENGTH):
        action = envs.action_space.sample()
        if mode is AutoresetMode.DISABLED and before is not None and before.any():
            with pytest.raises(ResetNeeded):
                envs.step(action)
            mask = {"reset_mask": before.copy()}
            kept = envs._last.copy()
            obs, _ = envs.reset(options=dict(mask))
            model.reset(options=dict(mask))
            assert np.array_equal(obs[~before], kept[~before]) and (np.abs(obs[before]) < 0.3).all()
        obs, reward, terminated, truncated, info = envs.step(action)
        expected_obs, expected_reward, expected_terminated, expected_truncated, expected_info = model.step(action)
        assert np.array_equal(terminated, expected_terminated) and np.array_equal(truncated, expected_truncated), number
        assert obs.shape == expected_obs.shape and obs.dtype == expected_obs.dtype
        assert reward.dtype == expected_reward.dtype and np.array_equal(reward == 0, expected_reward == 0)
        assert info.keys() == expected_info.keys()
        done = terminated | truncated
        if mode is AutoresetMode.NEXT_STEP and before is not None and before.any():
            assert not done.any() and (reward[before] == 0).all() and (np.abs(obs[before]) < 0.3).all()
        if done.any() and mode is AutoresetMode.SAME_STEP:
            assert info["final_obs"].dtype == expected_info["final_obs"].dtype
            assert all(a.shape == b.shape for a, b in zip(info["final_obs"], expected_info["final_obs"], strict=True))
            assert np.array_equal(info["_final_obs"], expected_info["_final_obs"])
            assert (np.abs(obs[done]) < 0.3).all(), "first observation of the next episode"
            assert not np.array_equal(info["final_obs"][0], obs[0])
        before = done
    assert not expected_info.keys() - {"final_obs", "_final_obs", "final_info", "_final_info"}
    envs.close(), model.close()


def test_env_that_ends_early_resets_alone():
    settings = {"device": "cpu", "task": {"reset_distance": 0.02, "episode_length": 1000}}
    envs = gym.make_vec("gpusim_rl/Cartpole-v0", num_envs=8, **settings)
    envs.reset(seed=1)
    ended = np.zeros(8, dtype=int)
    for _ in range(40):
        _, _, terminated, truncated, _ = envs.step(np.full((8, 1), 0.1, np.float32))
        ended += terminated
        assert not truncated.any()
    assert ended.max() > 1 and np.ptp(ended) > 0
    envs.close()


def test_task_env_accepts_class_and_rejects_wrong_input():
    from gpusim_rl.tasks.pendulum import Pendulum

    env = gym.make("gpusim_rl/Task-v0", task_name=Pendulum, device="cpu")
    assert env.observation_space.shape == (3,)
    env.close()
    with pytest.raises(ConfigError, match="Did you mean"):
        gym.make("gpusim_rl/Task-v0", task_name="Pendulm", device="cpu")
    with pytest.raises(ValueError, match=r"render_mode.*'human'"):
        ours.TaskVectorEnv("Pendulum", 2, render_mode="human", device="cpu")
    envs = ours.TaskVectorEnv("Pendulum", 2, autoreset_mode="Disabled", device="cpu")
    with pytest.raises(ResetNeeded, match=r"envs \[0, 1\]"):
        envs.step(np.zeros((2, 1), np.float32))
    with pytest.raises(ValueError, match="bool array"):
        envs.reset(options={"reset_mask": np.zeros(3, dtype=bool)})
    envs.close()
