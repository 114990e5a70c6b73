"""Envs in a few lines of torch, and the collecting loop around them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import yaml
from torch import Tensor

from gpusim_rl.config import PPOConfig, build
from gpusim_rl.learn.networks import ActorCritic, Hidden
from gpusim_rl.learn.ppo import PPO
from gpusim_rl.learn.rollout import Rollout

_DEFAULTS = yaml.safe_load((Path(__file__).parents[2] / "cfg" / "ppo" / "default.yaml").read_text())


def ppo_config(network: Mapping[str, Any] | None = None, **changes: Any) -> PPOConfig:
    """The defaults of cfg/ppo with a small network, and changes."""
    small = {"hidden": [32, 16], "rnn_size": 8}
    net = {**_DEFAULTS["network"], **small, **(network or {})}
    values = {**_DEFAULTS, "horizon": 8, "precision": "fp32", **changes, "network": net}
    return build(PPOConfig, values, "ppo")


@dataclass
class Outcome:
    obs: dict[str, Tensor]
    final_obs: dict[str, Tensor]
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    diverged: Tensor


class World(Protocol):
    obs_sizes: dict[str, int]
    num_actions: int
    num_envs: int

    def reset(self) -> dict[str, Tensor]: ...
    def step(self, action: Tensor) -> Outcome: ...


class RandomEnv:
    """Observations, rewards and ends of episodes are noise: every case comes up."""

    def __init__(
        self,
        num_envs: int,
        obs_sizes: Mapping[str, int] | None = None,
        num_actions: int = 3,
        *,
        seed: int = 0,
        ends: tuple[float, float, float] = (0.1, 0.1, 0.05),
        device: str = "cpu",
    ) -> None:
        self.num_envs, self.num_actions, self.ends = num_envs, num_actions, ends
        self.obs_sizes = dict(obs_sizes or {"policy": 5})
        self.generator = torch.Generator().manual_seed(seed)
        self.device = device

    def _obs(self) -> dict[str, Tensor]:
        # an offset and a scale, so that normalisation has something to do
        return {
            group: (3.0 + 2.0 * torch.randn(self.num_envs, size, generator=self.generator)).to(self.device)
            for group, size in self.obs_sizes.items()
        }

    def reset(self) -> dict[str, Tensor]:
        return self._obs()

    def step(self, action: Tensor) -> Outcome:
        kind = torch.rand(self.num_envs, generator=self.generator)
        bounds = torch.tensor(self.ends).cumsum(0)
        terminated = kind < bounds[0]
        truncated = (kind >= bounds[0]) & (kind < bounds[1])
        diverged = (kind >= bounds[1]) & (kind < bounds[2])
        reward = torch.randn(self.num_envs, generator=self.generator)
        masks = (m.to(self.device) for m in (reward * ~diverged, terminated, truncated, diverged))
        return Outcome(self._obs(), self._obs(), *masks)


@dataclass
class Learner:
    """Policy, PPO and rollout over some envs, driven as the trainer drives them."""

    world: World
    cfg: PPOConfig
    seed: int = 0
    max_iterations: int = 100
    max_truncations: int = 0  # 0: one per step, which is always enough
    bf16: bool = False
    device: str = "cpu"
    policy: ActorCritic = field(init=False)
    ppo: PPO = field(init=False)
    rollout: Rollout = field(init=False)

    def __post_init__(self) -> None:
        world, num_envs = self.world, self.world.num_envs
        torch.manual_seed(self.seed)
        self.policy = ActorCritic(world.obs_sizes, world.num_actions, self.cfg, bf16=self.bf16)
        self.policy.to(self.device)
        self.noise = torch.Generator().manual_seed(self.seed + 1)
        self.ppo = PPO(
            self.policy,
            self.cfg,
            horizon=self.cfg.horizon,
            num_envs=num_envs,
            max_iterations=self.max_iterations,
            generator=torch.Generator().manual_seed(self.seed + 2),
        )
        self.hidden: Hidden = self.policy.initial_state(num_envs)
        self.rollout = Rollout(
            self.cfg.horizon,
            num_envs,
            world.obs_sizes,
            world.num_actions,
            initial_hidden=self.hidden,
            sequence_length=self.ppo.sequence_length,
            max_truncations=self.max_truncations or self.cfg.horizon,
            device=torch.device(self.device),
        )
        self.obs = world.reset()
        self.is_first = torch.ones(num_envs, dtype=torch.bool, device=self.device)

    def collect(self) -> None:
        """Fills the rollout."""
        self.rollout.begin()
        for t in range(self.cfg.horizon):
            noise = torch.randn(self.world.num_envs, self.world.num_actions, generator=self.noise)
            sample = self.policy.act(self.obs, self.hidden, noise.to(self.device))
            self.rollout.write_policy(t, self.obs, self.hidden, self.is_first, sample)
            out = self.world.step(sample.action)
            self.rollout.write_outcome(
                t,
                out.reward,
                out.terminated,
                out.truncated,
                out.diverged,
                out.final_obs,
                sample.hidden,
            )
            done = out.terminated | out.truncated | out.diverged
            self.hidden = tuple(h.masked_fill(done[None, :, None], 0.0) for h in sample.hidden)
            self.obs, self.is_first = out.obs, done

    def update(self) -> dict[str, Tensor]:
        return self.ppo.update(self.rollout, self.obs, self.hidden)

    def train(self, iterations: int) -> list[float]:
        """Learns; returns the mean reward of each iteration."""
        rewards = []
        for _ in range(iterations):
            self.collect()
            rewards.append(self.rollout.reward.mean().item())
            self.update()
        return rewards
