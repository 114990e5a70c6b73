"""Tests of moving a step to another device."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpusim_rl.env import Step


def make_step(*, skipped: bool) -> Step:
    torch.manual_seed(0)

    def mask() -> torch.Tensor:
        return torch.rand(5) > 0.5

    images = torch.randint(256, (2, 5, 3, 7, 9)).to(torch.uint8).transpose(2, 4)  # strided
    obs = {"policy": torch.randn(5, 3), "camera": images[0], "critic": torch.randn(5, 7)}
    final = {"policy": torch.randn(5, 3), "camera": images[1], "critic": torch.randn(5, 7)}
    obs["policy"][0, 0], final["critic"][1, 2] = torch.nan, torch.inf
    stats = {"level": torch.tensor([1.0, torch.nan, 3.0, 4.0, 5.0])}
    masks = [mask() for _ in range(6)]
    terms = {"alive": torch.rand(5), "reward": torch.rand(5)}
    return Step(obs, final, torch.randn(5), terms, stats, *masks, skipped=mask() if skipped else None)


class Copies(TorchDispatchMode):
    """Counter of copies to another device."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._to_copy.default and "device" in (kwargs or {})
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("skipped", [False, True])
def test_step_moves_to_another_device_in_one_copy(skipped: bool) -> None:
    step = make_step(skipped=skipped)
    with Copies() as copies:
        found = step.to(torch.device("cpu", 0))  # torch treats cpu:0 and cpu as different devices
    assert copies.count <= 1
    for field in dataclasses.fields(Step):
        before, after = getattr(step, field.name), getattr(found, field.name)
        pairs = [(before, after)] if not isinstance(before, dict) else [(before[k], after[k]) for k in before]
        assert not isinstance(before, dict) or list(before) == list(after)
        for old, new in pairs:
            if old is None:
                assert new is None
                continue
            assert new.dtype == old.dtype and new.shape == old.shape and new.is_contiguous()
            torch.testing.assert_close(new, old, rtol=0, atol=0, equal_nan=True)


def test_step_on_the_same_device_is_not_copied() -> None:
    step = make_step(skipped=False)
    assert step.to(torch.device("cpu")) is step
