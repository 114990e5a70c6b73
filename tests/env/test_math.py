"""Tests of tensor maths for tasks against hand-computed values."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from gpusim_rl.env.math import (
    Sigmoid,
    masked_terms,
    quat_angle,
    quat_from_axis_angle,
    quat_from_uniform,
    quat_multiply,
    quat_rotate,
    scale,
    tolerance,
    unscale,
    wrap_angle,
)

INF = math.inf
SIGMOIDS = get_args(Sigmoid)
ATANH = math.atanh(math.sqrt(0.9))


def t(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("sigmoid", "at_half", "at_two"),
    [
        # value 0.1 at distance 1; from the definitions in dm_control.utils.rewards
        ("gaussian", 0.1**0.25, 0.1**4),
        ("linear", 1 - 0.45, 0.0),
        ("quadratic", 1 - 0.9 / 4, 0.0),
        ("cosine", 0.5 * (1 + math.cos(math.acos(-0.8) / 2)), 0.0),
        ("hyperbolic", 1 / math.cosh(math.acosh(10) / 2), 1 / math.cosh(math.acosh(10) * 2)),
        ("long_tail", 1 / (1 + 9 / 4), 1 / (1 + 9 * 4)),
        ("tanh_squared", 1 - math.tanh(ATANH / 2) ** 2, 1 - math.tanh(ATANH * 2) ** 2),
    ],
)
def test_tolerance_matches_hand_computed_values(sigmoid: Any, at_half: float, at_two: float) -> None:
    x = t(1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 0.0)
    # bounds [1, 2], margin 1: distances 0, 0, 0, 0.5, 1, 2, 1
    value = tolerance(x, (1.0, 2.0), 1.0, sigmoid)
    assert value.tolist() == pytest.approx([1, 1, 1, at_half, 0.1, at_two, 0.1], abs=1e-9)


@pytest.mark.parametrize("sigmoid", SIGMOIDS)
@pytest.mark.parametrize("at_margin", [0.05, 0.9])
def test_tolerance_is_symmetric_monotonic_and_meets_the_margin(sigmoid: Any, at_margin: float) -> None:
    x = torch.linspace(0.0, 50.0, 1001, dtype=torch.float64)
    value = tolerance(x, (-1.0, 1.0), 2.0, sigmoid, at_margin)
    assert torch.equal(value, tolerance(-x, (-1.0, 1.0), 2.0, sigmoid, at_margin))
    assert (value[1:] <= value[:-1]).all() and (value >= 0).all() and (value <= 1).all()
    assert (value[x <= 1.0] == 1.0).all()
    edge = tolerance(t(3.0, -3.0), (-1.0, 1.0), 2.0, sigmoid, at_margin)
    assert edge.tolist() == pytest.approx([at_margin] * 2, abs=1e-9)


def test_tolerance_without_margin_is_an_indicator() -> None:
    assert tolerance(t(-0.1, 0.0, 0.5, 1.0, 1.1), (0.0, 1.0)).tolist() == [0, 1, 1, 1, 0]
    assert tolerance(t(0.0, 1e-9)).tolist() == [1, 0]


def test_tolerance_with_infinite_bounds_and_far_values() -> None:
    value = tolerance(t(-1e30, -1.0, 0.0, 1e30), (0.0, INF), 1.0)
    assert value.tolist() == pytest.approx([0.0, 0.1, 1.0, 1.0])
    assert (tolerance(t(-5.0, 5.0), (-INF, INF), 1.0) == 1.0).all()
    for sigmoid in SIGMOIDS:  # float32, far outside: no NaN from an overflow
        far = tolerance(torch.tensor([1e6, -1e6]), margin=1.0, sigmoid=sigmoid)
        assert torch.isfinite(far).all() and (far < 1e-6).all()


@pytest.mark.parametrize("sigmoid", ["linear", "quadratic", "cosine"])
def test_tolerance_can_be_zero_at_the_margin(sigmoid: Any) -> None:
    assert tolerance(t(1.0), margin=1.0, sigmoid=sigmoid, value_at_margin=0.0).item() == (pytest.approx(0.0, abs=1e-12))


@pytest.mark.parametrize(
    "arguments",
    [
        {"bounds": (1.0, 0.0)},
        {"margin": -1.0},
        {"margin": 1.0, "value_at_margin": 0.0},
        {"margin": 1.0, "value_at_margin": 1.0},
        {"margin": 1.0, "sigmoid": "linear", "value_at_margin": -0.1},
    ],
)
def test_tolerance_rejects_invalid_arguments(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="tolerance"):
        tolerance(t(0.0), **arguments)


def test_wrap_angle_maps_to_plus_minus_pi() -> None:
    x = t(0.0, 1.0, -1.0, math.pi + 0.1, -math.pi - 0.1, 7 * math.pi, 100.0, -100.0)
    y = wrap_angle(x)
    assert (y >= -math.pi).all() and (y < math.pi).all()
    torch.testing.assert_close(torch.sin(y), torch.sin(x), rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.cos(y), torch.cos(x), rtol=0, atol=1e-12)
    expected = [0.0, 1.0, -1.0, 0.1 - math.pi, math.pi - 0.1]
    assert y[:5].tolist() == pytest.approx(expected, abs=1e-12)
    assert wrap_angle(t(math.pi)).item() == pytest.approx(-math.pi)
    x32 = torch.linspace(-20, 20, 10_001)
    assert (wrap_angle(x32).abs() <= math.pi + 1e-6).all()


def test_unscale_maps_the_range_to_plus_minus_one() -> None:
    low, high = t(-1.0, 0.0), t(1.0, 4.0)
    assert unscale(t(-1.0, 0.0), low, high).tolist() == [-1, -1]
    assert unscale(t(1.0, 4.0), low, high).tolist() == [1, 1]
    assert unscale(t(0.5, 3.0), low, high).tolist() == [0.5, 0.5]
    batch = torch.zeros(5, 2, dtype=torch.float64)
    assert unscale(batch, low, high).tolist() == [[0.0, -1.0]] * 5


def test_scale_is_the_inverse_of_unscale() -> None:
    low, high = t(-1.0, 0.0), t(1.0, 4.0)
    assert scale(t(0.5, 0.5), low, high).tolist() == [0.5, 3.0]
    value = t(0.3, 5.0)
    torch.testing.assert_close(scale(unscale(value, low, high), low, high), value)


def random_quat(*batch: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    quat = torch.randn(*batch, 4, generator=g, dtype=torch.float64)
    return quat / quat.norm(dim=-1, keepdim=True)


def test_quat_angle_matches_hand_computed_values() -> None:
    axis = t(0.0, 0.6, 0.8)
    angle = t(0.0, 1e-6, 0.1, 1.0, 3.0, math.pi, 4.0, -1.0)
    turned = quat_from_axis_angle(axis.expand(8, 3), angle)
    start = random_quat(8, seed=4)
    expected = t(0.0, 1e-6, 0.1, 1.0, 3.0, math.pi, 2 * math.pi - 4.0, 1.0)
    for sign in (1.0, -1.0):  # q and -q are the same orientation
        torch.testing.assert_close(quat_angle(sign * quat_multiply(turned, start), start), expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(quat_angle(start, sign * quat_multiply(turned, start)), expected, rtol=0, atol=1e-12)


def test_small_angles_survive_float32() -> None:
    axis = torch.tensor([[1.0, 0.0, 0.0]])
    turned = quat_from_axis_angle(axis, torch.tensor([1e-4]))
    assert quat_angle(turned, quat_from_axis_angle(axis, torch.zeros(1))).item() == pytest.approx(1e-4, rel=1e-3)


def test_quat_from_uniform_is_uniform() -> None:
    u = torch.rand(200_000, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    quat = quat_from_uniform(u)
    torch.testing.assert_close(quat.norm(dim=-1), torch.ones(len(u), dtype=torch.float64))
    assert (quat[:, 0] >= 0).all()
    assert quat_from_uniform(torch.zeros(1, 3)).isfinite().all()
    # A uniform rotation maps any direction to a uniform one (each coordinate is uniform in [-1, 1]) ...
    for axis in torch.eye(3, dtype=torch.float64):
        for coordinate in quat_rotate(quat, axis.expand(len(u), 3)).unbind(-1):
            assert (coordinate.sort().values - torch.linspace(-1, 1, len(u), dtype=torch.float64)).abs().max() < 0.01
    # ... and its angle to any fixed orientation has the density (1 - cos a) / pi.
    for start in (t(1.0, 0.0, 0.0, 0.0), t(0.5, -0.5, 0.5, 0.5)):
        angle = quat_angle(quat, start.expand(len(u), 4)).sort().values
        share = (angle - angle.sin()) / math.pi
        assert (share - torch.linspace(0, 1, len(u), dtype=torch.float64)).abs().max() < 0.01


def test_masked_terms_are_zero_even_if_not_finite() -> None:
    terms = {"speed": t(1.0, math.nan, 3.0), "cost": t(-1.0, -2.0, INF)}
    masked = masked_terms(terms, torch.tensor([False, True, True]))
    assert {name: term.tolist() for name, term in masked.items()} == {"speed": [1, 0, 0], "cost": [-1, 0, 0]}
