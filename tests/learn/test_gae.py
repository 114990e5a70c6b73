"""Generalised advantage estimation against its definition in float64, and by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from gpusim_rl.learn.rollout import gae


def reference(*rollout: Tensor, gamma: float, lam: float) -> np.ndarray:
    """Return advantages by definition: per sample, a sum over the rest of the episode."""
    r, v, n = (x.double().numpy() for x in rollout[:3])
    term, end, ok = (x.numpy() for x in rollout[3:])
    T, N = r.shape
    advantage = np.zeros((T, N))
    for i in range(N):
        for t in range(T):
            weight = 1.0
            for k in range(t, T):
                if not ok[k, i]:
                    break
                follows = 0.0 if term[k, i] else gamma * n[k, i]
                advantage[t, i] += weight * (r[k, i] + follows - v[k, i])
                if end[k, i]:
                    break
                weight *= gamma * lam
    return advantage


ENDS = {
    "random": (0.15, 0.3, 0.4),
    "no end": (0.0, 0.0, 0.0),
    "all terminated": (1.0, 1.0, 1.0),
    "all truncated": (0.0, 1.0, 1.0),
    "all diverged": (0.0, 0.0, 1.0),
}
"""Cumulative probabilities of termination, truncation and divergence."""


@pytest.mark.parametrize("T", [1, 2, 16])
@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize(("gamma", "lam"), [(0.99, 0.95), (1.0, 1.0), (0.9, 0.0)])
def test_gae_equals_its_definition(T: int, ends: tuple[float, ...], gamma: float, lam: float) -> None:
    generator = torch.Generator().manual_seed(T)
    reward, value, next_value = torch.randn(3, T, 12, generator=generator)
    unit = torch.rand(T, 12, generator=generator)
    terminated, done, diverged = unit < ends[0], unit < ends[2], (unit >= ends[1]) & (unit < ends[2])
    args = (reward, value, next_value, terminated, done, ~diverged)
    advantage, returns = gae(*args, gamma, lam)
    expected = reference(*args, gamma=gamma, lam=lam)
    np.testing.assert_allclose(advantage.numpy(), expected, rtol=1e-5, atol=2e-5)
    np.testing.assert_allclose(returns.numpy(), expected + value.numpy(), rtol=1e-5, atol=2e-5)
    assert (advantage[diverged] == 0).all()


def test_gae_of_three_steps_computed_by_hand() -> None:
    # gamma 0.9, lambda 0.5; the episode ends in step 1 (t = 0, 1, 2). V(s) = 1, 2, 3; V after the
    # last step = 4. V(final_obs) = 10 where the time limit ended the episode in step 1.
    gamma, lam = 0.9, 0.5
    reward = torch.tensor([[1.0], [2.0], [3.0]])
    value = torch.tensor([[1.0], [2.0], [3.0]])
    yes, no = torch.tensor([[False], [True], [False]]), torch.zeros(3, 1, dtype=torch.bool)
    every = torch.ones(3, 1, dtype=torch.bool)

    # termination: delta_1 = 2 + 0 - 2 = 0; delta_0 = 1 + 0.9 * 2 - 1 = 1.8
    # delta_2 = 3 + 0.9 * 4 - 3 = 3.6, of the next episode
    next_value = torch.tensor([[2.0], [3.0], [4.0]])
    advantage, _ = gae(reward, value, next_value, yes, yes, every, gamma, lam)
    assert advantage.flatten().tolist() == pytest.approx([1.8, 0.0, 3.6], abs=1e-6)

    # truncation: delta_1 = 2 + 0.9 * 10 - 2 = 9; A_0 = 1.8 + 0.45 * 9 = 5.85
    next_value = torch.tensor([[2.0], [10.0], [4.0]])
    advantage, returns = gae(reward, value, next_value, no, yes, every, gamma, lam)
    assert advantage.flatten().tolist() == pytest.approx([5.85, 9.0, 3.6], abs=1e-6)
    assert returns.flatten().tolist() == pytest.approx([6.85, 11.0, 6.6], abs=1e-6)

    # divergence in step 1: the sample is invalid; the one before bootstraps with V(s_1)
    advantage, _ = gae(reward, value, next_value, no, yes, ~yes, gamma, lam)
    assert advantage.flatten().tolist() == pytest.approx([1.8, 0.0, 3.6], abs=1e-6)


def test_invalid_samples_do_not_affect_gae() -> None:
    generator = torch.Generator().manual_seed(0)
    reward, value, next_value = (torch.randn(4, 3, generator=generator) for _ in range(3))
    diverged = torch.zeros(4, 3, dtype=torch.bool)
    diverged[1, 0] = diverged[3, 2] = True
    none = torch.zeros_like(diverged)
    clean, _ = gae(reward, value, next_value, none, diverged, ~diverged, 0.99, 0.95)
    reward[diverged] = torch.nan
    next_value[diverged] = torch.inf
    dirty, _ = gae(reward, value, next_value, none, diverged, ~diverged, 0.99, 0.95)
    assert torch.equal(clean, dirty)


def test_invalid_sample_ends_trajectory_without_done() -> None:
    reward, value, next_value = torch.ones(3, 1), torch.zeros(3, 1), torch.zeros(3, 1)
    none = torch.zeros(3, 1, dtype=torch.bool)
    valid = torch.tensor([[True], [False], [True]])
    advantage, _ = gae(reward, value, next_value, none, none, valid, 0.9, 0.5)
    assert advantage.flatten().tolist() == [1.0, 0.0, 1.0]
