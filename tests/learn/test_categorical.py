"""Discrete actions: the categorical distribution, and PPO with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical as Reference
from torch.distributions import kl_divergence

from gpusim_rl.env import Step
from gpusim_rl.errors import ConfigError
from gpusim_rl.learn.algorithm import EnvSpec, LearnerContext
from gpusim_rl.learn.distributions import Categorical, CategoricalHead
from gpusim_rl.learn.on_policy import OnPolicy
from gpusim_rl.learn.ppo import PPO
from gpusim_rl.learn.sac import SAC
from gpusim_rl.spaces import MultiDiscrete
from helpers.fakes import ppo_config
from helpers.off_policy import off_policy_config

COUNTS = (3, 2, 4)
NUM_ENVS = 64


def references(logits: Tensor) -> list[Reference]:
    return [Reference(logits=part) for part in logits.split(COUNTS, dim=-1)]


def test_categorical_equals_product_of_torch_distributions() -> None:
    torch.manual_seed(0)
    old, now = 3.0 * torch.randn(5, 7, 9), 3.0 * torch.randn(5, 7, 9)
    ours, theirs = Categorical(now, COUNTS), references(now)
    action = torch.stack([reference.sample() for reference in theirs], dim=-1)
    for given in (action, action.float()):  # a rollout stores floats
        expected = torch.stack([r.log_prob(action[..., k]) for k, r in enumerate(theirs)]).sum(dim=0)
        torch.testing.assert_close(ours.log_prob(given), expected)
    torch.testing.assert_close(ours.entropy(), torch.stack([r.entropy() for r in theirs]).sum(dim=0))
    kl = torch.stack([kl_divergence(a, b) for a, b in zip(references(old), theirs, strict=True)]).sum(dim=0)
    torch.testing.assert_close(ours.kl_from(Categorical(old, COUNTS)), kl)
    assert (ours.kl_from(ours) == 0.0).all()
    assert torch.equal(ours.mode, torch.stack([r.probs.argmax(dim=-1) for r in theirs], dim=-1))  # type: ignore[union-attr]
    assert torch.equal(ours[2].logits, now[2])


def test_samples_follow_softmax_of_logits() -> None:
    head = CategoricalHead(4, MultiDiscrete(COUNTS))
    logits = torch.tensor([0.0, 1.0, -2.0, 0.5, -0.5, 3.0, 0.0, 1.0, 1.0])
    draws = 200_000
    noise = head.draw_(torch.empty(draws, head.num_noise), torch.Generator().manual_seed(1))
    sample = head.stored(logits.expand(draws, -1)).sample(noise)
    assert sample.dtype == torch.int64 and sample.shape == (draws, 3)
    for k, reference in enumerate(references(logits)):
        found = sample[:, k].bincount(minlength=COUNTS[k]) / draws
        torch.testing.assert_close(found, reference.probs, atol=0.005, rtol=0.0)


class Bandit:
    """Contextual bandit: the observation shows the rewarded option of the second choice; the first has no effect."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = torch.device(device)
        self.generator = torch.Generator().manual_seed(0)
        self.obs = self.draw()

    def draw(self) -> dict[str, Tensor]:
        number = torch.randint(4, (NUM_ENVS,), generator=self.generator)
        return {"policy": torch.nn.functional.one_hot(number, 4).float().to(self.device)}

    def step(self, action: Tensor) -> Step:
        assert action.dtype == torch.int64 and action.shape == (NUM_ENVS, 2)
        reward = self.obs["policy"].gather(1, action[:, 1:])[:, 0]
        no, yes = torch.zeros_like(reward, dtype=torch.bool), torch.ones_like(reward, dtype=torch.bool)
        final, self.obs = self.obs, self.draw()
        return Step(self.obs, final, reward, {}, {}, yes, no, no, no, yes, no)


SPEC = EnvSpec(NUM_ENVS, {"policy": 4}, MultiDiscrete((3, 4)), 100)


def make(device: str = "cpu", **changes: Any) -> PPO:
    cfg = ppo_config(horizon=8, minibatch_size=256, learning_rate=3e-3, **changes)
    return PPO(cfg, SPEC, device=torch.device(device), seed=1, max_iterations=100)


def collect(ppo: OnPolicy, env: Bandit) -> float:
    ppo.begin_rollout()
    for _ in range(ppo.horizon):
        action = ppo.act(env.obs)
        ppo.record(action, env.step(action))
    return float(ppo.rollout.reward.mean()) if env.device.type == "cpu" else 0.0


def test_ppo_solves_a_contextual_bandit() -> None:
    ppo, env = make(), Bandit()
    returns = []
    for _ in range(40):
        returns.append(collect(ppo, env))
        ppo.update()
    assert returns[0] < 0.35 and returns[-1] > 0.9, returns
    best = ppo.policy.act({"policy": torch.eye(4)}, ())[0]
    assert best[:, 1].tolist() == [0, 1, 2, 3]
    assert ppo.policy.act(env.obs, (), deterministic=False)[0].dtype == torch.int64


def test_sac_rejects_discrete_actions() -> None:
    spec = EnvSpec(NUM_ENVS, {"policy": 4}, MultiDiscrete((3, 4)), 100)
    with pytest.raises(ConfigError, match="Try algo=dqn"):
        SAC(off_policy_config("sac"), spec, LearnerContext("sac"), device=torch.device("cpu"), seed=1, max_iterations=1)
