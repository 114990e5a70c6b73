"""Small on-policy algorithms other than PPO."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gpusim_rl.learn.algorithm import EnvSpec, LearnerContext, load_algorithm_class
from gpusim_rl.learn.minibatch import Sequences
from gpusim_rl.learn.on_policy import OnPolicy
from gpusim_rl.settings.checks import build
from gpusim_rl.settings.schema import ALGORITHMS, OnPolicyConfig
from gpusim_rl.spaces import Box
from gpusim_rl.testing.conformance import merged
from helpers.composed import algorithm_defaults
from helpers.fakes import Env, collect  # noqa: F401  (for the tests)

NAMES = ("a2c", "reinforce", "impala")
SMALL: dict[str, Any] = {
    "horizon": 8,
    "precision": "fp32",
    "sequence_length": 4,
    "network": {"hidden": [32, 16], "rnn_size": 8},
}


def on_policy_config(name: str, **changes: Any) -> OnPolicyConfig:
    """Return the defaults of `algo=<name>` with small sizes and changes."""
    defaults = algorithm_defaults(name)
    return build(ALGORITHMS[name][1], merged(defaults, SMALL, changes), name)


def make_on_policy(name: str, env: Env, *, device: str = "cpu", **changes: Any) -> OnPolicy:
    """Build an algorithm; weights and noise are equal for every name."""
    torch.manual_seed(0)
    space, longest = Box(env.num_actions), 1  # an episode may end in every step
    spec = EnvSpec(env.num_envs, env.obs_sizes, space, longest)
    cls: Any = load_algorithm_class(ALGORITHMS[name][0])
    cfg, context = on_policy_config(name, **changes), LearnerContext(name)
    return cls(cfg, spec, context, device=torch.device(device), seed=0, max_iterations=100)


def prepared(algorithm: Any) -> tuple[Tensor, Sequences, dict[str, Tensor]]:
    """Return rewards, sequences and log of the rollout as an update prepares them, with extensions."""
    it, rollout = algorithm, algorithm.rollout
    with torch.no_grad():
        reward, inputs = rollout.reward * it.cfg.reward_scale, it.policy.inputs(rollout.obs)
        for extension in getattr(it, "extensions", {}).values():
            reward = extension.begin_update(rollout, reward, inputs, it.policy)
    return reward, *it.prepare(reward, inputs)
