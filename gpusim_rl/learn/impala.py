"""IMPALA: an actor-critic that learns from rollouts of older policies, without a host sync."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gpusim_rl.learn.algorithm import EnvSpec, Hidden
from gpusim_rl.learn.networks import Evaluation
from gpusim_rl.learn.on_policy import Batch, OnPolicy, Samples
from gpusim_rl.learn.ppo import clipped_loss
from gpusim_rl.learn.vtrace import vtrace
from gpusim_rl.settings.schema import ImpalaConfig


class Impala(OnPolicy):
    """Actor-critic with V-trace (Espeholt et al. 2018, arXiv 1802.01561).

    With actors (`actors=process`, `actors=ray`) rollouts are of a policy that is some updates old. Without them the age
    is made: a rollout of env n is learned from after n (delay + 1) // num_envs further rollouts. So a batch has samples
    of every age up to `delay`, as that of many actors has. It shows what a task loses by it. With `delay=0` this is A2C
    with V-trace.

    Each rollout has a version: the updates before it was begun. Samples older than `max_policy_lag` updates do not
    count.

    With `loss=clipped` the policy's loss is PPO's, on the advantages of V-trace: the ratio to the policy that acted is
    kept within 1 +- `ratio_clip` (as in APPO, Luo et al. 2020, arXiv 1912.00167, without its target network).

    Args:
        cfg: Settings.
        env: The environments.
        device: Where everything lives.
        seed: Of the exploration noise.
        max_iterations: Updates in a whole training, for the linear schedule.
    """

    Config = ImpalaConfig
    learns_from_actors = True

    cfg: ImpalaConfig

    def __init__(
        self, cfg: ImpalaConfig, env: EnvSpec, *, device: torch.device, seed: int, max_iterations: int
    ) -> None:
        super().__init__(cfg, env, device=device, seed=seed, max_iterations=max_iterations)
        ages = cfg.delay + 1 if env.role == "both" else 0  # with actors the age is real
        self._last_hidden = tuple(torch.zeros_like(state) for state in self.hidden)
        self._memory = [*self.rollout.memory(), *((state, 1) for state in self._last_hidden)]
        self._ring = [part.new_zeros(ages, *part.shape) for part, _ in self._memory]
        self._versions = torch.full((ages,), -torch.inf, device=device)  # nothing there yet
        self._envs = torch.arange(env.num_envs, device=device)
        self._delay = self._envs * ages // env.num_envs
        self._log_ratio = torch.zeros_like(self.rollout.reward)

    def update(self) -> dict[str, Tensor]:
        """Keeps the rollout, and learns from those that are due; with actors, learns from what they have sent."""
        if self._role == "learns":
            return super().update()
        lag = self._exchange()
        counts = lag <= self.cfg.max_policy_lag
        self.rollout.diverged.logical_or_(~counts)
        limit = float(self.cfg.max_policy_lag)
        return super().update() | {
            "policy/lag_min": lag.clamp(max=limit).amin(),
            "policy/lag_mean": lag.masked_fill(~counts, 0.0).sum() / counts.sum().clamp(min=1),
            "policy/lag_max": lag.masked_fill(~counts, 0.0).amax(),
            "policy/dropped": 1.0 - counts.float().mean(),
        }

    @property
    def max_policy_lag(self) -> float:
        """That of the settings."""
        return self.cfg.max_policy_lag

    def recording(self) -> list[tuple[Tensor, int]]:
        """The rollout, and the recurrent state after it."""
        last = self._last_hidden if self._role == "learns" else self.hidden
        return [*super().recording(), *((state, 1) for state in last)]

    @torch.no_grad()
    def _exchange(self) -> Tensor:
        """Puts the rollout into the ring, and takes one for each env from it; returns their ages [updates], [N]."""
        for own, state in zip(self._last_hidden, self.hidden, strict=True):
            own.copy_(state)
        ages = len(self._versions)
        newest = self.iteration.long() % ages
        self._versions.index_copy_(0, newest[None], self.iteration[None])
        due = (newest - self._delay) % ages
        for (part, dim), ring in zip(self._memory, self._ring, strict=True):
            ring.index_copy_(0, newest[None], part[None])
            part.copy_(ring.movedim(1 + dim, 1)[due, self._envs].movedim(0, dim))
        return self.iteration - self._versions[due]

    @torch.no_grad()
    def _prepare(self) -> tuple[Batch, dict[str, Tensor]]:
        """What the networks of now say of the samples, then as for every rollout."""
        rollout, policy = self.rollout, self.policy
        inputs = {group: self._by_sequence(value) for group, value in policy.normalize(rollout.obs).items()}
        hidden = tuple(h.transpose(0, 1).flatten(1, 2) for h in rollout.hidden)
        is_first = self._by_sequence(rollout.is_first) if policy.recurrent else None
        now = policy.evaluate(inputs, self._by_sequence(rollout.action), hidden, is_first)
        rollout.value.copy_(self._by_step(now.value))
        acted = policy.head.stored(rollout.distribution).log_prob(rollout.action)
        torch.sub(self._by_step(now.log_prob), acted, out=self._log_ratio)
        return super()._prepare()

    def _by_step(self, x: Tensor) -> Tensor:
        """Undoes `_by_sequence`."""
        return x.unflatten(1, (-1, self.rollout.num_envs)).transpose(0, 1).flatten(0, 1)

    def _hidden_after_rollout(self) -> Hidden:
        return self._last_hidden

    def _advantages(self, *rollout: Tensor) -> tuple[Tensor, Tensor]:
        cfg = self.cfg
        # The ratio is in the clipped loss itself.
        clips = {"clip": cfg.clip, "advantage_clip": None if cfg.loss == "clipped" else cfg.advantage_clip}
        return vtrace(self._log_ratio, *rollout, gamma=cfg.gamma, lam=cfg.gae_lambda, **clips)

    def _parts(self, old: Samples, now: Evaluation) -> dict[str, Tensor]:
        parts = super()._parts(old, now)
        if self.cfg.loss == "clipped":
            ratio = torch.exp(now.log_prob - old.log_prob)
            parts["loss/policy"] = clipped_loss(old.advantage, ratio, self.cfg.ratio_clip)
        return parts

    def state_dict(self) -> dict[str, Any]:
        """That of every algorithm of a rollout, and the ring."""
        ring = [part.clone() for part in self._ring]
        return {**super().state_dict(), "ring": ring, "versions": self._versions.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict`."""
        super().load_state_dict(state)
        ages = len(self._versions)
        if ages == 0 or len(state["versions"]) != ages:  # with actors there is no ring; without, it is empty then
            return
        for own, saved in zip([*self._ring, self._versions], [*state["ring"], state["versions"]], strict=True):
            own.copy_(saved)
