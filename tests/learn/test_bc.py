"""Behaviour cloning: loss, held-out episodes, resume."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpusim_rl.api import prepare
from gpusim_rl.distributed.actors import make_trainer
from gpusim_rl.errors import ConfigError
from gpusim_rl.learn import demonstrations
from gpusim_rl.learn.algorithm import EnvSpec, LearnerContext
from gpusim_rl.learn.demonstrations import Demonstrations
from gpusim_rl.learn.supervised import BC
from gpusim_rl.run.evaluation import evaluate_run
from gpusim_rl.settings.checks import build
from gpusim_rl.settings.schema import BCConfig
from gpusim_rl.spaces import ActionSpace, Box, MultiDiscrete
from gpusim_rl.testing.conformance import merged
from helpers.composed import algorithm_defaults
from helpers.demonstrated import random_demonstrations
from helpers.fakes import RandomEnv
from helpers.on_policy import collect
from helpers.raised import raises

pytest_plugins = ["helpers.tool_runs"]

SMALL: dict[str, Any] = {
    "horizon": 4,
    "gradient_steps": 10,
    "batch_size": 32,
    "learning_rate": 3e-3,
    "schedule": "constant",
    "precision": "fp32",
    "network": {"hidden": [16, 16]},
}


def config(**changes: Any) -> BCConfig:
    return build(BCConfig, merged(algorithm_defaults("bc"), SMALL, changes), "bc")


def clone(
    shown: Demonstrations,
    monkeypatch: pytest.MonkeyPatch,
    space: ActionSpace | None = None,
    device: str = "cpu",
    **changes: Any,
) -> tuple[BC, RandomEnv]:
    """Build a behaviour cloning algorithm for these demonstrations, and its envs."""
    torch.manual_seed(1)
    monkeypatch.setattr(demonstrations, "load", lambda *_: (shown, "digest"))
    env = RandomEnv(6, {"policy": 5}, device=device)
    spec = EnvSpec(6, env.obs_sizes, space or Box(env.num_actions), 1)
    changes = merged({"demonstrations": {"file": "shown.npz"}}, changes)
    cfg, context = config(**changes), LearnerContext("bc")
    return BC(cfg, spec, context, device=torch.device(device), seed=0, max_iterations=100), env


TOY = EnvSpec(6, {"policy": 5}, Box(3), 1)


def rule_demonstrations(episodes: int = 40, space: ActionSpace | None = None) -> Demonstrations:
    """Return demonstrations whose actions are a function of observations with offset and scale."""
    space = space or Box(3)
    shown = random_demonstrations(replace(TOY, action_space=space), episodes)
    obs = shown.obs["policy"]
    action = 0.5 * np.tanh(obs[:, :3] - obs[:, 2:]) if isinstance(space, Box) else (obs[:, :2] > 0.0).astype(np.int64)
    return replace(shown, obs={"policy": 100.0 + 20.0 * obs}, action=action)


@pytest.mark.parametrize("loss", ["mse", "nll"])
def test_bc_learns_a_rule_that_holds_in_held_out_episodes(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    it, env = clone(rule_demonstrations(), monkeypatch, loss=loss)
    collect(it, env)
    stats = [it.update() for _ in range(40)]
    assert float(stats[-1]["check/learned"]) == 1.0
    shown = rule_demonstrations()
    mean, _ = it.policy.act({"policy": torch.from_numpy(shown.obs["policy"]).float()}, ())
    error = (mean - torch.from_numpy(shown.action)).square().mean()
    assert float(error) < 0.05 * shown.action.var()
    assert float(stats[-1]["loss/held_out"]) < float(stats[0]["loss/held_out"]) - 0.05
    assert (it.policy.head.log_std.mean().item() == pytest.approx(-2.3)) == (loss == "mse")  # type: ignore[union-attr]


def test_discrete_actions_are_learned_by_cross_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    space = MultiDiscrete((2, 2))
    it, _ = clone(rule_demonstrations(space=space), monkeypatch, space)
    first = it.errors(it.seen.inputs, it.seen.packed).mean()  # type: ignore[union-attr]
    assert float(first) == pytest.approx(2 * np.log(2.0), rel=0.01)  # nearly uniform at first
    for _ in range(40):
        it.update()
    chosen, _ = it.policy.act(dict(it.seen.inputs), ())  # type: ignore[union-attr]
    assert float((chosen == it.seen.packed).float().mean()) > 0.95  # type: ignore[union-attr]


def test_observation_statistics_come_from_training_demonstrations(monkeypatch: pytest.MonkeyPatch) -> None:
    it, env = clone(rule_demonstrations(), monkeypatch)
    assert it.seen is not None
    norm: Any = it.policy.obs_norm["policy"]
    for _ in range(2):
        torch.testing.assert_close(norm.mean, it.seen.inputs["policy"][0].double().mean(dim=0))
        assert float(norm.count) == it.seen.packed.shape[1]
        collect(it, env)
        it.update()


@pytest.mark.parametrize(("share", "held"), [(0.0, []), (0.2, [4, 9]), (0.5, [1, 3, 5, 7, 9]), (0.05, [])])
def test_held_out_episodes_are_evenly_spaced(share: float, held: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    shown = random_demonstrations(TOY, episodes=10, length=8)
    shown = replace(shown, action=np.repeat(np.arange(10.0, dtype=np.float32), 8)[:, None] * np.ones((1, 3)))
    it, _ = clone(shown, monkeypatch, demonstrations={"held_out": share})
    assert it.seen is not None
    assert it.seen.packed[0, :, 0].unique().tolist() == [n for n in range(10) if n not in held]
    assert ([] if it.held_out is None else it.held_out.packed[0, :, 0].unique().tolist()) == held
    assert it.seen.packed.shape[1] == 8 * (10 - len(held))


def test_diverged_steps_are_not_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = random_demonstrations(TOY, episodes=2, length=5)
    it, _ = clone(replace(shown, diverged=np.arange(10) == 4), monkeypatch, demonstrations={"held_out": 0.0})
    assert it.seen is not None and it.seen.packed.shape[1] == 9


def test_demonstrations_without_valid_steps_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = random_demonstrations(TOY, episodes=5, length=1)
    with raises(ConfigError, key="bc.demonstrations.file=shown.npz", hint="Try more episodes"):
        clone(replace(shown, diverged=np.arange(5) < 4), monkeypatch, demonstrations={"held_out": 0.2})


def test_settings_that_bc_does_not_support_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    with raises(ConfigError, key="bc.demonstrations.file"):
        clone(rule_demonstrations(), monkeypatch, demonstrations={"file": None})
    with pytest.raises(ConfigError, match=r"network\.rnn"):
        config(network={"rnn": "gru"})
    with pytest.raises(ConfigError, match=r"network\.separate"):
        config(network={"separate": True})
    with raises(ConfigError, key="algo=bc", hint="Try algo=distill"):
        spec = replace(TOY, images={"camera": (8, 8, 3)})
        BC(config(), spec, device=torch.device("cpu"), seed=0, max_iterations=1)


@pytest.mark.slow
def test_bc_policy_reaches_return_of_demonstrator(load_tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_tool("collect").main(["HalfCheetah", "--episodes", "20", "--out", "shown.npz"]) == 0
    settings = {"num_envs": 16, "seed": 1, "log": {"console": "quiet"}, "bc": {"demonstrations": {"file": "shown.npz"}}}
    make_trainer(prepare("HalfCheetah", algo="bc", **settings)).train()
    assert evaluate_run(prepare("HalfCheetah", checkpoint="HalfCheetah", test=True))["return_mean"] > 4000.0
