"""Frozen layers of custom networks, with every algorithm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gpusim_rl.errors import ConfigError
from gpusim_rl.learn.optimizer import MaskedAdamW
from helpers.every_algorithm import BASES, learner, run
from helpers.states import saved

NETWORKS = ("HalfFrozen", "Frozen", "Detached")
LABELS = [label for label in BASES if label != "impala, gradient"]


def with_network(name: str) -> dict[str, Any]:
    return {"network": {"_target_": f"helpers.frozen.{name}"}}


def without_decay(label: str) -> dict[str, float]:
    return {"weight_decay": 0.0} if label in ("sac", "td3") else {}


def weights(policy: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in policy.named_parameters()}


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("label", LABELS)
def test_frozen_layers_stay_and_the_rest_learns(label: str, network: str) -> None:
    it, env = learner(label, with_network(network) | without_decay(label))
    before = weights(it.policy)
    assert any(not x.requires_grad for x in it.policy.parameters()) or network == "Detached"
    run(it, env, env.reset(), 3)
    now = weights(it.policy)
    moved = {name for name, value in now.items() if not torch.equal(value, before[name])}
    layer = {name: name.split(".")[-2] for name in now if "layers" in name or "features" in name}
    assert layer and {layer[name] for name in moved & layer.keys()} == ({"2"} if network == "HalfFrozen" else set())
    assert moved - layer.keys(), "the head did not learn"


@pytest.mark.parametrize("label", ["ppo", "sac"])
def test_unfreezing_layers_at_resume_warns_about_optimizer(label: str, capsys: pytest.CaptureFixture[str]) -> None:
    it, env = learner(label, with_network("Frozen"))
    obs, _ = run(it, env, env.reset(), 3)
    other, _ = learner(label, with_network("HalfFrozen"))
    other.policy.load_state_dict(it.policy.state_dict())
    other.load_state_dict(saved(it.state_dict()))
    assert "optimiser" in capsys.readouterr().err
    before = weights(other.policy)
    run(other, env, obs, 2)
    moved = {name for name, value in weights(other.policy).items() if not torch.equal(value, before[name])}
    assert any(name.endswith(".2.weight") for name in moved)


def test_optimizer_without_trainable_parameters_is_rejected() -> None:
    with pytest.raises(ConfigError, match="requires_grad"):
        MaskedAdamW([*nn.Linear(2, 2).requires_grad_(False).parameters()], 1e-3)
