"""Time-correlated exploration noise: distribution, correlation, episode ends, resume."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from gpusim_rl.api import prepare
from gpusim_rl.errors import ConfigError
from gpusim_rl.learn.algorithm import EnvSpec
from gpusim_rl.learn.noise import ActionNoise
from gpusim_rl.settings.schema import WHITE, NoiseConfig
from gpusim_rl.spaces import ActionSpace, Box, MultiDiscrete
from helpers.raised import raises

ENVS, ACTIONS, HORIZON = 4000, 3, 8
KINDS = ("held", "coloured")


def make(cfg: NoiseConfig, columns: int = ACTIONS, space: ActionSpace | None = None) -> ActionNoise:
    env = EnvSpec(ENVS, {}, space or Box(ACTIONS), 1)
    return ActionNoise(cfg, env, "ppo.noise", horizon=HORIZON, columns=columns, device=torch.device("cpu"))


def run(noise: ActionNoise, steps: int, done: Any = None, seed: int = 0) -> Tensor:
    """Return the noise of successive control steps, [steps, envs, columns]."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for step in range(steps):
        t = step % HORIZON
        if t == 0:
            noise.begin_rollout(lambda numbers: numbers.normal_(generator=generator))
        found.append(noise.now.clone())
        ended = torch.zeros(noise.now.shape[0], dtype=torch.bool) if done is None else done(step)
        noise.advance((t + 1) % HORIZON, ended)
    return torch.stack(found)


@pytest.mark.parametrize("kind", KINDS)
def test_noise_is_standard_normal_with_expected_correlation(kind: str) -> None:
    lasts = [1.0, 4.0, 20.0]
    z = run(make(NoiseConfig(kind=kind, steps=lasts)), 30)  # type: ignore[arg-type]
    spread = 4.0 / math.sqrt(ENVS)  # four standard errors
    for step in (0, 7, 8, 29):
        assert (z[step].mean(dim=0).abs() < spread).all()
        assert ((z[step].std(dim=0) - 1.0).abs() < spread).all()
        assert ((z[step] > 1.0).float().mean(dim=0) - 0.1587 < spread).all()
    for lag in (1, 2, 9):
        for column, steps in enumerate(lasts):
            for start in (0, 6, 20):
                correlation = (z[start, :, column] * z[start + lag, :, column]).mean()
                assert float(correlation) == pytest.approx((1.0 - 1.0 / steps) ** lag, abs=1.5 * spread)
    cross = torch.corrcoef(z[29].T) - torch.eye(ACTIONS)
    assert cross.abs().max() < spread


def test_held_noise_is_constant_and_coloured_noise_drifts() -> None:
    held, coloured = (run(make(NoiseConfig(kind=kind, steps=[10.0])), 20) for kind in KINDS)  # type: ignore[arg-type]
    same = (held[1:] == held[:-1]).float().mean()
    assert float(same) == pytest.approx(0.9, abs=0.01)
    assert (coloured[1:] == coloured[:-1]).float().mean() < 1e-4
    assert ((coloured[1:] - coloured[:-1]).std() - math.sqrt(2.0 * 0.1)).abs() < 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_new_episode_draws_new_noise(kind: str) -> None:
    ends = torch.zeros(40, ENVS, dtype=torch.bool)
    ends[5, ::2] = ends[HORIZON - 1, 1::2] = True  # within a rollout, and at its end
    z = run(make(NoiseConfig(kind=kind, steps=[1000.0])), 12, lambda step: ends[step])  # type: ignore[arg-type]
    for end, envs in ((5, slice(0, None, 2)), (HORIZON - 1, slice(1, None, 2))):
        before, after = z[end, envs].flatten(), z[end + 1, envs].flatten()
        assert torch.corrcoef(torch.stack([before, after]))[0, 1].abs() < 0.05
        others = slice(1 - (envs.start or 0), None, 2)
        assert torch.corrcoef(torch.stack([z[end, others].flatten(), z[end + 1, others].flatten()]))[0, 1] > 0.99


@pytest.mark.parametrize("kind", KINDS)
def test_other_columns_are_redrawn_every_step(kind: str) -> None:
    z = run(make(NoiseConfig(kind=kind, steps=[100.0]), columns=ACTIONS + 2), 16)  # type: ignore[arg-type]
    assert z.shape[2] == ACTIONS + 2
    assert torch.corrcoef(torch.stack([z[3, :, ACTIONS], z[4, :, ACTIONS]]))[0, 1].abs() < 0.07
    assert torch.corrcoef(torch.stack([z[3, :, 0], z[4, :, 0]]))[0, 1] > 0.95


def test_white_noise_is_drawn_unchanged() -> None:
    z = run(make(WHITE), 2 * HORIZON, seed=3)
    generator = torch.Generator().manual_seed(3)
    drawn = [torch.empty(HORIZON, ENVS, ACTIONS).normal_(generator=generator) for _ in range(2)]
    assert torch.equal(z, torch.cat(drawn))
    assert make(WHITE).state_dict() == {}


@pytest.mark.parametrize("kind", KINDS)
def test_noise_resumes_exactly(kind: str) -> None:
    cfg = NoiseConfig(kind=kind, steps=[5.0])  # type: ignore[arg-type]
    first = make(cfg)
    run(first, HORIZON)
    second = make(cfg)
    second.load_state_dict(first.state_dict())
    assert torch.equal(run(first, HORIZON, seed=9), run(second, HORIZON, seed=9))


def test_invalid_noise_settings_are_rejected() -> None:
    with raises(ConfigError, key="ppo.noise.steps", expected="1 or 3 numbers", got=[1.0, 2.0]):
        make(NoiseConfig(kind="held", steps=[1.0, 2.0]))
    with raises(ConfigError, key="ppo.noise.steps", hint="Try ppo.noise.steps=[1]"):
        make(NoiseConfig(kind="held", steps=[2.0]), space=MultiDiscrete((3, 3, 3)))
    for steps in ("[0.5]", "[]", "[.nan]", "7"):
        with pytest.raises(ConfigError, match=r"ppo\.noise\.steps: expected a list"):
            prepare("Cartpole", ppo={"noise": {"steps": eval(steps.replace(".nan", "float('nan')"))}})
