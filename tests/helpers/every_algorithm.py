"""Small versions of all algorithms over random envs, with configurations in which every setting has an effect."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from gpusim_rl.learn import demonstrations
from gpusim_rl.learn.algorithm import LearnerContext, TrainedPolicy, load_algorithm_class
from gpusim_rl.settings.checks import build
from gpusim_rl.settings.schema import ALGORITHMS
from gpusim_rl.spaces import ActionSpace, Box, SignedPermutation
from gpusim_rl.testing.algorithm_conformance import make_algorithm
from gpusim_rl.testing.conformance import merged
from helpers import off_policy
from helpers.composed import algorithm_defaults
from helpers.demonstrated import random_demonstrations
from helpers.fakes import RandomEnv
from helpers.on_policy import collect

SIZES = {"policy": 5, "style": 4, "reference": 4}
ROLLOUT: dict[str, Any] = {
    "horizon": 4,
    "precision": "fp32",
    "schedule": "constant",
    "entropy_coef": 0.01,
    "bounds_coef": 1.0,
    "network": {"hidden": [16, 8], "rnn_size": 8, "log_std_init": 0.5},
    "noise": {"steps": [3.0]},
}
PPO = {
    "minibatch_size": 16,
    "epochs": 2,
    "clip": 0.02,
    "learning_rate": 3e-3,
    "schedule": "adaptive",
    "symmetry": {"mirror_loss": 0.5},
    "rnd": {"weight": 1.0, "final_weight": 0.5, "schedule": "linear", "begin": 4, "end": 400, "normalize": True},
    "teacher": {"run": "teacher", "weight": 0.5, "begin": 4, "end": 400},
}
RECURRENT = {"network": {"rnn": "gru"}, "sequence_length": 2}
ACTOR_CRITIC = {"noise": {"steps": [3.0]}, "max_grad_norm": 1.0, "weight_decay": 0.01}
STYLE = {"hidden": [16, 8], "batch_size": 16, "replay": 100}
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
"""Algorithm and settings by label."""


def learner(
    label: str,
    changes: dict[str, Any],
    *,
    groups: Mapping[str, int] = SIZES,
    images: Mapping[str, tuple[int, int, int]] | None = None,
    space: ActionSpace = Box(3),  # noqa: B008
    device: str = "cpu",
    **more: Any,
) -> tuple[Any, RandomEnv]:
    """Build an algorithm with changed settings, and its envs; `more` extends their `EnvSpec`."""
    name, base = BASES[label]
    defaults = algorithm_defaults(name)
    cfg = build(ALGORITHMS[name][1], merged(defaults, existing(base, defaults), changes), name)
    env = RandomEnv(8, groups, space.size, images=images, device=device)
    size, actions = groups["policy"], space.size
    mirror = SignedPermutation(list(range(size)), [-1.0] * size)
    turned = SignedPermutation(list(range(actions)), [1.0] * (actions - 1) + [-1.0])
    maps = {**dict.fromkeys(groups, mirror), "actions": turned}

    trained = teacher(size or groups.get("critic", 1), space, device)
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            demonstrations, "load", lambda _, spec, groups: (random_demonstrations(spec, episodes=20), "digest")
        )
        facts = {"mirrored": lambda: (maps, 0.0), **more}
        context = LearnerContext(name, load_policy=lambda _: trained)
        algorithm: Any = make_algorithm(load_algorithm_class(ALGORITHMS[name][0]), cfg, env, space, context, **facts)
    if hasattr(algorithm.policy, "head") and isinstance(space, Box):
        algorithm.policy.head.mean.weight.data.mul_(1000.0)  # for actions beyond the bound
    return algorithm, env


@functools.cache
def teacher(size: int, space: ActionSpace, device: str) -> TrainedPolicy:
    """Return an untrained policy."""
    torch.manual_seed(0)
    settings = build(ALGORITHMS["a2c"][1], merged(algorithm_defaults("a2c"), {"network": {"hidden": [8]}}), "a2c")
    env = RandomEnv(8, {"policy": size}, device=device)
    a2c = make_algorithm(load_algorithm_class(ALGORITHMS["a2c"][0]), settings, env, space, LearnerContext("a2c"))
    return TrainedPolicy(a2c.policy, settings, env.obs_sizes, "digest")


def existing(changes: dict[str, Any], known: Any) -> dict[str, Any]:
    """Return the changes whose settings exist."""
    there = {k: v for k, v in changes.items() if k in known and isinstance(v, dict) == isinstance(known[k], dict)}
    return {k: existing(v, known[k]) if isinstance(v, dict) else v for k, v in there.items()}


def run(algorithm: Any, env: RandomEnv, obs: Any, iterations: int) -> tuple[Any, Any]:
    """Train; return the next observation and the last statistics."""
    stats = None
    for _ in range(iterations):
        obs = collect(algorithm, env, obs)
        algorithm.before_update()
        stats = algorithm.update()
    return obs, stats
