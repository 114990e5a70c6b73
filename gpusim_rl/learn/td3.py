"""Twin delayed deep deterministic policy gradient (Fujimoto et al. 2018, arXiv 1802.09477) without host syncs."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from gpusim_rl.learn.algorithm import DEFAULT_CONTEXT, EnvSpec, LearnerContext, Transition
from gpusim_rl.learn.off_policy import Batch, OffPolicy
from gpusim_rl.learn.q_networks import ActorNetwork, QPolicy, actor_and_critic
from gpusim_rl.settings.schema import TD3Config


class TD3Policy(QPolicy):
    """Deterministic actor and its critics."""

    actor: ActorNetwork  # type: ignore[reportIncompatibleVariableOverride]

    def __init__(self, cfg: TD3Config, env: EnvSpec, section: str = "algorithm") -> None:
        networks = actor_and_critic(cfg, env, env.action_space.size, section)
        super().__init__(cfg, env, *networks, target_actor=True)
        self._scale = cfg.action_scale

    def action(self, outputs: Float[Tensor, "*batch outputs"]) -> Float[Tensor, "*batch actions"]:
        return torch.tanh(outputs) if self._scale == 1.0 else torch.tanh(outputs) * self._scale


class TD3(OffPolicy):
    """Twin delayed DDPG, with the options of FastTD3.

        target  y = r + discount min_i Q'_i(s', clip(mu'(s') + clipped noise))
        critic  sum_i (Q_i(s, a) - y)^2
        actor   -min_i Q_i(s, mu(s)), every `policy_delay` updates

    FastTD3 (Seo et al. 2025, arXiv 2505.22642): many envs, large batches, `network.atoms`, a noise scale per env and
    episode. DDPG (Lillicrap et al. 2016, arXiv 1509.02971): `network.critics=1 policy_delay=1 smoothing=0`. Fujimoto's
    actor maximises the first critic only; here, `clipped` selects the critics' minimum or mean.
    """

    Config = TD3Config
    policy_class = TD3Policy
    num_noise = 1
    actor_losses = ("loss/actor",)

    cfg: TD3Config
    policy: TD3Policy  # type: ignore[reportIncompatibleVariableOverride]

    def __init__(self, cfg: TD3Config, env: EnvSpec, context: LearnerContext = DEFAULT_CONTEXT, **rest: Any) -> None:
        super().__init__(cfg, env, context, **rest)
        self.noise_scale = torch.empty(env.num_envs, 1, device=self.device)
        self.noise_scale.uniform_(cfg.noise_min, cfg.noise_max, generator=self._act_generator)

    def _noisy(self, action: Tensor, noise: Tensor) -> Tensor:
        limit = self.cfg.action_scale
        return torch.add(action, noise, alpha=limit).clamp_(-limit, limit)

    def explore(self, outputs: Tensor, noise: Tensor) -> Tensor:
        return self._noisy(self.policy.action(outputs), noise * self.noise_scale)

    def record(self, action: Tensor, step: Transition) -> None:
        """Record the step; redraw the noise scale where an episode ended."""
        low, high = self.cfg.noise_min, self.cfg.noise_max
        normal = self.noise.now[:, self.num_actions :]
        share = 0.5 + 0.5 * torch.erf(normal * math.sqrt(0.5))  # uniform
        torch.where(step.done[:, None], low + (high - low) * share, self.noise_scale, out=self.noise_scale)
        super().record(action, step)

    def next_action(self, batch: Batch) -> tuple[Tensor, None]:
        policy = self.policy
        assert policy.target_actor is not None
        action = policy.action(policy.target_actor(batch.next_obs["policy"], reduced=policy.mlp_reduced))
        return self._noisy(action, batch.noise[0]), None

    def _draw_batch_noise(self, *shape: int) -> Tensor:
        cfg, noise = self.cfg, super()._draw_batch_noise(*shape)
        noise[:, 0].mul_(cfg.smoothing).clamp_(-cfg.smoothing_clip, cfg.smoothing_clip)
        return noise

    def actor_loss(self, batch: Batch) -> list[Tensor]:
        policy = self.policy
        action = policy.action(policy.actor(batch.obs["policy"], reduced=policy.mlp_reduced))
        q = self.q_value(batch, action)
        loss = q @ -batch.weight
        return [loss + self._imitation(batch, action, q) if self._imitates else loss]

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        state["episodes"]["noise_scale"] = self.noise_scale.clone()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`; noise scales are clamped to the current settings."""
        super().load_state_dict(state)
        if state["episodes"] is not None:
            self.noise_scale.copy_(state["episodes"]["noise_scale"]).clamp_(self.cfg.noise_min, self.cfg.noise_max)
