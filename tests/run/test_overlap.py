"""Half of the envs step while the policy acts for the other half: the training is the same.

To the bit, where matrices of N/2 rows are multiplied as those of N are; with 6 envs some values differ by 6e-8.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import torch

from gpusim_rl.api import prepare
from gpusim_rl.connect.gymnasium_in import GymnasiumEnv
from gpusim_rl.distributed.actors import make_trainer
from gpusim_rl.env import Step, half_batches
from gpusim_rl.env.half_batches import HalfBatches
from gpusim_rl.errors import ConfigError, TaskError
from gpusim_rl.run.trainer import Trainer
from helpers.states import fields
from helpers.training import SMALL_PPO, differences, the_run

KINDS: dict[str, dict[str, Any]] = {
    "ppo": {"ppo": SMALL_PPO},
    "held noise": {"ppo": {**SMALL_PPO, "noise": {"steps": [3.0]}}},
    "lstm": {"ppo": {"horizon": 8, "minibatch_size": 32, "network": {"hidden": [16], "rnn": "lstm", "rnn_size": 8}}},
    "impala": {"algo": "impala", "impala": {"horizon": 8, "network": {"hidden": [16]}}},
}


def make(folder: Path, **settings: Any) -> Trainer:
    return make_trainer(prepare("Gymnasium", log={"console": "quiet", "dir": str(folder)}, **settings))


def trained(folder: Path, overlap: bool, kind: dict[str, Any]) -> dict[str, Any]:
    """State after a training of whose episodes some end by falling and some by the limit of 20 steps."""
    env = {"id": "InvertedPendulum-v5", "max_episode_steps": 20, "overlap": overlap}
    trainer = make(folder, num_envs=16, max_iterations=4, env=env, **kind)
    trainer.train()
    return trainer.state_dict()


@pytest.mark.parametrize(
    "kind", ["ppo", *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS if kind != "ppo")]
)
def test_a_training_is_the_same_to_the_bit(tmp_path: Path, kind: str) -> None:
    together, overlapped = (trained(tmp_path / str(overlap), overlap, KINDS[kind]) for overlap in (False, True))
    for part in ("policy", "algorithm", "metrics"):
        assert differences(together[part], overlapped[part]) == [], part


@pytest.mark.parametrize("algo", ["ppo", "distill"])
def test_a_recurrent_teacher_acts_for_each_half(tmp_path: Path, algo: str) -> None:
    network = {"hidden": [16], "rnn": "gru", "rnn_size": 8}
    env = {"id": "InvertedPendulum-v5", "max_episode_steps": 20}
    make(tmp_path / "teacher", num_envs=16, max_iterations=1, env=env, ppo={**SMALL_PPO, "network": network}).train()
    teacher = str(the_run(tmp_path / "teacher"))
    kinds = {
        "ppo": {"ppo": {**SMALL_PPO, "imitation": {"teacher": teacher, "weight": 1.0}}},
        "distill": {"algo": "distill", "distill": {"teacher": teacher, "horizon": 8, "network": {"hidden": [16]}}},
    }
    together, overlapped = (trained(tmp_path / str(overlap), overlap, kinds[algo]) for overlap in (False, True))
    for part in ("policy", "algorithm"):
        assert differences(together[part], overlapped[part]) == [], part


def test_an_algorithm_that_cannot_act_for_a_half_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"env\.overlap=true: algo=dqn cannot act for half of the envs\. Try env\."):
        make(tmp_path, algo="dqn", env={"id": "CartPole-v1", "overlap": True})


def test_halves_need_an_even_number(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"num_envs must be even, got 7; try 8"):
        make(tmp_path, num_envs=7, env={"id": "CartPole-v1", "overlap": True})


class Wrong(gym.Wrapper):
    """Returns another observation than it should after some steps."""

    def step(self, action: Any) -> Any:
        obs, *rest = super().step(action)
        return obs[:2], *rest


def halves(wrong: bool) -> HalfBatches:
    def make(number: int) -> gym.Env:
        env = gym.make("CartPole-v1")
        return Wrong(env) if wrong and number else env

    envs = [gym.vector.SyncVectorEnv([lambda number=number: make(number)] * 2) for number in range(2)]
    return HalfBatches(
        *(GymnasiumEnv(env, seed=seed, max_episode_steps=500) for env, seed in zip(envs, (0, 2), strict=True))
    )


def test_both_halves_step_as_one() -> None:
    env, whole = (
        halves(wrong=False),
        GymnasiumEnv(gym.vector.SyncVectorEnv([lambda: gym.make("CartPole-v1")] * 4), seed=0, max_episode_steps=500),
    )
    assert env.num_envs == 4 and [rows.start for rows in env.rows] == [0, 2]
    assert differences(env.reset(), whole.reset()) == []
    for t in range(40):
        action = torch.tensor([[0], [t % 2], [1], [t // 2 % 2]])
        step, other = env.step(action), whole.step(action)
        assert differences(fields(step), fields(other)) == []
    env.close()


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_what_a_half_raises_is_raised() -> None:
    env = halves(wrong=True)
    env.reset()
    with pytest.raises((TaskError, ValueError)):
        env.step(torch.zeros(4, 1, dtype=torch.int64))
    env.close()


class Hanging(GymnasiumEnv):
    """Its step does not end."""

    def step(self, action: torch.Tensor) -> Step:
        threading.Event().wait()
        raise AssertionError


def test_the_end_does_not_wait_for_a_step_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half_batches, "CLOSE_S", 0.05)
    first, second = (cls(gym.make_vec("CartPole-v1", 2, "sync"), seed=0) for cls in (GymnasiumEnv, Hanging))
    env = HalfBatches(first, second)
    env.reset()
    for half in range(2):
        env.begin(half, torch.zeros(2, 1, dtype=torch.int64))
    env.close()


def make_three(num_envs: int) -> gym.vector.VectorEnv:
    return gym.make_vec("CartPole-v1", 3, "sync")


def test_a_function_that_makes_another_number_than_half_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^env\.overlap=true makes two halves, of 4 envs each: .* made 3 envs"):
        make(tmp_path, num_envs=8, env={"_target_": f"{__name__}.make_three", "overlap": True})
