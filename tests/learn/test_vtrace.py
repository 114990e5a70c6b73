"""V-trace against rlax's test vectors and the sums of the paper."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from gpusim_rl.learn.impala import vtrace


def columns(rows: list[list[float]]) -> Tensor:
    """Transpose one list per env to [time, envs]."""
    return torch.tensor(rows, dtype=torch.float64).T.contiguous()


@pytest.mark.parametrize(
    ("advantage_clip", "advantages"),
    [
        (1.0, [[-1.615514, -3.497323, 1.867053, 50.316], [1.466243, 3.611640, -8.3369e-5, -13.54]]),
        (5.0, [[-1.615514, -17.486612, 1.867053, 162.052681], [7.331217, 3.611640, -8.3369e-5, -25.841680]]),
    ],
)
def test_vtrace_equals_rlax_vectors(advantage_clip: float, advantages: list[list[float]]) -> None:
    mu = [[[8.9, 0.7], [5, 1], [0.6, 0.1], [-0.9, -0.1]], [[0.3, -5], [1, -8], [0.3, 1.7], [4.7, 3.3]]]
    pi = [[[0.4, 0.5], [9.2, 8.8], [0.7, 4.4], [7.9, 1.4]], [[1, 0.9], [1, -1], [-4.3, 8.7], [0.8, 0.3]]]
    taken = torch.tensor([[0, 1, 0, 0], [1, 0, 0, 1]])
    logs = (torch.tensor(x, dtype=torch.float64).log_softmax(-1).gather(-1, taken[..., None])[..., 0] for x in (pi, mu))
    log_ratio = torch.sub(*logs).T
    value = columns([[2.1, 1.1, -3.1, 0], [3.1, 0.1, -1.1, 7.4]])
    after = torch.cat([value[1:], torch.tensor([[8.4, -1.2]])])
    nowhere = torch.zeros(4, 2, dtype=torch.bool)
    reward = columns([[-1.3, -1.3, 2.3, 42], [1.3, 5.3, -3.3, -5]])
    gamma = columns([[0, 0.89, 0.85, 0.99], [0.88, 1, 0.83, 0.95]])
    ends = nowhere, nowhere, ~nowhere
    advantage, target = vtrace(log_ratio, reward, value, after, *ends, gamma, advantage_clip=advantage_clip)
    torch.testing.assert_close(advantage, columns(advantages), rtol=1e-5, atol=1e-6)
    errors = columns([[-1.615514, -3.497323, 1.867053, 50.316], [1.466243, 3.611640, -8.3369e-5, -13.54]])
    torch.testing.assert_close(target - value, errors, rtol=1e-5, atol=1e-6)


def oracle(ratio, reward, value, after, terminated, done, valid, gamma, lam, clip, advantage_clip):
    """Return advantages and targets of one env as O(T^2) sums."""
    steps = len(reward)

    def error(t: int) -> float:
        total, weight = 0.0, 1.0
        for s in range(t, steps):
            if not valid[s]:
                break
            ahead = reward[s] + gamma * (0.0 if terminated[s] else after[s])
            total += weight * min(clip, ratio[s]) * (ahead - value[s])
            weight *= gamma * lam * min(1.0, ratio[s])
            if done[s]:
                break
        return total

    advantages, targets = [], []
    for t in range(steps):
        continues = not done[t] and t + 1 < steps
        ahead = after[t] + (error(t + 1) if continues else 0.0)  # target of the next state in the same episode
        advantage = min(advantage_clip, ratio[t]) * (reward[t] + gamma * (0.0 if terminated[t] else ahead) - value[t])
        advantages.append(advantage if valid[t] else 0.0)
        targets.append(value[t] + error(t))
    return advantages, targets


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("lam", "clip", "advantage_clip"), [(1.0, 1.0, 1.0), (0.9, 3.7, 2.2), (0.0, 1.0, 0.5)])
def test_vtrace_equals_sums_of_the_paper(seed: int, lam: float, clip: float, advantage_clip: float) -> None:
    random = np.random.default_rng(seed)
    steps, envs, gamma = 12, 6, 0.93
    log_ratio, reward, value, after = random.normal(size=(4, steps, envs))
    terminated, truncated, diverged = random.random((3, steps, envs)) < 0.15
    terminated &= ~diverged
    done = terminated | truncated | diverged
    continues = ~done[:-1]
    after[:-1][continues] = value[1:][continues]
    tensors = (torch.from_numpy(x) for x in (log_ratio, reward, value, after, terminated, done, ~diverged))
    advantage, target = vtrace(*tensors, gamma, lam=lam, clip=clip, advantage_clip=advantage_clip)
    for env in range(envs):
        rows = (x[:, env] for x in (np.exp(log_ratio), reward, value, after, terminated, done, ~diverged))
        expected = oracle(*rows, gamma, lam, clip, advantage_clip)
        np.testing.assert_allclose(advantage[:, env], expected[0], rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(target[:, env], expected[1], rtol=1e-10, atol=1e-12)
