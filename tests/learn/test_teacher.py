"""PPO with a teacher: imitation loss, schedule, resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gpusim_rl.api import prepare
from gpusim_rl.distributed.actors import make_trainer
from gpusim_rl.errors import ConfigError
from gpusim_rl.learn.algorithm import EnvSpec, LearnerContext, Policy, TrainedPolicy
from gpusim_rl.learn.minibatch import Samples
from gpusim_rl.learn.ppo import PPO
from gpusim_rl.learn.teacher import IMITATION, LABEL
from gpusim_rl.run.trainer import Trainer
from gpusim_rl.settings.checks import build
from gpusim_rl.settings.schema import PPOConfig
from gpusim_rl.spaces import Box
from gpusim_rl.testing.conformance import merged
from helpers.composed import algorithm_defaults
from helpers.fakes import Env, RandomEnv
from helpers.on_policy import collect, prepared
from helpers.training import SMALL_PPO, the_run

GUIDED: dict[str, Any] = {"run": "teacher", "weight": 2.0}


class Half(Policy):
    """Policy whose action is half of its observation."""

    def act(self, obs: Any, hidden: Any, deterministic: bool = True) -> Any:
        return 0.5 * obs["policy"], hidden


def learner(env: Env, *, device: str = "cpu", teacher: dict[str, Any] | None = None, **changes: Any) -> PPO:
    torch.manual_seed(1)
    small = {**SMALL_PPO, "precision": "fp32", "teacher": {**GUIDED, **(teacher or {})}}
    found = TrainedPolicy(Half(), None, {"policy": env.obs_sizes.get("teacher", env.obs_sizes["policy"])}, "digest")
    spec = EnvSpec(env.num_envs, env.obs_sizes, Box(env.num_actions), 1)
    context = LearnerContext("ppo", load_policy=lambda name: found)
    cfg = build(PPOConfig, merged(algorithm_defaults("ppo"), small, changes), "ppo")
    return PPO(cfg, spec, context, device=torch.device(device), seed=0, max_iterations=100)


@pytest.mark.parametrize("rnn", [None, "lstm"])
def test_distance_to_teacher_is_added_to_the_loss(rnn: str | None) -> None:
    env = RandomEnv(6, {"policy": 2, "teacher": 2}, num_actions=2, seed=4)
    it = learner(env, network={"rnn": rnn}, normalize_obs=False)
    collect(it, env)
    assert it.losses[-1] == IMITATION and set(it.rollout.obs) == {"policy"}
    chunk = prepared(it)[1].select(torch.arange(it.num_sequences))
    weight = Samples.weight_of(chunk.packed)
    parameters = it.steps.optimizer.parameters

    def gradient(loss: Tensor, weights: Tensor | None = None) -> list[Tensor]:
        found = torch.autograd.grad(loss, parameters, weights, allow_unused=True)
        return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]

    def learned() -> tuple[Tensor, list[Tensor]]:
        losses = it._loss(chunk.inputs, chunk.packed, chunk.hidden, chunk.is_first)
        return losses[-1].detach(), gradient(losses, it._coefficients)

    loss, whole = learned()
    mean = it.policy({"policy": chunk.inputs["policy"]}, chunk.hidden, chunk.is_first)[0].mode
    apart = ((mean - chunk.inputs[LABEL]).square().mean(dim=-1) * weight).sum()
    torch.testing.assert_close(loss, apart.detach())
    assert float(loss) > 1.0
    it._coefficients[-1].fill_(0.0)
    _, without_teacher = learned()
    for both, one, other in zip(whole, without_teacher, gradient(2.0 * apart), strict=True):
        torch.testing.assert_close(both, one + other, rtol=1e-3, atol=1e-4)


def test_imitation_targets_stay_fp32() -> None:
    env = RandomEnv(6, {"policy": 2}, num_actions=2)
    it = learner(env, precision="bf16")
    collect(it, env)
    inputs = prepared(it)[1].inputs
    assert inputs["policy"].dtype == torch.bfloat16 and inputs[LABEL].dtype == torch.float32
    assert torch.isfinite(it.update()[IMITATION])


def test_teacher_settings_without_effect_are_rejected() -> None:
    for teacher, words in (({"weight": 0.0}, "weight=0"), ({"begin": 8}, "end=0")):
        with pytest.raises(ConfigError, match=words):
            learner(RandomEnv(2), teacher=teacher)


def test_teacher_weight_falls_with_control_steps() -> None:
    env = RandomEnv(4, {"policy": 2}, num_actions=2)
    it, seen = learner(env, teacher={"begin": 8, "end": 24}), []
    obs = env.reset()
    for _ in range(5):
        obs = collect(it, env, obs)
        it.update()
        seen.append(float(it._coefficients[-1]))
    assert seen == [2.0, 2.0, 1.0, 0.0, 0.0]


def test_policy_without_rewards_matches_its_teacher() -> None:
    env = RandomEnv(16, {"policy": 2}, num_actions=2)
    it, obs, losses = learner(env, learning_rate=3e-3, schedule="constant", reward_scale=1e-9), env.reset(), []
    for _ in range(40):
        obs = collect(it, env, obs)
        losses.append(float(it.update()[IMITATION]))
    assert losses[-1] < 0.1 * losses[0]


# Whole runs


def run(folder: Path, name: str = "Cartpole", **changes: Any) -> Trainer:
    settings = {"num_envs": 8, "max_iterations": 2, "seed": 1, "log": {"console": "quiet", "dir": str(folder)}}
    return make_trainer(prepare(name, **merged(settings, {"ppo": SMALL_PPO}, changes)))


def test_teacher_of_another_robot_warns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "teacher", "Go1Velocity", num_envs=2, max_iterations=1).train()
    teacher = {"run": str(the_run(tmp_path / "teacher")), "weight": 1.0}
    run(tmp_path / "a", "Go2Velocity", num_envs=2, ppo={"teacher": teacher})
    line = "gpusim_rl.tasks.go1_velocity.Go1Velocity, not gpusim_rl.tasks.go2_velocity.Go2Velocity"
    assert line in capsys.readouterr().err
