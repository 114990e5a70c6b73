"""A2C and REINFORCE: gradients, returns, schedules, settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gpusim_rl.errors import ConfigError
from gpusim_rl.learn.minibatch import Samples
from gpusim_rl.learn.on_policy import OnPolicy
from gpusim_rl.settings.schema import A2CConfig, PPOConfig, ReinforceConfig
from helpers.fakes import RandomEnv
from helpers.on_policy import NAMES, collect, make_on_policy, on_policy_config, prepared

KINDS: dict[str, dict[str, Any]] = {
    "feed-forward": {},
    "separate": {"network": {"separate": True, "state_dependent_std": True}, "schedule": "linear"},
    "lstm": {"network": {"rnn": "lstm"}, "max_grad_norm": None},
}
RAW = {"normalize_obs": False, "normalize_value": False, "normalize_advantage": False}
GAMMA = 0.9


def gradients(algorithm: OnPolicy) -> dict[str, Tensor]:
    found = {name: parameter.grad for name, parameter in algorithm.policy.named_parameters()}
    return {name: grad for name, grad in found.items() if grad is not None}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "gae_lambda"), [("a2c", 0.95), ("reinforce", 1.0)])
def test_gradient_equals_ppo_at_ratio_one(kind: str, name: str, gae_lambda: float) -> None:
    found = []
    whole = {"epochs": 1, "minibatch_size": 12 * 8, "clip": 0.2, "value_clip": True, "gae_lambda": gae_lambda}
    for algorithm, more in ((name, {}), ("ppo", whole)):
        env = RandomEnv(12)
        it = make_on_policy(algorithm, env, **KINDS[kind], entropy_coef=0.01, **more)
        collect(it, env)
        stats = it.update()
        found.append(gradients(it))
    assert abs(stats["policy/kl"]) < 1e-6 and stats["policy/clip_fraction"] == 0.0, "ratio is not 1"
    assert found[0].keys() == found[1].keys()
    for parameter, grad in found[0].items():
        assert grad.abs().max() > 1e-6, parameter
        torch.testing.assert_close(grad, found[1][parameter], atol=1e-6, rtol=1e-6)


def test_reinforce_return_sums_to_episode_end() -> None:
    env = RandomEnv(16, ends=(0.1, 0.1, 0.1))
    it = make_on_policy("reinforce", env, **RAW, gamma=GAMMA)
    steps = []
    step = env.step
    env.step = lambda action: steps.append(step(action)) or steps[-1]  # type: ignore[method-assign]
    collect(it, env)
    _, batch, _ = prepared(it)
    samples = Samples.unpack(batch.packed, 3, 6)
    value = it.rollout.value
    counted = 0
    for i in range(env.num_envs):
        for t in range(it.horizon):
            expected, weight = 0.0, 1.0
            for k in range(t, it.horizon):
                now = steps[k]
                if now.diverged[i]:  # bootstrap with the previous value
                    expected += weight * float(value[k, i])
                    break
                expected += weight * float(now.reward[i])
                weight *= GAMMA
                if now.terminated[i]:
                    break
                if now.truncated[i] or k == it.horizon - 1:
                    expected += weight * float(it.policy.value(now.final_obs if now.truncated[i] else now.obs, ())[i])
                    break
            at = t * env.num_envs + i
            assert samples.weight[0, at] == (not steps[t].diverged[i])
            if samples.weight[0, at]:
                assert float(samples.target[0, at]) == pytest.approx(expected, abs=1e-5)
                assert -float(samples.cost[0, at]) == pytest.approx(expected - float(value[t, i]), abs=1e-5)
                counted += 1
    assert counted > 80


@pytest.mark.parametrize("name", [*NAMES, "ppo"])
def test_linear_schedule_reaches_zero(name: str) -> None:
    env = RandomEnv(4)
    it = make_on_policy(name, env, schedule="linear", learning_rate=0.1)
    it.max_iterations = 2
    rates = []
    for _ in range(3):
        collect(it, env)
        rates.append(it.update()["policy/learning_rate"].item())
    assert rates == pytest.approx([0.1, 0.05, 0.0])


def test_settings_of_other_algorithms_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"a2c\.schedule: .* got 'adaptive'"):
        on_policy_config("a2c", schedule="adaptive")
    for name, key in (("a2c", "clip"), ("reinforce", "gae_lambda")):
        with pytest.raises(ConfigError, match=rf"unknown key '{name}\.{key}'"):
            on_policy_config(name, **{key: 0.5})
    assert [cls.__mro__[1].__name__ for cls in (PPOConfig, A2CConfig, ReinforceConfig)] == ["OnPolicyConfig"] * 3
