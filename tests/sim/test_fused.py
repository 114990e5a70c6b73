"""Tests that Warp's kernels for CUDA equal the torch code, on Warp's CPU device."""

from __future__ import annotations

import pytest
import torch

from gpusim_rl.env.random import EnvRandom
from gpusim_rl.sim import fused
from gpusim_rl.sim.quaternion import quat_rotate, quat_rotate_inverse
from helpers.task_envs import class_env

pytest.importorskip("warp")


@pytest.mark.parametrize(
    "shapes", [((5,), (5,)), ((5, 1), (5, 3)), ((2, 5, 1), (2, 5, 3)), ((5, 1), (1, 3)), ((0,), (0,))]
)
@pytest.mark.parametrize(("function", "sense"), [(quat_rotate, 1.0), (quat_rotate_inverse, -1.0)])
def test_rotation_equals_torch(shapes, function, sense):
    generator = torch.Generator().manual_seed(1)
    wide = torch.randn(*shapes[0], 6, generator=generator)
    quat = torch.nn.functional.normalize(wide, dim=-1)[..., 1:5]  # not contiguous
    quat = quat / quat.norm(dim=-1, keepdim=True)
    vec = torch.randn(*shapes[1], 3, generator=generator)
    torch.testing.assert_close(fused.rotate(quat, vec, sense), function(quat, vec), atol=1e-6, rtol=1e-6)


def test_rotation_by_identity_is_exact_and_nan_stays():
    vec = torch.tensor([[1e-30, 3.0, -1e30], [torch.nan, 1.0, 2.0]])
    identity = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    rotated = fused.rotate(identity, vec, 1.0)
    assert torch.equal(rotated[0], vec[0])
    assert rotated[1, 0].isnan()


def test_wrong_results_and_failures_turn_kernels_off(monkeypatch, caplog):
    cpu = torch.device("cpu")
    assert fused.works.__wrapped__(cpu) and caplog.messages == []
    monkeypatch.setattr(fused, "rotate", lambda *_: torch.zeros(3))
    assert not fused.works.__wrapped__(cpu) and "wrong results" in caplog.messages[-1]
    monkeypatch.setattr(fused, "hash_numbers", lambda *_: 1 / 0)
    assert not fused.works.__wrapped__(cpu) and "division by zero" in caplog.messages[-1]


@pytest.mark.parametrize("number", [24, 31])
def test_random_numbers_have_the_same_bits(number):
    random = EnvRandom(7, torch.device("cpu"), seed=3)
    ours = fused.hash_numbers(random._state, 9, 64 - number)
    assert ours.amin() >= 0 and ours.unique().numel() == 63
    assert torch.equal(ours, random._bits(9, number))


def test_foot_wrenches_equal_torch():
    env = class_env("Ant", 4, sim="mujoco", seed=0)
    env.reset()
    for _ in range(30):
        env.step(torch.ones(4, 8))
    feet = env.sim.articulation("ant").contacts(("front_left_foot", "back_right_foot"))
    expected = feet.in_body_frame()
    assert (expected.norm(dim=-1) > 1.0).any() and (expected[..., 3:].abs() > 1e-3).any()
    torch.testing.assert_close(fused.wrench_in_body_frame(feet._readings()), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("call", ["rotate", "hash_numbers", "wrench_in_body_frame"])
def test_operators_are_sound(call):
    quat = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    given = {"rotate": (quat, torch.ones(4, 3), 1.0), "hash_numbers": (torch.arange(3), 4, 40)}
    given["wrench_in_body_frame"] = (torch.ones(2, 4, 16),)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(getattr(fused, call), given[call], test_utils=checks)
