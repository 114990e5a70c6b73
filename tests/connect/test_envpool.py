"""Envs of EnvPool, if installed (`pip install -e ".[envpool]"`; its assets take 800 MB)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpusim_rl.api import prepare
from gpusim_rl.connect.gymnasium_in import EVALUATED_STEPS, first_seed
from gpusim_rl.distributed.actors import make_trainer
from gpusim_rl.errors import ConfigError
from gpusim_rl.run.trainer import Trainer
from helpers.training import SMALL_PPO, differences, read_csv, the_run

envpool = pytest.importorskip("envpool")


def trainer(folder: Path, env_id: str, **env: Any) -> Trainer:
    env = {"id": env_id, "vectorization": "envpool", **env}
    log = {"console": "quiet", "dir": str(folder)}
    return make_trainer(prepare("Gymnasium", num_envs=8, max_iterations=4, seed=3, env=env, log=log, ppo=SMALL_PPO))


def test_episodes_equal_envpool_episodes(tmp_path: Path) -> None:
    ours = trainer(tmp_path, "CartPole-v1")
    theirs = envpool.make("CartPole-v1", env_type="gymnasium", num_envs=8, seed=first_seed(3))
    np.testing.assert_array_equal(ours.collector.obs["policy"].numpy(), theirs.reset()[0])
    ended = 0
    for t in range(60):
        action = torch.tensor([[(t + i) // 2 % 2] for i in range(8)])
        step = ours.env.step(action)
        obs, _, terminated, truncated, _ = theirs.step(action[:, 0].numpy())
        np.testing.assert_array_equal(step.final_obs["policy"].numpy(), obs)
        np.testing.assert_array_equal(step.done.numpy(), terminated | truncated)
        if step.done.any():
            numbers = np.flatnonzero(terminated | truncated).astype(np.int32)
            obs = obs.copy()
            obs[numbers] = theirs.reset(numbers)[0]
            ended += len(numbers)
        np.testing.assert_array_equal(step.obs["policy"].numpy(), obs)
    assert ended > 8
    ours.close()


def test_env_without_time_limit_uses_fallback(tmp_path: Path) -> None:
    assert trainer(tmp_path, "Blackjack-v1").env.max_episode_length == EVALUATED_STEPS
    assert trainer(tmp_path, "Blackjack-v1", max_episode_steps=9).env.max_episode_length == 9


@pytest.mark.parametrize(
    ("env", "word"),
    [({"kwargs": {"no_such": 3}}, "no_such"), ({"kwargs": {"max_episode_steps": "x"}}, "max_episode_steps")],
)
def test_wrong_arguments_are_reported_in_one_line(tmp_path: Path, env: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=f"CartPole-v1 .*{word}"):
        trainer(tmp_path, "CartPole-v1", **env)


@pytest.mark.parametrize("env_id", ["CartPole-v1", "HalfCheetah-v5"])
def test_same_seed_repeats_training(tmp_path: Path, env_id: str) -> None:
    states = []
    for name in ("first", "second"):
        it = trainer(tmp_path / name, env_id)
        it.train()
        states.append(it.state_dict())
        assert len(read_csv(the_run(tmp_path / name))) == 4
    assert differences(states[0]["policy"], states[1]["policy"]) == []
