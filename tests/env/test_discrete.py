"""Tests of tasks with discrete actions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gpusim_rl.api import prepare
from gpusim_rl.distributed.actors import make_trainer
from gpusim_rl.env import VecEnv
from gpusim_rl.errors import ConfigError, TaskError
from gpusim_rl.run.evaluation import evaluate_run
from gpusim_rl.spaces import Box, MultiDiscrete
from helpers.raised import raises
from helpers.task_envs import class_env
from helpers.training import merged

SMALL = {"horizon": 4, "network": {"hidden": [16]}}


def make_env(num_envs: int = 4, *, task_class: Any = None, **task: Any) -> VecEnv:
    env = class_env("Cartpole", num_envs, task_class, seed=3, **task)
    env.reset()
    return env


def test_two_choices_equal_the_extreme_actions() -> None:
    continuous, discrete = make_env(), make_env(discrete=True)
    assert continuous.action_space == Box(1, 1.0) and discrete.action_space == MultiDiscrete((2,))
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        index = torch.randint(2, (4, 1), generator=generator)
        expected, step = continuous.step(2.0 * index - 1.0), discrete.step(index)
        assert torch.equal(step.obs["policy"], expected.obs["policy"]) and torch.equal(step.reward, expected.reward)
        assert not step.diverged.any()


def test_out_of_range_index_is_clamped() -> None:
    env, other = make_env(discrete=True), make_env(discrete=True)
    step, expected = env.step(torch.tensor([[-5], [0], [7], [1]])), other.step(torch.tensor([[0], [0], [1], [1]]))
    assert torch.equal(step.obs["policy"], expected.obs["policy"]) and not step.diverged.any()
    assert env.task.actions.dtype == torch.int64


def test_float_actions_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"torch\.int64, got torch\.float32"):
        make_env(discrete=True).step(torch.zeros(4, 1))


def test_invalid_choices_are_rejected() -> None:
    base: Any = prepare("Cartpole").task_class

    class Wrong(base):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.choices = (2, 1)

    with raises(TaskError, key="Wrong.choices", got=(2, 1)):
        make_env(task_class=Wrong)


@pytest.mark.parametrize("key", ["actions", "latency"])
def test_noise_and_latency_of_discrete_actions_are_rejected(key: str) -> None:
    params = {key: {"range": [0, 2], "operation": "additive", "distribution": "gaussian"}}
    with pytest.raises(ConfigError, match="noise or latency"):
        make_env(discrete=True, randomize=True, randomization_params=params)


@pytest.mark.parametrize(
    "algo", ["ppo", "dqn", *(pytest.param(name, marks=pytest.mark.slow) for name in ("a2c", "reinforce", "impala"))]
)
def test_discrete_task_trains_and_is_evaluated(algo: str, tmp_path: Path) -> None:
    off_policy = {"learning_starts": 16, "batch_size": 8, "replay": {"capacity": 64}} if algo == "dqn" else {}
    settings = {algo: merged(SMALL, off_policy), "log": {"console": "quiet", "dir": str(tmp_path)}}
    settings |= {"task": {"discrete": True, "episode_length": 20}, "num_envs": 4, "max_iterations": 6}
    trainer = make_trainer(prepare("Cartpole", algo=algo, **settings))
    trainer.train()
    assert trainer.run_dir is not None
    result = evaluate_run(prepare("Cartpole", checkpoint=str(trainer.run_dir), test=True))
    assert result["episodes"] == 4 and result["return_mean"] != 0.0


@pytest.mark.parametrize("algo", ["sac", "td3"])
def test_continuous_algorithms_reject_discrete_actions(algo: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"algo={algo}"):
        make_trainer(prepare("Cartpole", algo=algo, task={"discrete": True}, log={"dir": str(tmp_path)}))
