"""IMPALA: actor-critic with V-trace off-policy correction, without host syncs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gpusim_rl.errors import warn
from gpusim_rl.learn.algorithm import DEFAULT_CONTEXT, EnvSpec, LearnerContext
from gpusim_rl.learn.minibatch import Samples, Sequences, by_step
from gpusim_rl.learn.networks import EvaluatedActions
from gpusim_rl.learn.on_policy import OnPolicy
from gpusim_rl.learn.ppo import clipped_loss
from gpusim_rl.settings.schema import ImpalaConfig


def vtrace(
    log_ratio: Float[Tensor, "time envs"],
    reward: Float[Tensor, "time envs"],
    value: Float[Tensor, "time envs"],
    next_value: Float[Tensor, "time envs"],
    terminated: Bool[Tensor, "time envs"],
    done: Bool[Tensor, "time envs"],
    valid: Bool[Tensor, "time envs"],
    gamma: float | Float[Tensor, "time envs"],
    *,
    lam: float = 1.0,
    clip: float = 1.0,
    advantage_clip: float | None = 1.0,
) -> tuple[Float[Tensor, "time envs"], Float[Tensor, "time envs"]]:
    """Compute V-trace (Espeholt et al. 2018, arXiv 1802.01561, section 4.1), exact at truncations.

    Truncated episodes bootstrap with V(final_obs) in the advantage too, as the next target belongs to another episode.
    See `gae` for the arguments from `reward` to `gamma`.

    `log_ratio` is log(pi(a_t|s_t) / mu(a_t|s_t)) of learning policy pi and acting policy mu; `lam` scales the traces.
    `clip` limits the ratio in the target (rho-bar; c-bar is 1), `advantage_clip` in the advantage (None: unweighted).

    Returns:
        Advantages, weighted by the clipped ratio, and critic targets.
    """
    ignored = ~valid
    ratio = log_ratio.exp()
    trace = (gamma * lam * ratio.clamp(max=1.0)).masked_fill_(done | ignored, 0.0)
    ahead = reward + gamma * next_value.masked_fill(terminated, 0.0)
    error = (ratio.clamp(max=clip) * (ahead - value)).masked_fill_(ignored, 0.0)
    for t in reversed(range(len(error) - 1)):
        error[t].addcmul_(trace[t], error[t + 1])
    later = torch.cat([error[1:], torch.zeros_like(error[:1])]).masked_fill_(done, 0.0)
    advantage = ahead + gamma * later - value
    if advantage_clip is not None:
        advantage = ratio.clamp(max=advantage_clip) * advantage
    return advantage.masked_fill_(ignored, 0.0), value + error


class Impala(OnPolicy):
    """Actor-critic with V-trace (Espeholt et al. 2018, arXiv 1802.01561).

    With actors, rollouts are a few updates old. Without actors, `delay` simulates this: env n's rollout is used
    n (delay + 1) // num_envs rollouts later. Samples older than `max_policy_lag` updates are ignored.

    `loss=clipped` is PPO's policy loss on V-trace advantages, with the ratio to the acting policy (as in APPO, Luo et
    al. 2020, arXiv 1912.00167, without a target network).
    """

    Config = ImpalaConfig

    cfg: ImpalaConfig

    def __init__(self, cfg: ImpalaConfig, env: EnvSpec, context: LearnerContext = DEFAULT_CONTEXT, **rest: Any) -> None:
        super().__init__(cfg, env, context, **rest)
        self.clip, self._ages = cfg.ratio_clip, cfg.delay + 1
        self._ring = [memory.new_zeros(self._ages, *memory.shape) for memory, _ in self.rollout.memory()]
        self._versions = torch.full((self._ages,), -torch.inf, device=self.device)  # -inf: empty
        self._envs = torch.arange(env.num_envs, device=self.device)
        self._delay = self._envs * self._ages // env.num_envs
        self._log_ratio = torch.zeros_like(self.rollout.reward)

    def drop_ring(self) -> None:
        """Drop the ring buffer, so that each rollout is used immediately."""
        self._ages, self._ring, self._versions = 0, [], self._versions[:0].clone()

    def update(self) -> dict[str, Tensor]:
        """Store the rollout and learn from the rollouts that are due; with actors, learn from the received rollouts."""
        if not self._ages:
            return super().update()
        lag, limit = self._exchange(), float(self.cfg.max_policy_lag)
        counts = lag <= limit
        self.rollout.diverged.logical_or_(~counts)
        return super().update() | {
            "policy/lag_min": lag.clamp(max=limit).amin(),
            "policy/lag_mean": lag.masked_fill(~counts, 0.0).sum() / counts.sum().clamp(min=1),
            "policy/lag_max": lag.masked_fill(~counts, 0.0).amax(),
            "policy/dropped": 1.0 - counts.float().mean(),
        }

    @torch.no_grad()
    def _exchange(self) -> Tensor:
        """Store the rollout in the ring buffer; load the due rollout of each env and return its age [updates], [N]."""
        newest = self.steps.iteration.long() % self._ages
        self._versions.index_copy_(0, newest[None], self.steps.iteration[None])
        due = (newest - self._delay) % self._ages
        for (memory, dim), ring in zip(self.rollout.memory(), self._ring, strict=True):
            ring.index_copy_(0, newest[None], memory[None])
            memory.copy_(ring.movedim(1 + dim, 1)[due, self._envs].movedim(0, dim))
        return self.steps.iteration - self._versions[due]

    @torch.no_grad()
    def prepare(self, reward: Tensor, inputs: Mapping[str, Tensor]) -> tuple[Sequences, dict[str, Tensor]]:
        """Recompute values and log-ratios with the current networks, then prepare the samples."""
        rollout, policy = self.rollout, self.policy
        batch = Sequences.of(rollout, policy.normalize(rollout.obs), rollout.action)
        now = policy.evaluate(batch.inputs, batch.packed, batch.hidden, batch.is_first)
        rollout.value.copy_(by_step(now.value, rollout.num_envs))
        acted = policy.head.stored(rollout.distribution).log_prob(rollout.action)
        torch.sub(by_step(now.log_prob, rollout.num_envs), acted, out=self._log_ratio)
        return super().prepare(reward, inputs)

    def advantages(self, *rollout: Tensor) -> tuple[Tensor, Tensor]:
        cfg = self.cfg
        limit = None if cfg.loss == "clipped" else cfg.advantage_clip  # the clipped loss contains the ratio
        weights = {"lam": cfg.gae_lambda, "clip": cfg.clip, "advantage_clip": limit}
        return vtrace(self._log_ratio, *rollout, gamma=cfg.gamma, **weights)

    def sample_losses(self, old: Samples, now: EvaluatedActions) -> dict[str, Tensor]:
        losses = super().sample_losses(old, now)
        if self.cfg.loss == "clipped":
            losses["loss/policy"] = clipped_loss(old, torch.exp(now.log_prob - old.log_prob))
        return losses

    def state_dict(self) -> dict[str, Any]:
        ring = [memory[self._versions > -torch.inf] for memory in self._ring]
        return {**super().state_dict(), "ring": ring, "versions": self._versions.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if not self._ages or len(state["versions"]) != self._ages:  # runs with actors have no ring
            return
        pairs = list(zip(self._ring, state["ring"], strict=True))
        if any(ring.shape[1:] != saved.shape[1:] for ring, saved in pairs):
            warn("sequence lengths changed; dropping earlier rollouts")
            return
        self._versions.copy_(state["versions"])
        filled = self._versions > -torch.inf
        for ring, saved in pairs:
            ring[filled] = saved[filled.to(saved.device)] if len(saved) == self._ages else saved.to(ring.device)
