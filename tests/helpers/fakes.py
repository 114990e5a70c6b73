"""PPO over random envs, and the collecting loop around it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from gpusim_rl.learn.algorithm import Algorithm, EnvSpec, LearnerContext
from gpusim_rl.learn.networks import ActorCritic
from gpusim_rl.learn.ppo import PPO
from gpusim_rl.learn.rollout import Rollout
from gpusim_rl.settings.checks import build
from gpusim_rl.settings.schema import PPOConfig
from gpusim_rl.spaces import Box
from gpusim_rl.testing.conformance import merged
from gpusim_rl.testing.random_env import RandomEnv
from gpusim_rl.testing.random_env import RandomStep as Outcome
from helpers.composed import algorithm_defaults

__all__ = ["Env", "Learner", "Outcome", "RandomEnv", "collect", "ppo_config"]


def ppo_config(network: Mapping[str, Any] | None = None, **changes: Any) -> PPOConfig:
    """Return the defaults of `algo=ppo` with a small network and changes."""
    defaults = algorithm_defaults("ppo")
    small = {"hidden": [32, 16], "rnn_size": 8}
    net = merged(defaults["network"], small, network or {})
    values = {**defaults, "horizon": 8, "precision": "fp32", **changes, "network": net}
    return build(PPOConfig, values, "ppo")


class Env(Protocol):
    obs_sizes: dict[str, int]
    num_actions: int
    num_envs: int

    def reset(self) -> dict[str, Tensor]: ...
    def step(self, action: Tensor) -> Outcome: ...


def collect(algorithm: Algorithm, env: Env, obs: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Fill the rollout; return the next observation."""
    obs = env.reset() if obs is None else obs
    algorithm.begin_rollout()
    for _ in range(algorithm.horizon):
        action = algorithm.act(obs)
        step = env.step(action)
        algorithm.record(action, step)
        obs = step.obs
    return obs


@dataclass
class Learner:
    """PPO over envs, driven like the trainer."""

    env: Env
    cfg: PPOConfig
    seed: int = 0
    max_iterations: int = 100
    max_episode_length: int = 1  # an episode may end in every step
    bf16: bool = False
    device: str = "cpu"
    compile: bool = False
    more: Mapping[str, Any] = field(default_factory=dict)  # fields of EnvSpec
    ppo: PPO = field(init=False)

    def __post_init__(self) -> None:
        env = self.env
        torch.manual_seed(self.seed)
        space, longest = Box(env.num_actions), self.max_episode_length
        spec = EnvSpec(env.num_envs, env.obs_sizes, space, longest, **self.more)
        context = LearnerContext("ppo", compile=self.compile)
        device = torch.device(self.device)
        self.ppo = PPO(self.cfg, spec, context, device=device, seed=self.seed, max_iterations=self.max_iterations)
        self.policy.reduced = torch.bfloat16 if self.bf16 else self.policy.reduced
        self.obs = env.reset()

    @property
    def policy(self) -> ActorCritic:
        return self.ppo.policy

    @property
    def rollout(self) -> Rollout:
        return self.ppo.rollout

    def collect(self) -> None:
        self.obs = collect(self.ppo, self.env, self.obs)

    def update(self) -> dict[str, Tensor]:
        return self.ppo.update()

    def train(self, iterations: int) -> list[float]:
        """Train; return the mean reward of each iteration."""
        rewards = []
        for _ in range(iterations):
            self.collect()
            rewards.append(self.rollout.reward.mean().item())
            self.update()
        return rewards
