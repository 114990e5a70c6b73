"""TD3: exploration noise and distributional targets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gpusim_rl.learn.q_networks import Critic
from gpusim_rl.learn.td3 import TD3
from helpers.fakes import RandomEnv
from helpers.off_policy import C51, OffPolicyLearner


def learner(**changes: Any) -> tuple[OffPolicyLearner, TD3]:
    it = OffPolicyLearner("td3", RandomEnv(64), changes)
    assert isinstance(it.algorithm, TD3)
    return it, it.algorithm


def test_each_env_keeps_its_noise_scale_until_episode_end() -> None:
    it, td3 = learner(noise_min=0.2, noise_max=0.8, replay={"capacity": 4000})
    before = td3.noise_scale.clone()
    assert 0.2 <= before.min() < 0.3 and 0.7 < before.max() <= 0.8 and len(before.unique()) == 64
    td3.begin_rollout()
    action = td3.act(it.obs)
    step: Any = it.env.step(action)
    td3.record(action, step)
    changed = (td3.noise_scale != before).squeeze(1)
    assert torch.equal(changed, step.done) and changed.any() and not changed.all()
    assert td3.noise_scale.min() >= 0.2 and td3.noise_scale.max() <= 0.8
    it.train(8)
    assert td3.noise_scale.mean().item() == pytest.approx(0.5, abs=0.1)


def test_exploration_noise_is_scaled_and_clipped() -> None:
    it, td3 = learner(noise_min=0.5, noise_max=0.5, action_scale=2.0, learning_starts=16)
    it.train(2)
    td3.begin_rollout()
    mean, _ = td3.policy.act(it.obs, ())
    action = td3.act(it.obs)
    expected = (mean + 2.0 * 0.5 * td3.noise.now[:, :3]).clamp(-2.0, 2.0)
    assert torch.allclose(action, expected)


def test_target_noise_is_scaled_and_clipped() -> None:
    it, td3 = learner(smoothing=0.2, smoothing_clip=0.3)
    it.train(2)
    target, actor = torch.stack([batch.noise for batch in td3._draw(200)]).unbind(dim=1)
    assert target.abs().max() == 0.3 and 0.15 < target.std() < 0.2
    assert actor.abs().max() > 2.0 and 0.9 < actor.std() < 1.1


@pytest.mark.parametrize("clipped", [True, False])
def test_target_uses_distribution_of_the_lower_critic(clipped: bool) -> None:
    it, td3 = learner(network={**C51, "layer_norm": False}, clipped=clipped)
    it.train(2)
    (batch, *_) = td3._draw(4)
    with torch.no_grad():
        target, expected_return = td3.targets(batch)
        action, _ = td3.next_action(batch)
        critic = td3.policy.target_critic
        probabilities = critic(batch.next_obs["policy"], action, reduced=None).softmax(dim=-1)
    support = critic.support
    assert support is not None and torch.allclose(target.sum(dim=-1), torch.ones(len(target)), atol=1e-5)
    means = probabilities @ support
    for row in range(len(target)):
        chosen = probabilities[means[:, row].argmin(), row] if clipped else probabilities[:, row].mean(dim=0)
        slow = torch.zeros_like(support)
        for atom, probability in zip(support.tolist(), chosen.tolist(), strict=True):
            value = batch.reward[row].item() + batch.discount[row].item() * atom
            place = min(max(value, -5.0), 5.0) + 5.0
            lower = min(int(place), 9)
            slow[lower] += probability * (1.0 - (place - lower))
            slow[lower + 1] += probability * (place - lower)
        assert torch.allclose(target[row], slow, atol=1e-5)
        assert expected_return[row].item() == pytest.approx((slow @ support).item(), abs=1e-4)


class Doubled(Critic):
    def forward(self, *inputs: Any, **options: Any) -> Tensor:
        return 2.0 * super().forward(*inputs, **options)


def test_actor_maximizes_outputs_of_own_critic() -> None:
    it, td3 = learner()
    it.train(2)
    (batch, *_) = td3._draw(4)
    before = td3.q_value(batch, batch.action)
    td3.policy.critic.__class__ = Doubled
    assert torch.equal(td3.q_value(batch, batch.action), 2.0 * before)
