"""SAC: log probabilities of squashed actions, target entropy, alpha."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from gpusim_rl.learn.sac import SAC, SquashedGaussian, with_density
from helpers.fakes import RandomEnv
from helpers.off_policy import OffPolicyLearner


def learner(**changes: Any) -> tuple[OffPolicyLearner, SAC]:
    it = OffPolicyLearner("sac", RandomEnv(8), changes)
    assert isinstance(it.algorithm, SAC)
    return it, it.algorithm


@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_squashed_log_prob_equals_numeric_jacobian(scale: float) -> None:
    torch.manual_seed(0)
    mean, log_std, noise = (0.7 * torch.randn(3, 50, 4, dtype=torch.float64)).unbind()
    gaussian = SquashedGaussian(mean, 0.5 * log_std, scale)
    action, log_prob = gaussian.sample_with_log_prob(with_density(noise, scale))
    assert torch.equal(action, gaussian.sample(noise)) and (action.abs() <= scale).all()
    step = 1e-6
    slope = (gaussian.sample(noise + step) - gaussian.sample(noise - step)) / (2.0 * step)
    density = torch.distributions.Normal(0.0, 1.0).log_prob(noise) - slope.log()
    assert torch.allclose(log_prob, density.sum(dim=-1), atol=1e-6)


def test_squashed_log_prob_is_finite_at_saturation() -> None:
    gaussian = SquashedGaussian(torch.tensor([[30.0, -30.0]]), torch.zeros(1, 2), 1.0)
    action, log_prob = gaussian.sample_with_log_prob(with_density(torch.zeros(1, 2), 1.0))
    assert action.tolist() == [[1.0, -1.0]] and log_prob.isfinite().all()


@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0])
def test_default_target_entropy_is_reachable_at_any_scale(scale: float) -> None:
    _, sac = learner(action_scale=scale)
    most = sac.num_actions * math.log(2.0 * scale)  # entropy of a uniform density
    assert sac._target_entropy == pytest.approx(most - sac.num_actions * (1.0 + math.log(2.0)))


def test_alpha_is_fixed_until_a_window_is_stored() -> None:
    it, sac = learner(n_step=8, horizon=2, learning_starts=16)
    before = sac.log_alpha.detach().clone()
    for _ in range(4):
        it.collect()
        sac.update()
        assert torch.equal(before, sac.log_alpha.detach())
    it.collect()
    sac.update()
    assert not torch.equal(before, sac.log_alpha.detach())


@pytest.mark.parametrize(("target", "falls"), [(-50.0, True), (50.0, False)])
def test_alpha_falls_when_entropy_exceeds_target(target: float, falls: bool) -> None:
    it, sac = learner(target_entropy=target, alpha=1.0)
    it.train(4)
    assert (sac.log_alpha.item() < 0.0) == falls
    fixed, sac = learner(target_entropy=target, alpha=1.0, learn_alpha=False)
    fixed.train(4)
    assert sac.log_alpha.item() == 0.0


def test_sac_actions_respect_scale_and_mode_is_deterministic() -> None:
    it, sac = learner(action_scale=0.5)
    it.train(2)
    actions = torch.cat([sac.policy.act(it.obs, (), deterministic=False)[0] for _ in range(20)])
    assert 0.1 < actions.abs().max() <= 0.5
    first, again = (sac.policy.act(it.obs, ())[0] for _ in range(2))
    assert torch.equal(first, again)
