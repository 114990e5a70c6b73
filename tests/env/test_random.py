"""Tests of per-env random numbers: distributions, independence, reproducibility."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from gpusim_rl.env.random import EnvRandom

CPU = torch.device("cpu")


def make(num_envs: int = 64, seed: int = 0) -> EnvRandom:
    return EnvRandom(num_envs, CPU, seed)


def ks_distance(sample: Tensor, cdf: np.ndarray) -> float:
    """Return the Kolmogorov-Smirnov statistic times sqrt(n); 1.95 is exceeded once in a thousand samples."""
    n = sample.numel()
    steps = np.arange(n + 1) / n
    return math.sqrt(n) * max(np.abs(cdf - steps[1:]).max(), np.abs(cdf - steps[:-1]).max())


def normal_cdf(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1.0 + np.vectorize(math.erf)(x / math.sqrt(2.0)))


def chi_square(observed: Tensor) -> float:
    """Return the standardised chi-square statistic: about N(0, 1) for equally likely cells."""
    expected = observed.double().mean()
    statistic = ((observed - expected) ** 2 / expected).sum().item()
    freedom = observed.numel() - 1
    return (statistic - freedom) / math.sqrt(2.0 * freedom)


@pytest.mark.parametrize(("seed", "num_envs", "draws"), [(0, 20_000, 1), (-1, 1, 20_000), (12345, 200, 100)])
def test_uniform_distribution(seed: int, num_envs: int, draws: int) -> None:
    x = make(num_envs, seed).uniform(0.0, 1.0, draws).flatten().sort().values
    assert x[0] >= 0.0 and x[-1] < 1.0
    assert ks_distance(x, x.double().numpy()) < 1.95


@pytest.mark.parametrize(("seed", "num_envs", "draws"), [(0, 20_000, 1), (1, 1, 20_000), (12345, 200, 100)])
def test_normal_distribution(seed: int, num_envs: int, draws: int) -> None:
    x = make(num_envs, seed).normal(0.0, 1.0, draws).flatten().sort().values
    assert torch.isfinite(x).all()
    assert ks_distance(x, normal_cdf(x.double().numpy())) < 1.95


def test_integer_distribution() -> None:
    x = make(1000).integers(-3, 7, 100)
    assert x.dtype == torch.int64 and x.shape == (1000, 100)
    counts = torch.stack([(x == value).sum() for value in range(-3, 7)])
    assert counts.sum() == x.numel()
    assert abs(chi_square(counts)) < 4


def correlation(a: Tensor, b: Tensor) -> float:
    """Return the correlation times sqrt(n): about N(0, 1) if independent."""
    a, b = a.double().flatten(), b.double().flatten()
    a, b = a - a.mean(), b - b.mean()
    return ((a * b).mean() / (a.std() * b.std())).item() * math.sqrt(a.numel())


def test_envs_are_independent() -> None:
    x = make(100).uniform(0.0, 1.0, 2000)
    neighbours = [correlation(x[i], x[i + 1]) for i in range(99)]
    assert max(map(abs, neighbours)) < 4.5
    assert np.std(neighbours) < 1.4
    # streams must not be shifted copies of each other: compare also with some lag
    for lag in (1, 2, 3, 7):
        assert abs(correlation(x[:-1, lag:], x[1:, :-lag])) < 4.5
        assert abs(correlation(x[:-1, :-lag], x[1:, lag:])) < 4.5
    # pairs of neighbours fill the square evenly
    cells = (x[:-1] * 16).long() * 16 + (x[1:] * 16).long()
    assert abs(chi_square(torch.bincount(cells.flatten(), minlength=256))) < 4.5


def test_draws_are_independent() -> None:
    x = make(2000).uniform(0.0, 1.0, 100)
    for lag in (1, 2, 3, 10):
        assert abs(correlation(x[:, :-lag], x[:, lag:])) < 4.5
    cells = (x[:, :-1] * 16).long() * 16 + (x[:, 1:] * 16).long()
    assert abs(chi_square(torch.bincount(cells.flatten(), minlength=256))) < 4.5


def test_env_draws_do_not_depend_on_the_number_of_envs() -> None:
    few, many = make(3), make(1000)
    for _ in range(3):
        assert torch.equal(few.uniform(-1.0, 2.0, 5), many.uniform(-1.0, 2.0, 5)[:3])
        assert torch.equal(few.normal(0.0, 1.0, 2, 3), many.normal(0.0, 1.0, 2, 3)[:3])
        assert torch.equal(few.integers(0, 9), many.integers(0, 9)[:3])


def test_same_seed_gives_the_same_numbers() -> None:
    a, b, c = make(seed=3), make(seed=3), make(seed=4)
    x = a.uniform(0.0, 1.0, 7)
    assert torch.equal(x, b.uniform(0.0, 1.0, 7))
    assert not torch.equal(x, c.uniform(0.0, 1.0, 7))
    a.seed(3)
    assert torch.equal(x, a.uniform(0.0, 1.0, 7)), "seeding restarts the streams"


@pytest.mark.parametrize("seed", [-1, 2**63, 2**64 + 5, -(2**70)])
def test_any_integer_is_a_valid_seed(seed: int) -> None:
    assert make(8, seed).uniform().unique().numel() == 8


def test_random_streams_equal_splitmix64() -> None:
    """A seed's streams must not change between versions."""
    # SplitMix64 in Python, on unsigned integers
    word = (1 << 64) - 1

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & word
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & word
        return z ^ (z >> 31)

    golden, seed = 0x9E3779B97F4A7C15, 42
    stream = mix(seed * golden & word)
    expected = [
        [
            (mix((mix((env_id * golden + stream) & word) + step * golden) & word) >> 40) * 2.0**-24
            for step in range(1, 4)
        ]
        for env_id in range(1, 6)
    ]
    random = make(5, seed)
    assert random.uniform(0.0, 1.0, 2).tolist() == [row[:2] for row in expected]
    assert random.uniform(0.0, 1.0, 1).tolist() == [row[2:] for row in expected]
    assert torch.equal(make(5, seed).uniform(0.0, 1.0, 999)[:, :100], make(5, seed).uniform(0.0, 1.0, 100))


