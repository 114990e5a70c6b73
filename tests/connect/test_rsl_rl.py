"""rsl_rl adapter."""

from __future__ import annotations

import torch

from gpusim_rl import connect
from helpers.reference_env import NUM_ENVS, make

MODEL = {"class_name": "MLPModel", "hidden_dims": [16]}
SETTINGS = {
    "num_steps_per_env": 8,
    "save_interval": 100,
    "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
    "actor": {**MODEL, "distribution_cfg": {"class_name": "GaussianDistribution"}},
    "critic": MODEL,
    "algorithm": {"class_name": "PPO", "gamma": 0.9},
}


def test_adapter_implements_rsl_rl_interface():
    from rsl_rl.env import VecEnv as RslRlVecEnv
    from rsl_rl.utils import check_nan, resolve_obs_groups

    env = connect.RslRlEnv(make(critic=True))
    assert isinstance(env, RslRlVecEnv)
    for name in RslRlVecEnv.__annotations__:
        assert hasattr(env, name), name
    assert (env.num_envs, env.num_actions, env.max_episode_length) == (NUM_ENVS, 1, 12)
    obs = env.get_observations()
    assert obs.batch_size == (NUM_ENVS,) and obs["policy"].shape == (NUM_ENVS, 4)
    groups = {"actor": ["policy"], "critic": ["policy", "critic"]}
    assert resolve_obs_groups(obs, groups, ["actor", "critic"]) == groups
    obs, rewards, dones, extras = env.step(torch.zeros(NUM_ENVS, 1))
    check_nan(obs, rewards, dones)
    assert obs["critic"].shape == (NUM_ENVS, 8)
    assert rewards.shape == dones.shape == extras["time_outs"].shape == (NUM_ENVS,)


def test_time_out_bootstraps_value_before_step():
    from rsl_rl.runners import OnPolicyRunner

    inner = make(max_force=1e-3, reset_distance=100.0)  # no pole falls before the time limit
    runner = OnPolicyRunner(connect.RslRlEnv(inner), {**SETTINGS}, device="cpu")
    env, algorithm, timed_out = runner.env, runner.alg, 0
    obs = env.get_observations()
    with torch.inference_mode():
        for step in range(8 * 3):
            algorithm.storage.clear() if step % 8 == 0 else None
            actions = algorithm.act(obs)
            values = algorithm.transition.values[:, 0]
            obs, rewards, dones, extras = env.step(actions)
            algorithm.process_env_step(obs, rewards, dones, extras)
            expected = rewards + 0.9 * values * extras["time_outs"]
            assert torch.equal(algorithm.storage.rewards[step % 8, :, 0], expected)
            timed_out += int(extras["time_outs"].sum())
    assert timed_out > 0


def test_runner_can_stagger_episodes(tmp_path, capsys):
    from rsl_rl.runners import OnPolicyRunner

    # weak actions on a long rail: no pole falls in 8 steps
    inner = make(episode_length=1000, max_force=1e-3, reset_distance=100.0)
    env = connect.RslRlEnv(inner)
    assigned = []
    original = torch.randint_like
    try:
        torch.randint_like = lambda *a, **k: assigned.append(original(*a, **k)) or assigned[-1]
        runner = OnPolicyRunner(env, {**SETTINGS}, log_dir=None, device="cpu")
        runner.learn(1, init_at_random_ep_len=True)
    finally:
        torch.randint_like = original
    running = env.episode_length_buf > 8  # has not ended yet
    assert running.any() and torch.equal(env.episode_length_buf[running], assigned[0][running] + 8)
    assert inner.staggered[running].all()
