"""Every algorithm, small, over toy envs, with settings in which each of them counts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from gpusim_rl.learn import demonstrations
from gpusim_rl.learn.algorithm import EnvSpec, TrainedPolicy, load_algorithm_class
from gpusim_rl.settings.checks import build
from gpusim_rl.settings.schema import ALGORITHMS
from gpusim_rl.spaces import ActionSpace, Box, SignedPermutation
from gpusim_rl.testing.conformance import merged
from helpers import off_policy
from helpers.composed import algorithm_defaults
from helpers.demonstrated import shown_in
from helpers.fakes import RandomEnv
from helpers.on_policy import collect

SIZES = {"policy": 5, "style": 4, "reference": 4}
ROLLOUT: dict[str, Any] = {
    "horizon": 8,
    "precision": "fp32",
    "schedule": "constant",
    "entropy_coef": 0.01,
    "bounds_coef": 1.0,
    "network": {"hidden": [16, 8], "rnn_size": 8, "log_std_init": 0.5},
    "noise": {"steps": [3.0]},
}
PPO = {
    "minibatch_size": 32,
    "epochs": 2,
    "clip": 0.02,
    "learning_rate": 3e-3,
    "schedule": "adaptive",
    "symmetry": {"mirror_loss": 0.5},
    "rnd": {"weight": 1.0, "final_weight": 0.5, "schedule": "linear", "begin": 4, "end": 400, "normalize": True},
    "imitation": {"teacher": "teacher", "weight": 0.5, "begin": 4, "end": 400},
}
RECURRENT = {"network": {"rnn": "gru"}, "sequence_length": 4}
NO_CRITIC = {"entropy_coef": 0.0, "bounds_coef": 0.0}
ACTOR_CRITIC = {"noise": {"steps": [3.0]}, "max_grad_norm": 1.0, "weight_decay": 0.01}
STYLE = {"hidden": [16, 8], "batch_size": 32, "replay": 100}
BASES: dict[str, tuple[str, dict[str, Any]]] = {
    "ppo": ("ppo", merged(ROLLOUT, PPO)),
    "amp": ("amp", merged(ROLLOUT, PPO, {"discriminator": STYLE})),
    "a2c": ("a2c", merged(ROLLOUT, RECURRENT)),
    "reinforce": ("reinforce", merged(ROLLOUT, RECURRENT)),
    "impala": ("impala", merged(ROLLOUT, RECURRENT, {"max_policy_lag": 4, "learning_rate": 0.01})),
    "impala, gradient": ("impala", merged(ROLLOUT, {"loss": "gradient"})),
    "distill": ("distill", merged(ROLLOUT, RECURRENT, {"teacher": "teacher"})),
    "bc": ("bc", merged(ROLLOUT, {"gradient_steps": 4, "batch_size": 16, "demonstrations": {"file": "shown.npz"}})),
    "sac": ("sac", merged(off_policy.SMALL, ACTOR_CRITIC, {"demonstrations": {"file": "shown.npz", "imitation": 0.5}})),
    "td3": ("td3", merged(off_policy.SMALL, ACTOR_CRITIC, {"replay": {"alpha": 0.5}, "smoothing": 0.4})),
    "dqn": ("dqn", merged(off_policy.SMALL, {"replay": {"alpha": 0.5}, "network": {"critics": 2}})),
}
"""Settings in which each one counts, by label."""


def learner(
    label: str,
    changes: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    *,
    groups: Mapping[str, int] = SIZES,
    images: Mapping[str, tuple[int, int, int]] | None = None,
    space: ActionSpace = Box(3),  # noqa: B008
    **more: Any,
) -> tuple[Any, RandomEnv]:
    """An algorithm with these changes of its settings, and its envs; `more` is of the description of the envs."""
    name, base = BASES[label]
    cls: Any = load_algorithm_class(ALGORITHMS[name][0])
    defaults = algorithm_defaults(name)

    def known(settings: dict[str, Any], all_of_them: dict[str, Any]) -> dict[str, Any]:
        return {
            key: known(value, all_of_them[key]) if isinstance(value, dict) else value
            for key, value in settings.items()
            if key in all_of_them
        }

    cfg = build(ALGORITHMS[name][1], merged(defaults, known(base, defaults), changes), name)
    torch.manual_seed(0)
    env = RandomEnv(8, groups, space.size, images=images)
    size, actions = groups["policy"], space.size
    mirror = SignedPermutation(list(range(size)), [-1.0] * size)
    turned = SignedPermutation(list(range(actions)), [1.0] * (actions - 1) + [-1.0])
    maps = {**dict.fromkeys(groups, mirror), "actions": turned}
    of_env = {"images": env.images, "mirrored": lambda: (maps, 0.0), **more}
    spec = EnvSpec(8, env.obs_sizes, space, 1, section=name, **of_env)
    monkeypatch.setattr(demonstrations, "load", lambda *_: (shown_in(spec, episodes=20), "digest"))
    algorithm_of = load_algorithm_class(ALGORITHMS["a2c"][0])
    settings = build(ALGORITHMS["a2c"][1], merged(algorithm_defaults("a2c"), {"network": {"hidden": [8]}}), "a2c")
    alone = EnvSpec(8, {"policy": groups["policy"] or groups.get("critic", 1)}, space, 1, role="acts")
    teacher = algorithm_of(settings, alone, device=torch.device("cpu"), seed=9, max_iterations=1).policy
    found = TrainedPolicy(teacher, settings, alone.obs_sizes, "digest")
    spec = dataclasses.replace(spec, load_policy=lambda _: found)
    torch.manual_seed(0)
    algorithm = cls(cfg, spec, device=torch.device("cpu"), seed=0, max_iterations=100)
    if hasattr(algorithm.policy, "head") and isinstance(
        space, Box
    ):  # actions beyond the bound, which the first ones are far from
        algorithm.policy.head.mean.weight.data.mul_(1000.0)
    return algorithm, env


def run(algorithm: Any, env: RandomEnv, obs: Any, iterations: int) -> tuple[Any, Any]:
    """Train; returns the observation to act on next, and the numbers of the last update."""
    stats = None
    for _ in range(iterations):
        obs = collect(algorithm, env, obs)
        algorithm.before_update()
        stats = algorithm.update()
    return obs, stats