def test_random_bounds_and_shapes() -> None:
    random = make(50)
    x = random.uniform(-2.0, 3.0)
    assert x.shape == (50,) and x.dtype == torch.float32
    assert x.min() >= -2.0 and x.max() <= 3.0
    low, high = torch.tensor([0.0, 10.0, -5.0]), torch.tensor([1.0, 20.0, -4.0])
    x = random.uniform(low, high, 3)
    assert x.shape == (50, 3) and (x >= low).all() and (x <= high).all()
    assert random.uniform(0.0, 1.0, 2, 3, 4).shape == (50, 2, 3, 4)
    assert (random.uniform(2.0, 2.0, 3) == 2.0).all()
    per_env = torch.arange(50.0)
    x = random.uniform(per_env, per_env + 0.5)
    assert (x >= per_env).all() and (x <= per_env + 0.5).all()
    y = random.normal(torch.tensor([0.0, 100.0]), torch.tensor([0.0, 1e-3]), 2)
    assert y.shape == (50, 2) and (y[:, 0] == 0).all() and (y[:, 1] - 100).abs().max() < 0.01


def test_rounded_uniform_stays_below_the_upper_bound() -> None:
    # [1, 2) has half as many floats as 24 random bits have values, so the largest would round to 2
    random = make(4)
    random._bits = lambda count, number: torch.full((4, count), (1 << number) - 1)  # type: ignore[method-assign]
    assert (random.uniform() == 1.0 - 2.0**-24).all()
    for low, high in ((1.0, 2.0), (-1.0, 1.0), (100.0, 101.0), (0.0, 3.0)):
        assert (random.uniform(low, high) <= high).all()


def test_state_dict_continues_random_streams() -> None:
    one = make(seed=5)
    one.uniform(0.0, 1.0, 11)
    state = one.state_dict()
    expected = one.normal(0.0, 1.0, 3), one.integers(0, 99, 2)
    other = make(seed=6)
    other.load_state_dict(state)
    assert torch.equal(other.normal(0.0, 1.0, 3), expected[0])
    assert torch.equal(other.integers(0, 99, 2), expected[1])
    one.uniform()  # the state is a snapshot
    again = make(seed=7)
    again.load_state_dict(state)
    assert torch.equal(again.normal(0.0, 1.0, 3), expected[0])


def test_env_random_has_no_hidden_state_and_fixed_memory() -> None:
    torch.manual_seed(0)
    a = make().uniform(0.0, 1.0, 3)
    torch.manual_seed(1)
    random = make()
    places = random._state.data_ptr(), random._steps.data_ptr()
    assert torch.equal(random.uniform(0.0, 1.0, 3), a)
    random.seed(9)
    random.normal()
    assert (random._state.data_ptr(), random._steps.data_ptr()) == places
