"""Loss scaling of float16 networks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from gpusim_rl.learn import optimizer
from gpusim_rl.learn.optimizer import FIRST_SCALE, MaskedAdamW
from gpusim_rl.testing.sync_counter import SyncCounter
from helpers.fakes import Learner, RandomEnv, ppo_config


def scaled(parameter: nn.Parameter) -> MaskedAdamW:
    return MaskedAdamW([parameter], 0.1, max_norm=1.0, scaled=True)


def step(adam: MaskedAdamW, loss: torch.Tensor) -> tuple[torch.Tensor, bool]:
    norm = adam.set_gradients(adam.gradients(loss))
    adam.masked_step(norm)
    return norm, not norm.isfinite()


def test_scale_halves_after_overflow_and_doubles_after_finite_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer, "GROWTH_INTERVAL", 3)
    parameter, plain = (nn.Parameter(torch.tensor([1.0, 2.0])) for _ in range(2))
    adam, unscaled = scaled(parameter), MaskedAdamW([plain], 0.1, max_norm=1.0)
    scales = []
    for factor in (1.0, 1.0, 1.0, torch.inf, 1.0):
        norms = [step(it, (p * factor).square().sum()) for it, p in ((adam, parameter), (unscaled, plain))]
        assert norms[0][1] == norms[1][1] == (factor == torch.inf)
        assert torch.equal(parameter, plain)  # powers of two are exact
        scales.append(float(adam.moments()[0]["scale"]) / FIRST_SCALE)
    assert scales == [1.0, 1.0, 2.0, 1.0, 1.0]

    other = scaled(nn.Parameter(parameter.detach().clone()))
    other.load_moments(copy.deepcopy(adam.moments()))
    assert other.moments()[0].keys() == adam.moments()[0].keys()
    assert all(torch.equal(value, other.moments()[0][name]) for name, value in adam.moments()[0].items())
    unscaled.load_moments(adam.moments())  # another precision
    assert "scale" not in unscaled.moments()[0]


@pytest.mark.parametrize("scale", [False, True])
def test_small_float16_gradients_need_the_scale(scale: bool) -> None:
    layer = nn.Linear(3, 2)
    adam = MaskedAdamW([*layer.parameters()], 0.1, scaled=scale)
    with torch.autocast("cpu", dtype=torch.float16):
        y = layer(torch.ones(4, 3))
    [weight, _] = adam.gradients(y.float().sum() * 1e-9)
    assert bool(weight.any()) == scale


def test_float16_update_equals_float32_up_to_rounding_and_waits_for_nothing() -> None:
    found = []
    for reduced in (None, torch.float16):
        it = Learner(RandomEnv(16), ppo_config(precision="fp16" if reduced else "fp32", minibatch_size=64))
        assert it.policy.reduced is reduced
        it.collect()
        with SyncCounter() as syncs:
            stats = it.update()
        assert syncs.total == 0 and float(stats["policy/skipped_minibatches"]) == 0.0
        found.append(it.policy.state_dict())
    exact, rounded = found
    assert exact.keys() == rounded.keys() and all(value.dtype == exact[name].dtype for name, value in rounded.items())
    for name, value in rounded.items():
        torch.testing.assert_close(value, exact[name], rtol=0.0, atol=2e-3)
