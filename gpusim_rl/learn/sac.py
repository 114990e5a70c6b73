"""Soft actor-critic (Haarnoja et al. 2018, arXiv 1812.05905) without host syncs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from gpusim_rl.learn.algorithm import DEFAULT_CONTEXT, EnvSpec, Hidden, LearnerContext, Observation
from gpusim_rl.learn.off_policy import Batch, OffPolicy
from gpusim_rl.learn.optimizer import MaskedAdamW
from gpusim_rl.learn.q_networks import ActorNetwork, QPolicy, actor_and_critic
from gpusim_rl.settings.schema import SACConfig

_LOG_2PI = math.log(2.0 * math.pi)


@dataclass(slots=True)
class SquashedGaussian:
    """Distribution of scale * tanh(u), where u is a diagonal Gaussian."""

    mean: Float[Tensor, "*batch actions"]
    """Mean of u."""
    log_std: Float[Tensor, "*batch actions"]
    """Log of the standard deviation of u."""
    scale: float

    @property
    def mode(self) -> Float[Tensor, "*batch actions"]:
        """Action at the mean of u."""
        return self._squash(self.mean)

    def sample(self, noise: Float[Tensor, "*batch actions"]) -> Float[Tensor, "*batch actions"]:
        """Return actions for standard normal noise."""
        return self._squash(torch.addcmul(self.mean, self.log_std.exp(), noise))

    def sample_with_log_prob(
        self, noise: Float[Tensor, "*batch columns"]
    ) -> tuple[Float[Tensor, "*batch actions"], Float[Tensor, "*batch"]]:
        """Return actions for noise `with_density`, and their log-density."""
        noise, constant = noise[..., :-1], noise[..., -1]
        u = torch.addcmul(self.mean, self.log_std.exp(), noise)
        # log pi = log N(u) - log(scale) - log(1 - tanh(u)^2), the last term accurate for tanh(u) near 1:
        # 2 log 2 - 2 u - 2 log(1 + exp(-2 u)). With beta=-2, softplus returns -log(1 + exp(-2 u)) / 2.
        each = torch.add(self.log_std, u, alpha=-2.0).add(functional.softplus(u, beta=-2.0), alpha=4.0)
        return self._squash(u), constant - each.sum(dim=-1)

    def _squash(self, u: Tensor) -> Tensor:
        return torch.tanh(u) if self.scale == 1.0 else torch.tanh(u) * self.scale


def with_density(noise: Float[Tensor, "*batch actions"], scale: float) -> Float[Tensor, "*batch columns"]:
    """Append to standard normal noise the part of the log-density that does not depend on the actor."""
    constant = noise.shape[-1] * (0.5 * _LOG_2PI + math.log(4.0 * scale))
    density = torch.linalg.vecdot(noise, noise).mul_(-0.5).sub_(constant)
    return torch.cat([noise, density[..., None]], dim=-1)


class SACPolicy(QPolicy):
    """Squashed-Gaussian actor and its critics."""

    actor: ActorNetwork  # type: ignore[reportIncompatibleVariableOverride]

    def __init__(self, cfg: SACConfig, env: EnvSpec, section: str = "algorithm") -> None:
        super().__init__(cfg, env, *actor_and_critic(cfg, env, 2 * env.action_space.size, section))
        self._scale, self._range = cfg.action_scale, (cfg.log_std_min, cfg.log_std_max)

    def distribution(self, outputs: Float[Tensor, "*batch outputs"]) -> SquashedGaussian:
        """Build the distribution; tanh bounds the log-std, with a non-zero gradient everywhere."""
        mean, spread = outputs.chunk(2, dim=-1)
        low, high = self._range
        return SquashedGaussian(mean, 0.5 * (high - low) * torch.tanh(spread) + 0.5 * (high + low), self._scale)

    @torch.no_grad()
    def act(self, obs: Observation, hidden: Hidden, deterministic: bool = True) -> tuple[Tensor, Hidden]:
        """Return modes or sampled actions for raw observations [batch, size]."""
        outputs, hidden = self.outputs(obs, hidden)
        distribution = self.distribution(outputs)
        if deterministic:
            return distribution.mode, hidden
        return distribution.sample(torch.randn_like(distribution.mean)), hidden


class SAC(OffPolicy):
    """Soft actor-critic: maximises return plus alpha times entropy.

        target  y = r + discount (min_i Q'_i(s', a') - alpha log pi(a'|s')),   a' ~ pi(s')
        critic  sum_i (Q_i(s, a) - y)^2
        actor   alpha log pi(a|s) - min_i Q_i(s, a),                           a ~ pi(s)
        alpha   moves the entropy towards `target_entropy`

    Attributes:
        log_alpha: Logarithm of alpha, a parameter [].
    """

    Config = SACConfig
    policy_class = SACPolicy
    actor_losses = ("loss/actor", "policy/entropy")

    cfg: SACConfig
    policy: SACPolicy  # type: ignore[reportIncompatibleVariableOverride]

    def __init__(self, cfg: SACConfig, env: EnvSpec, context: LearnerContext = DEFAULT_CONTEXT, **rest: Any) -> None:
        super().__init__(cfg, env, context, **rest)
        self.log_alpha = nn.Parameter(torch.full((), math.log(cfg.alpha), device=self.device))
        self.alpha_optimizer = MaskedAdamW([self.log_alpha], cfg.alpha_learning_rate)
        # -1 per action in [-1, 1]; other scales keep the difference from the maximum entropy
        default = self.num_actions * (math.log(cfg.action_scale) - 1.0)
        self._target_entropy = default if cfg.target_entropy is None else cfg.target_entropy

    def explore(self, outputs: Tensor, noise: Tensor) -> Tensor:
        return self.policy.distribution(outputs).sample(noise)

    def _draw_batch_noise(self, *shape: int) -> Tensor:
        return with_density(super()._draw_batch_noise(*shape), self.cfg.action_scale)

    @torch.no_grad()
    def look_ahead(self, batches: Sequence[Batch]) -> None:
        """Sample the next actions of all updates until the actor moves at once, unless the encoder moves before."""
        if len(batches) > 1 and self.policy.encoder is None:
            obs, noise = [batch.next_obs["policy"] for batch in batches], [batch.noise[0] for batch in batches]
            action, bonus = self._next(torch.cat(obs), torch.cat(noise))
            parts = (x.split(self.cfg.batch_size) for x in (action, bonus))
            for batch, *ahead in zip(batches, *parts, strict=True):
                batch.ahead = tuple(ahead)

    def next_action(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return batch.ahead or self._next(batch.next_obs["policy"], batch.noise[0])

    def _next(self, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        outputs = self.policy.actor(obs, reduced=self.policy.mlp_reduced)
        action, log_prob = self.policy.distribution(outputs).sample_with_log_prob(noise)
        return action, -self.log_alpha.exp() * log_prob

    def actor_loss(self, batch: Batch) -> list[Tensor]:
        outputs = self.policy.actor(batch.obs["policy"], reduced=self.policy.mlp_reduced)
        distribution = self.policy.distribution(outputs)
        action, log_prob = distribution.sample_with_log_prob(batch.noise[1])
        q = self.q_value(batch, action)
        loss = (self.log_alpha.detach().exp() * log_prob - q) @ batch.weight
        if self._imitates:
            loss = loss + self._imitation(batch, distribution.mode, q)
        return [loss, -(log_prob.detach() @ batch.weight)]

    def _actor_step(self, batch: Batch, limit: Tensor) -> tuple[Tensor, ...]:
        loss, entropy, norm = super()._actor_step(batch, limit)
        if self.cfg.learn_alpha:
            with torch.no_grad():  # d/dlog_alpha of alpha (entropy - target_entropy)
                self.log_alpha.grad = self.log_alpha.exp() * (entropy - self._target_entropy)
                # NaN if the slope is not finite
                self.alpha_optimizer.masked_step(torch.add(norm, self.log_alpha.grad, alpha=0.0), limit)
        return loss, entropy, norm

    def update(self) -> dict[str, Tensor]:
        return super().update() | {"policy/alpha": self.log_alpha.detach().exp()}

    def state_dict(self) -> dict[str, Any]:
        entropy = {"log_alpha": self.log_alpha.detach().clone(), "alpha_optimizer": self.alpha_optimizer.moments()}
        return super().state_dict() | entropy | {"configured_alpha": self.cfg.alpha}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`; a changed or fixed `alpha` setting overrides the saved value."""
        super().load_state_dict(state)
        if self.cfg.learn_alpha and state["configured_alpha"] == self.cfg.alpha:
            self.log_alpha.copy_(state["log_alpha"])
        self.alpha_optimizer.load_moments(state["alpha_optimizer"])
