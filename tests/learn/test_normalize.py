"""Running statistics, independent of batch boundaries."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusim_rl.learn.normalize import RunningNormalizer
from helpers.states import saved


def assert_pooled(norm: RunningNormalizer, x: torch.Tensor) -> None:
    pooled = x.double().numpy()
    scale = pooled.std(axis=0) + 1e-12
    assert norm.count.item() == x.shape[0]
    np.testing.assert_allclose((norm.mean.numpy() - pooled.mean(axis=0)) / scale, 0.0, atol=1e-9)
    np.testing.assert_allclose(norm.var.numpy(), pooled.var(axis=0), rtol=1e-9, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    offset=st.sampled_from([0.0, -3.0, 1e3, 1e6, -1e6]),
    spread=st.sampled_from([1e-2, 1.0, 1e3]),
    masked=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_streaming_equals_pooled_statistics(
    sizes: list[int], offset: float, spread: float, masked: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    # float32 resolution at 1e6 is 1/16: with a smaller spread all values would be equal
    spread = max(spread, abs(offset) * 1e-6)
    x = offset + spread * torch.randn(sum(sizes), 3, generator=generator)
    norm = RunningNormalizer(3)
    for chunk in x.split(sizes):
        if not masked:
            norm.update(chunk)
            continue
        # the same rows, scattered among masked rows of arbitrary values
        rows = torch.full((2 * len(chunk) + 1, 3), torch.nan)
        rows[::3] = torch.inf
        where = torch.zeros(len(rows), dtype=torch.bool)
        where[torch.randperm(len(rows), generator=generator)[: len(chunk)]] = True
        rows[where] = chunk
        norm.update(rows, where)
    assert_pooled(norm, x)


@pytest.mark.parametrize("masked", [False, True])
def test_outlier_does_not_reduce_precision(masked: bool) -> None:
    # sums centred on the outlier would lose the digits of the other envs
    x = 1e-3 * torch.randn(2**17, 1, generator=torch.Generator().manual_seed(0))
    x[0] = 1e3
    norm = RunningNormalizer(1)
    norm.update(x, torch.ones(len(x), dtype=torch.bool) if masked else None)
    assert_pooled(norm, x)


def test_fully_masked_batch_changes_nothing() -> None:
    norm = RunningNormalizer(2)
    nothing = torch.zeros(4, dtype=torch.bool)
    norm.update(torch.full((4, 2), torch.nan), nothing)
    assert norm.count == 0 and norm.mean.tolist() == [0, 0] and norm.var.tolist() == [1, 1]
    norm.update(torch.randn(10, 2, generator=torch.Generator().manual_seed(0)))
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    norm.update(torch.full((4, 2), torch.nan), nothing)
    assert all(torch.equal(before[name], value) for name, value in norm.state_dict().items())


def test_initial_statistics_have_no_weight() -> None:
    norm = RunningNormalizer(1)
    norm.update(torch.tensor([[5.0], [7.0]]))
    assert norm.mean.item() == 6.0 and norm.var.item() == 1.0 and norm.count.item() == 2.0
    norm = RunningNormalizer(1)
    norm.update(torch.tensor([[5.0]]))
    assert norm.mean.item() == 5.0 and norm.var.item() == 0.0


def test_state_dict_keeps_count_and_continues_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    one = RunningNormalizer(3)
    for _ in range(5):
        one.update(torch.randn(11, 3, generator=generator))
    other = RunningNormalizer(3)
    other.load_state_dict(saved(one.state_dict()))
    x = torch.randn(11, 3, generator=generator)
    assert torch.equal(one(x), other(x))
    assert other.count.item() == 55
    x = 100 + torch.randn(11, 3, generator=generator)
    one.update(x)
    other.update(x)
    for name, value in one.state_dict().items():
        assert value.dtype == torch.float64
        assert torch.equal(value, other.state_dict()[name])
    assert torch.equal(one(x), other(x))


def test_inverse_restores_the_input() -> None:
    generator = torch.Generator().manual_seed(0)
    norm = RunningNormalizer(4)
    noise = torch.randn(500, 4, generator=generator)
    x = torch.tensor([1.0, -20.0, 300.0, 0.0]) + torch.tensor([1.0, 5.0, 0.1, 1e-3]) * noise
    norm.update(x)
    y = norm(x)
    assert y.dtype == torch.float32
    assert torch.allclose(norm.inverse(y), x, rtol=1e-6, atol=1e-4)
    assert torch.equal(norm(x.view(5, 100, 4)).view(500, 4), y)


def test_constant_feature_stays_finite() -> None:
    norm = RunningNormalizer(1)
    norm.update(torch.full((100, 1), 4.0))
    assert norm(torch.tensor([[4.0]])).item() == 0.0
    assert torch.isfinite(norm(torch.tensor([[5.0]]))).all()


def test_clip_limits_output_without_writing_input() -> None:
    norm = RunningNormalizer(1, clip=5.0)
    x = torch.tensor([[100.0], [-100.0], [0.5]])
    assert norm(x).flatten().tolist() == pytest.approx([5.0, -5.0, 0.5], abs=1e-4)
    assert x.flatten().tolist() == [100.0, -100.0, 0.5], "input overwritten"
