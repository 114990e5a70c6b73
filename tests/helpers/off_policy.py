"""Off-policy algorithms over random envs, driven like the trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from gpusim_rl.learn.algorithm import EnvSpec, LearnerContext, load_algorithm_class
from gpusim_rl.learn.off_policy import OffPolicy
from gpusim_rl.learn.replay import Replay, Trajectory
from gpusim_rl.settings.checks import build
from gpusim_rl.settings.schema import ALGORITHMS, OffPolicyConfig
from gpusim_rl.spaces import ActionSpace, Box
from gpusim_rl.testing.conformance import merged
from helpers.composed import algorithm_defaults
from helpers.fakes import Env, collect

ACTOR_CRITICS = ("sac", "td3")
NAMES = (*ACTOR_CRITICS, "dqn")
C51 = {"atoms": 11, "value_min": -5.0, "value_max": 5.0}
SMALL: dict[str, Any] = {
    "horizon": 4,
    "updates": 1,
    "batch_size": 16,
    "learning_starts": 16,
    "precision": "fp32",
    "replay": {"capacity": 400},
    "network": {"hidden": [16, 8], "critic_hidden": [16, 8]},
}


def settings_of(name: str, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return small sizes and changes, without actor settings for algorithms without an actor."""
    found = merged(SMALL, changes or {})
    if name not in ACTOR_CRITICS:
        found.pop("policy_delay", None)
        found["network"] = {key: value for key, value in found["network"].items() if key != "critic_hidden"}
    return found


def off_policy_config(name: str, changes: Mapping[str, Any] | None = None) -> OffPolicyConfig:
    """Return the defaults of `algo=<name>` with small sizes and changes."""
    defaults = algorithm_defaults(name)
    return build(ALGORITHMS[name][1], merged(defaults, settings_of(name, changes)), name)


def store(replay: Replay, obs: Mapping[str, Tensor], action: Tensor, step: Any) -> None:
    """Store one control step; `obs` precede it."""
    flags = step.terminated, step.truncated, step.diverged
    steps = Trajectory(dict(obs), action, dict(step.final_obs), step.reward, *flags)
    replay.extend(tree_map(lambda x: x[None], steps))


class OffPolicyLearner:
    def __init__(
        self,
        name: str,
        env: Env,
        changes: Mapping[str, Any] | None = None,
        device: str = "cpu",
        space: ActionSpace | None = None,
        final_images: bool = False,
    ) -> None:
        torch.manual_seed(0)
        space = space or Box(env.num_actions)
        images: Any = {"images": getattr(env, "images", {}), "final_images": final_images}
        spec = EnvSpec(env.num_envs, env.obs_sizes, space, 1, **images)  # episodes may end in every step
        cls: Any = load_algorithm_class(ALGORITHMS[name][0])
        cfg = off_policy_config(name, changes)
        self.env = env
        how: Any = {"device": torch.device(device), "seed": 0, "max_iterations": 100}
        self.algorithm: OffPolicy = cls(cfg, spec, LearnerContext(name), **how)
        self.obs = env.reset()

    def collect(self) -> None:
        self.obs = collect(self.algorithm, self.env, self.obs)

    def train(self, iterations: int) -> list[dict[str, Tensor]]:
        found = []
        for _ in range(iterations):
            self.collect()
            self.algorithm.before_update()
            found.append(self.algorithm.update())
        return found
