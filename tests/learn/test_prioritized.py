"""Prioritised sampling against plain numpy: probabilities, weights, valid transitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gpusim_rl.learn.algorithm import EnvSpec
from gpusim_rl.learn.prioritized import Priorities
from gpusim_rl.learn.replay import Replay
from gpusim_rl.spaces import Box
from helpers.fakes import Outcome
from helpers.off_policy import store

NO = torch.tensor(False)
ONE = torch.ones(())


class Memory:
    """Replay buffer with priorities whose actions number the transitions."""

    def __init__(self, steps: int, envs: int, *, n: int = 1, alpha: float = 1.0) -> None:
        spec, cpu = EnvSpec(envs, {"policy": 1}, Box(1), 1), torch.device("cpu")
        self.replay = Replay(steps, spec, ["policy"], n_step=n, gamma=0.9, storage=torch.float32, device=cpu)
        self.priorities = Priorities(self.replay, alpha)
        self.written = 0

    def write(self, diverged: tuple[int, ...] = ()) -> None:
        """Write one step; every action is its number, step * N + env."""
        envs = self.replay.num_envs
        mask = torch.tensor([env in diverged for env in range(envs)])
        obs, zeros = {"policy": torch.zeros(envs, 1)}, torch.zeros(envs, dtype=torch.bool)
        step = Outcome(obs, obs, torch.zeros(envs), zeros, zeros, mask)
        store(self.replay, obs, (torch.arange(envs) + self.written * envs)[:, None].float(), step)
        self.priorities.after_write(1)
        self.written += 1

    def starts(self) -> set[int]:
        """Return the numbers of valid transitions: stored with the whole window and the observation after it."""
        envs, replay = self.replay.num_envs, self.replay
        steps = range(max(0, self.written - replay.num_steps), self.written - replay.n_step)
        return {step * envs + env for step in steps for env in range(envs)}

    def possible(self) -> set[int]:
        """Return the numbers of transitions with a priority."""
        slots = (self.priorities.values > 0).nonzero().flatten()
        return {int(number) for number in self.replay.action.flatten()[slots]}

    def set(self, values: Tensor) -> None:
        self.priorities.values[: len(values)] = values

    def sample(self, size: int, beta: float = 0.0, seed: int = 0) -> Any:
        return self.priorities.sample(size, torch.Generator().manual_seed(seed), torch.tensor(beta))


def chi_squared(counts: np.ndarray, probabilities: np.ndarray) -> float:
    expected = counts.sum() * probabilities
    return float(((counts - expected)[expected > 0] ** 2 / expected[expected > 0]).sum())


# Probabilities


@pytest.mark.parametrize("slots", [(7, 3), (64, 1), (13, 41)], ids=["less than a block", "one block", "several blocks"])
@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_sampling_probabilities_equal_numpy(slots: tuple[int, int], alpha: float) -> None:
    steps, envs = slots
    memory = Memory(steps, envs, alpha=alpha)
    for _ in range(steps + 5):
        memory.write()
    random = np.random.default_rng(1)
    errors = random.exponential(size=steps * envs).astype(np.float32)
    errors[random.random(steps * envs) < 0.2] = 30.0  # far apart
    index = torch.arange(steps * envs)
    live = memory.priorities.values[: steps * envs] > 0
    memory.priorities.update(index, torch.from_numpy(errors), live.float(), NO)
    probabilities = np.where(live.numpy(), (errors + 1e-6) ** alpha, 0.0)
    probabilities /= probabilities.sum()
    draws = 200_000
    counts = np.bincount(memory.sample(draws).index.numpy(), minlength=steps * envs)
    assert (counts[probabilities == 0.0] == 0).all()
    freedom = int((probabilities > 0).sum()) - 1
    assert chi_squared(counts, probabilities) < freedom + 4.0 * (2.0 * freedom) ** 0.5  # four standard deviations


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_importance_weights_equal_numpy(beta: float) -> None:
    memory = Memory(20, 5, alpha=0.7)
    for _ in range(30):
        memory.write()
    values = torch.rand(100, generator=torch.Generator().manual_seed(3)) * (memory.priorities.values[:100] > 0)
    memory.set(values)
    drawn = memory.sample(500, beta)
    expected = values.numpy()[drawn.index.numpy()].astype(np.float64) ** -beta
    assert np.allclose(drawn.weight.numpy(), expected, rtol=1e-5)


def test_small_priorities_in_a_large_replay_are_drawn_accurately() -> None:
    # a float32 cumulative sum over all would lose them
    memory = Memory(1 << 14, 64)
    values = torch.zeros(1 << 20)
    values[::2] = 1.0
    values[1] = 4096.0
    memory.set(values)
    memory.replay.total.fill_(1 << 15)
    index = memory.sample(400_000).index
    assert (values[index] > 0).all()
    share = (index == 1).float().mean().item()
    assert share == pytest.approx(4096 / (4096 + (1 << 19)), rel=0.08)
    upper = (index[index != 1] >= (1 << 19)).float().mean().item()
    assert upper == pytest.approx(0.5, abs=0.005)


# Valid transitions


@pytest.mark.parametrize("n", [1, 2, 5])
def test_only_whole_windows_have_priority(n: int) -> None:
    memory = Memory(8, 3, n=n)
    for _ in range(30):
        assert memory.possible() == memory.starts()
        if memory.starts():
            drawn = memory.sample(300)
            assert {int(number) for number in drawn.action[:, 0]} <= memory.starts()
            assert (drawn.weight == 1.0).all()
        memory.write()


def test_samples_of_an_empty_replay_have_zero_weight() -> None:
    memory = Memory(8, 2, n=3)
    for _ in range(4):
        drawn = memory.sample(20, beta=0.5)
        assert (drawn.weight == 0.0).all() and drawn.reward.isfinite().all()
        memory.write()
    assert (memory.sample(20).weight == 1.0).all()


def test_new_transitions_get_largest_priority_so_far() -> None:
    memory = Memory(20, 2)
    memory.write()
    memory.write()
    assert memory.priorities.values[:4].tolist() == [1.0, 1.0, 0.0, 0.0]
    memory.priorities.update(torch.tensor([0, 1]), torch.tensor([7.0, 0.5]), torch.ones(2), NO)
    memory.write()
    assert memory.priorities.values[:6].tolist() == pytest.approx([7.0, 0.5, 7.0, 7.0, 0.0, 0.0], abs=1e-5)
    memory.priorities.update(torch.tensor([0]), torch.tensor([0.0]), torch.ones(1), NO)
    memory.write()
    assert memory.priorities.values[4].item() == pytest.approx(7.0, abs=1e-5)
    assert memory.priorities.values[0].item() == pytest.approx(1e-6), "transition can never be drawn again"


def test_invalid_transitions_are_drawn_only_once() -> None:
    memory = Memory(12, 2, n=2)
    for step in range(10):
        memory.write(diverged=(1,) if step == 4 else ())
    drawn = memory.sample(2000)
    lost = {int(number) for number, weight in zip(drawn.action[:, 0], drawn.weight, strict=True) if weight == 0.0}
    assert lost == {7, 9}  # windows of env 1 that include step 4
    memory.priorities.update(drawn.index, torch.ones(2000), drawn.weight, NO)
    assert memory.possible() == memory.starts() - lost
    assert (memory.sample(2000).weight == 1.0).all()


# Changes


def test_duplicate_indices_keep_the_larger_error() -> None:
    memory = Memory(8, 1)
    for _ in range(6):
        memory.write()
    index, error = torch.tensor([2, 3, 2, 2]), torch.tensor([0.25, 9.0, 4.0, 1.0])
    memory.priorities.update(index, error, torch.ones(4), NO)
    assert memory.priorities.values[:6].tolist() == pytest.approx([1.0, 1.0, 4.0, 9.0, 1.0, 0.0], rel=1e-5)
    assert memory.priorities.largest.item() == pytest.approx(9.0, rel=1e-5)


@pytest.mark.parametrize("error", [torch.nan, torch.inf])
def test_non_finite_td_error_changes_nothing(error: float) -> None:
    memory = Memory(8, 1)
    for _ in range(6):
        memory.write()
    memory.priorities.update(torch.tensor([1, 2]), torch.tensor([error, 3.0]), torch.ones(2), NO)
    assert memory.priorities.values[:3].tolist() == pytest.approx([1.0, 1.0, 3.0], rel=1e-5)
    assert memory.priorities.largest.item() == pytest.approx(3.0, rel=1e-5)


def test_held_update_changes_nothing() -> None:
    memory = Memory(8, 1)
    for _ in range(6):
        memory.write()
    before = {"values": memory.priorities.values.clone(), "largest": memory.priorities.largest.clone()}
    memory.priorities.update(torch.tensor([1, 2]), torch.tensor([5.0, 3.0]), torch.tensor([0.0, 1.0]), ~NO)
    assert torch.equal(memory.priorities.values, before["values"])
    assert memory.priorities.largest == before["largest"]
