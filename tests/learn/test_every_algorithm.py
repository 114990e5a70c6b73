"""Conformance suite over all `ALGORITHMS`; each needs an entry in `helpers.every_algorithm`."""

from __future__ import annotations

from typing import Any

from gpusim_rl.learn.algorithm import Algorithm
from gpusim_rl.settings.schema import ALGORITHMS
from gpusim_rl.spaces import MultiDiscrete
from gpusim_rl.testing.algorithm_conformance import AlgorithmConformance
from gpusim_rl.testing.random_env import RandomEnv
from helpers.every_algorithm import BASES, learner
from helpers.off_policy import C51

CRITIC = {"groups": {"policy": 5, "critic": 7}}
IMAGES_ONLY: dict[str, Any] = {"groups": {"policy": 0}, "images": {"eye": (13, 13, 1)}}
WITH_NUMBERS: dict[str, Any] = {**IMAGES_ONLY, "groups": {"policy": 2, "critic": 4}}
NO_FILE = {"demonstrations": {"file": None, "imitation": 0.0}}
DELAYED = {"policy_delay": 2, "n_step": 3, "max_grad_norm": 0.5, "reward_scale": 2.0, "learning_starts": 120}
COLOURED = {"noise": {"kind": "coloured", "steps": [4.0]}}
PLAIN = {"symmetry": {"mirror_loss": 0.0}, "teacher": {"run": None, "weight": 0.0, "begin": 0, "end": 0}}
LSTM = {"rnn": "lstm", "rnn_layers": 2, "separate": True, "state_dependent_std": True}
RECURRENT = {**PLAIN, "network": LSTM, "sequence_length": 2, "schedule": "linear", "precision": "bf16"}
HOST, FRAMES = {"replay": {"device": "cpu"}}, {"network": {"encoder": {"frames": 2}}}
BF16 = {"precision": "bf16", "replay": {"storage": "fp16"}, "network": {"critics": 1}, "normalize_obs": False}
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    **{label: (label, {}, {}) for label in BASES},
    "ppo, lstm": ("ppo", RECURRENT, {}),
    "ppo, images": ("ppo", {**PLAIN, "network": {"encoder": {"frames": 3}, "separate": True}}, WITH_NUMBERS),
    "ppo, per epoch": ("ppo", {"schedule_per": "epoch", "max_grad_norm": None, "symmetry": {"augment": True}}, {}),
    "ppo, choices": ("ppo", {**PLAIN, "noise": {"steps": [1.0]}}, {"space": MultiDiscrete((2, 3))}),
    "a2c, choices": ("a2c", {"noise": {"steps": [1.0]}}, {"space": MultiDiscrete((2, 3))}),
    "amp, difference": ("amp", {"difference": True, "discriminator": {"penalized": "both"}}, {}),
    "distill, huber": ("distill", {"loss": "huber", "network": {"rnn": None}}, {}),
    "bc, nll": ("bc", {"loss": "nll"}, {}),
    "sac, delayed": ("sac", {**NO_FILE, **DELAYED, **COLOURED}, CRITIC),
    "sac, on the host": ("sac", {**NO_FILE, **HOST, "n_step": 2}, {}),
    "sac, bf16": ("sac", {**NO_FILE, **BF16}, {}),
    "td3, distributions": ("td3", {"network": {**C51, "layer_norm": False}, "clipped": False, **NO_FILE}, CRITIC),
    "dqn, distributions": ("dqn", {"network": C51, "n_step": 3}, {}),
    "sac, images": ("sac", {**NO_FILE, "network": {"encoder": {"frames": 3}}, "n_step": 3}, IMAGES_ONLY),
    "sac, images on the host": ("sac", {**NO_FILE, **HOST, **FRAMES}, IMAGES_ONLY),
    "td3, images": ("td3", {**NO_FILE, "network": {"encoder": {"frames": 2, "shift": 0}}}, WITH_NUMBERS),
    "dqn, images": ("dqn", {**FRAMES, "replay": {"alpha": 0.0}}, {**IMAGES_ONLY, "final_images": True}),
}


class TestAlgorithms(AlgorithmConformance):
    algorithms = tuple(KINDS)

    def make_algorithm(self, name: str, device: str = "cpu") -> tuple[Algorithm, RandomEnv]:
        label, changes, more = KINDS[name]
        changes = changes if device == "cpu" else {**changes, "precision": "fp32"}  # autocast does not support meta
        return learner(label, changes, device=device, **more)


def test_every_algorithm_has_an_entry() -> None:
    assert {BASES[label][0] for label, _, _ in KINDS.values()} == ALGORITHMS.keys()
