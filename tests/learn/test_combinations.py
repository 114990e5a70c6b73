"""Combinations of observations, encoders, recurrence, frames, actions and algorithms."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from gpusim_rl.errors import ConfigError
from gpusim_rl.spaces import Box, MultiDiscrete
from gpusim_rl.testing.conformance import differences, merged
from helpers.composed import algorithm_defaults
from helpers.every_algorithm import BASES, existing, learner, run
from helpers.states import saved

STYLE = {"style": 4, "reference": 4}
CAMERA = {"camera": (16, 16, 2)}
OBSERVED: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "numbers": ({"policy": 5}, {}),
    "numbers and critic numbers": ({"policy": 5, "critic": 7}, {}),
    "images": ({"policy": 0}, CAMERA),
    "images and numbers": ({"policy": 5}, CAMERA),
    "images and critic numbers": ({"policy": 0, "critic": 7}, CAMERA),
    "two cameras and numbers": ({"policy": 5, "critic": 7}, {**CAMERA, "wrist": (16, 20, 1)}),
}
SPACES = {"continuous": Box(3, 1.0), "choices": MultiDiscrete((2, 3))}
PLAIN: dict[str, Any] = {
    "noise": {"steps": [1.0]},
    "symmetry": {"mirror_loss": 0.0},
    "rnd": {"weight": 0.0, "final_weight": 0.0},
    "teacher": {"run": None, "weight": 0.0, "begin": 0, "end": 0},
}
NETWORKS: dict[str, dict[str, Any]] = {
    "separate": {"separate": True},
    "custom": {"_target_": "helpers.frozen.HalfFrozen"},
    "std": {"state_dependent_std": True},
    "atoms": {"atoms": 11},
    **{kind: {"encoder": {"kind": kind}} for kind in ("nature", "impala")},
    "custom encoder": {"encoder": {"_target_": "helpers.frozen.FrozenEncoder"}},
}
ADDED: dict[str, dict[str, Any]] = {
    "": {},
    "bf16": {"precision": "bf16"},
    "raw": {"normalize_obs": False, "normalize_value": False},
    "coloured noise": {"noise": {"steps": [4.0], "kind": "coloured"}},
    "symmetry": {"symmetry": {"augment": True}},
    "rnd": {"rnd": {"weight": 1.0}},
    "teacher": {"teacher": {"run": "teacher", "weight": 1.0}},
    "demonstrations": {"demonstrations": {"file": "shown.npz"}},
    "priorities": {"replay": {"alpha": 0.5}},
    "host replay": {"replay": {"device": "cpu"}},
}
LABELS = [label for label in BASES if label != "impala, gradient"]


def table(label: str) -> list[tuple[str, str, str | None, int, str, str]]:
    """Return rows of observation, actions, recurrence, frames, network, addition; the last two vary one at a time."""
    defaults = algorithm_defaults(BASES[label][0])
    recurrence = (None, "gru") if "rnn" in defaults["network"] else (None,)
    rows = [(*row, "", "") for row in itertools.product(OBSERVED, SPACES, recurrence, (1, 3))]
    some = [*itertools.product(("numbers", "images and numbers"), ("continuous",), (*recurrence, "lstm"), (1, 3))]
    rows += [
        (*row, name, "") for row in some for name, it in NETWORKS.items() if existing(it, defaults["network"]) == it
    ]
    some += [("images", "continuous", None, 1)]
    rows += [(*row, "", name) for row in some for name, it in ADDED.items() if name and existing(it, defaults) == it]
    return [
        row for row in rows if (row[3] == 1 or OBSERVED[row[0]][1]) and not (row[2] == "lstm" and recurrence[1:] == ())
    ]


def trains(label: str, row: tuple[str, str, str | None, int, str, str]) -> bool:
    """Train a row and return True, or return False if it is rejected."""
    observed, actions, rnn, frames, network, added = row
    groups, images = OBSERVED[observed]
    changes = merged(PLAIN, {"network": merged({"rnn": rnn, "encoder": {"frames": frames}}, NETWORKS.get(network, {}))})
    if label in ("sac", "td3", "dqn"):
        changes = merged(changes, {"demonstrations": {"file": None}, "replay": {"alpha": 0.0}})
    changes = existing(merged(changes, ADDED[added]), algorithm_defaults(BASES[label][0]))
    env: dict[str, Any] = {"groups": {**groups, **(STYLE if label == "amp" else {})}, "images": images}
    env |= {"space": SPACES[actions], "final_images": "critic" not in groups}
    try:
        it, envs = learner(label, changes, **env)
    except ConfigError as error:
        assert "\n" not in str(error)
        return False
    obs, stats = run(it, envs, envs.reset(), 2)
    assert all(bool(value.isfinite()) for name, value in stats.items() if name.startswith(("loss/", "check/")))
    other, _ = learner(label, changes, **env)
    other.policy.load_state_dict(it.policy.state_dict())
    other.load_state_dict(saved(it.state_dict()))
    assert differences(saved(it.state_dict()), saved(other.state_dict())) == []
    action, _ = it.policy.act(obs, it.policy.initial_state(8))
    same, _ = it.policy.act_without_critic(obs, it.policy.actor_state(8))
    torch.testing.assert_close(action, same)
    return True


def count_trained(label: str, rows: list[Any]) -> int:
    """Train all rows; return how many are accepted."""
    trained, wrong = 0, []
    for row in rows:
        try:
            trained += trains(label, row)
        except Exception as error:
            wrong.append(f"{row}: {type(error).__name__} {str(error)[:200]}")
    assert not wrong, f"{len(wrong)} of {len(rows)}:\n" + "\n".join(wrong)
    return trained


@pytest.mark.parametrize("label", LABELS)
def test_some_combinations_train_or_are_rejected_in_one_line(label: str) -> None:
    assert count_trained(label, table(label)[:: 51 if label == "amp" else 17])


@pytest.mark.slow
@pytest.mark.parametrize("label", LABELS)
def test_every_combination_trains_or_is_rejected_in_one_line(label: str) -> None:
    assert count_trained(label, table(label)[:: 3 if label == "amp" else 1]) > 10  # AMP shares PPO's networks


def test_spatial_encoder_rejects_images_with_one_output_position(monkeypatch: pytest.MonkeyPatch) -> None:
    for side, fits in ((12, False), (13, True)):
        monkeypatch.setitem(OBSERVED, "images", ({"policy": 0}, {"camera": (side, side, 2)}))
        assert trains("a2c", ("images", "continuous", None, 1, "", "")) == fits
