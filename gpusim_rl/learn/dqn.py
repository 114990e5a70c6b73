"""Deep Q-networks (Mnih et al. 2015, doi 10.1038/nature14236) and their successors, without host syncs."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from gpusim_rl.learn.algorithm import DEFAULT_CONTEXT, EnvSpec, LearnerContext, Transition
from gpusim_rl.learn.off_policy import Batch, OffPolicy
from gpusim_rl.learn.q_networks import DiscreteCritic, QPolicy, encoder_for
from gpusim_rl.settings.schema import DQNConfig
from gpusim_rl.spaces import Box


class DQNPolicy(QPolicy):
    """Greedy policy; observes `policy` and images. Continuous actions take one of `bins` equally spaced values."""

    critic: DiscreteCritic  # type: ignore[reportIncompatibleVariableOverride]
    target_critic: DiscreteCritic  # type: ignore[reportIncompatibleVariableOverride]

    def __init__(self, cfg: DQNConfig, env: EnvSpec, section: str = "algorithm") -> None:
        space, (encoder, size) = env.action_space, encoder_for(cfg, env, section)
        continuous = isinstance(space, Box)
        counts = (cfg.bins,) * space.size if continuous else space.counts
        critic = DiscreteCritic(size, counts, cfg.network, f"{section}.network")
        env = dataclasses.replace(env, obs_sizes={"policy": env.obs_sizes["policy"]})
        super().__init__(cfg, env, encoder, None, critic)
        self._scale = cfg.action_scale
        self._spacing = 2.0 * cfg.action_scale / (cfg.bins - 1) if continuous else None

    def action(self, outputs: Int[Tensor, "*batch choices"]) -> Shaped[Tensor, "*batch choices"]:
        """Convert option indices to actions."""
        return outputs if self._spacing is None else outputs * self._spacing - self._scale

    def index(self, action: Shaped[Tensor, "*batch choices"]) -> Shaped[Tensor, "*batch choices"]:
        """Convert actions to option indices."""
        return action if self._spacing is None else ((action + self._scale) / self._spacing).round_()

    def _choosing(self, seen: Float[Tensor, "batch size"]) -> Int[Tensor, "batch choices"]:
        return self.critic.best(self.critic.options(seen, reduced=self.mlp_reduced))


class DQN(OffPolicy):
    """Deep Q-learning with epsilon-greedy exploration.

        target  y = r + discount Q'(s', argmax_a Q(s', a))      (double; else argmax_a Q'(s', a))
        critic  (Q(s, a) - y)^2

    `double`: van Hasselt et al. 2016, arXiv 1509.06461. With `network.dueling`, `network.atoms`, `replay.alpha` and
    `n_step`: Rainbow (Hessel et al. 2018, arXiv 1710.02298) without noisy networks. `epsilon_ladder`: Ape-X (Horgan et
    al. 2018, arXiv 1803.00933). Three bins often suffice for continuous actions (Seyde et al. 2021, arXiv 2111.02552).
    """

    Config = DQNConfig
    policy_class = DQNPolicy
    discrete = True
    num_noise = 1

    cfg: DQNConfig
    policy: DQNPolicy  # type: ignore[reportIncompatibleVariableOverride]

    def __init__(self, cfg: DQNConfig, env: EnvSpec, context: LearnerContext = DEFAULT_CONTEXT, **rest: Any) -> None:
        super().__init__(cfg, env, context, **rest)
        device = self.device
        self._counts = torch.tensor(self.policy.critic.counts, device=device)
        self._last, self._later = self._counts - 1, torch.arange(self.horizon, device=device)
        first_env, all_envs = context.actor or (0, env.num_envs)
        rungs = (first_env + torch.arange(env.num_envs, device=device))[:, None] / max(all_envs - 1, 1)
        self._ladder = 1.0 + cfg.epsilon_ladder * rungs

    def epsilon(self, steps: Tensor) -> Tensor:
        """Return the exploration probability per env after `steps`, which broadcasts with [num_envs, 1]."""
        start, end = self.cfg.epsilon_start, self.cfg.epsilon_end
        progress = (steps * (self.num_envs / self.cfg.epsilon_decay)).clamp_(max=1.0)
        return (start + (end - start) * progress) ** self._ladder

    def _draw_noise(self, numbers: Tensor) -> None:
        """Draw random options for all steps; -1 selects the greedy option."""
        super()._draw_noise(numbers)
        uniform = torch.erf(numbers * math.sqrt(0.5)).mul_(0.5).add_(0.5)  # in [0, 1]
        random = torch.minimum((uniform[..., : self.num_actions] * self._counts).long(), self._last)
        steps = (self.steps + self._later)[:, None, None]
        starts = steps * self.num_envs < self.cfg.learning_starts
        explores = (uniform[..., self.num_actions :] < self.epsilon(steps)) | starts
        numbers[..., : self.num_actions] = torch.where(explores, random, -1)

    def choose(self, outputs: Tensor) -> Tensor:
        random = self.noise.now[:, : self.num_actions].long()
        return self.policy.action(torch.where(random < 0, outputs, random))

    def record(self, action: Tensor, step: Transition) -> None:
        """Convert actions to option indices, and record the step."""
        super().record(self.policy.index(action), step)

    def _next_outputs(self, batch: Batch) -> tuple[Tensor, None]:
        policy, obs = self.policy, batch.next_obs["policy"]
        options = policy.target_critic.options(obs, reduced=policy.mlp_reduced)
        selecting = policy.critic.options(obs, reduced=policy.mlp_reduced) if self.cfg.double else options
        return policy.target_critic.chosen(options, policy.critic.best(selecting)), None

    def update(self) -> dict[str, Tensor]:
        return super().update() | {"policy/epsilon": self.epsilon(self.steps).mean()}
