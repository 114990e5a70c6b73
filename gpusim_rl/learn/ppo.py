"""Proximal policy optimisation (Schulman et al. 2017, arXiv 1707.06347) without a host sync."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gpusim_rl.learn.algorithm import EnvSpec
from gpusim_rl.learn.distributions import squared_distance
from gpusim_rl.learn.minibatch import Samples, Sequences, fit_minibatches
from gpusim_rl.learn.networks import EvaluatedActions
from gpusim_rl.learn.on_policy import SOFT_BOUND, OnPolicy
from gpusim_rl.settings.schema import PPOConfig


def clipped_loss(advantage: Tensor, ratio: Tensor, clip: float) -> Tensor:
    """Returns the loss of the policy, max(-A r, -A clip(r, 1 - c, 1 + c)), of each sample.

    Args:
        advantage: Advantage A of the action.
        ratio: Ratio r of the probabilities of the action now and when it was chosen.
        clip: Largest distance c of the clipped ratio from 1.
    """
    # loss = max(-advantage * ratio, -advantage * ratio.clamp(1 - clip, 1 + clip))
    # The same with fewer kernels backward: max(-A r, -A - |A| c). The second term is -A (1 + c) for A > 0 and
    # -A (1 - c) for A < 0: the clipped term where that is the larger one, and below -A r everywhere else.
    cost = -advantage
    return (cost * ratio).clamp(min=torch.add(cost, cost.abs(), alpha=-clip))


class AdaptiveRate:
    """Moves a learning rate within [low, high] so that the policy's KL divergence [nat] stays near the threshold.

    rl_games' rule: a KL above twice the threshold divides the rate by 1.5, one below half of it multiplies by 1.5. A KL
    of exactly 0 (no sample of the minibatch was valid), or one that is NaN, changes nothing.
    """

    def __init__(self, threshold: float, low: float, high: float, device: torch.device) -> None:
        self._limits = low, high
        # A table takes fewer operations than comparisons. Each interval includes its upper end; NaN is behind the last.
        half = torch.nextafter(torch.tensor(0.5 * threshold), torch.tensor(0.0)).item()
        self._ends = torch.tensor([0.0, half, 2.0 * threshold, torch.inf], device=device)
        self._factors = torch.tensor([1.0, 1.5, 1.0, 1.0 / 1.5, 1.0], device=device)

    def adapt(self, rate: Tensor, kl: Tensor) -> None:
        """Changes the rate in place."""
        rate.mul_(self._factors.take(torch.bucketize(kl, self._ends))).clamp_(*self._limits)


class PPO(OnPolicy):
    """Proximal policy optimisation: `epochs` passes over a rollout in minibatches, the policy kept near the old one.

    In the first minibatch the ratio is 1 and the KL 0.
    """

    Config = PPOConfig
    losses = (*OnPolicy.losses, "policy/kl", "policy/clip_fraction")

    cfg: PPOConfig

    def __init__(self, cfg: PPOConfig, env: EnvSpec, *, device: torch.device, seed: int, max_iterations: int) -> None:
        super().__init__(cfg, env, device=device, seed=seed, max_iterations=max_iterations)
        rates = cfg.learning_rate_min, cfg.learning_rate_max
        self._adaptive_rate = AdaptiveRate(cfg.kl_threshold, *rates, device)

    def _learn(self, batch: Sequences) -> tuple[Tensor, Tensor, int]:
        cfg = self.cfg
        totals: Tensor | None = None
        skipped = torch.zeros_like(self.skipped)
        size = self.num_sequences // self.num_minibatches
        for epoch in range(cfg.epochs):
            order = torch.randperm(self.num_sequences, generator=self._shuffle_generator, device=self.device)
            counts = Samples.valid_of(batch.packed).index_select(1, order).unflatten(1, (-1, size)).sum(dim=(0, 2))
            [counts] = self.collective.sum([counts])
            kls = []
            for index, count in zip(order.split(size), counts.clamp_(min=1.0), strict=True):
                numbers, skip = self._gradient(batch, index, count)
                kl = numbers[self.losses.index("policy/kl")]
                # The first minibatch compares the policy with itself: a KL of rounding errors, which says nothing.
                if cfg.schedule_per == "minibatch" and totals is not None:
                    self._adapt(kl)
                self._step(numbers[-1], skip)
                totals = numbers if totals is None else totals.add_(numbers)
                skipped += skip
                kls.append(kl)
            if cfg.schedule_per == "epoch" and (epoch > 0 or self.num_minibatches > 1):
                self._adapt(torch.stack(kls).mean())
        assert totals is not None
        return totals, skipped, cfg.epochs * self.num_minibatches

    def _adapt(self, kl: Tensor) -> None:
        if self.cfg.schedule == "adaptive":
            self._adaptive_rate.adapt(self.learning_rate, kl)

    def _sample_losses(self, old: Samples, now: EvaluatedActions) -> dict[str, Tensor]:
        clip = self.cfg.clip
        ratio = torch.exp(now.log_prob - old.log_prob)
        value_loss = squared_distance(now.value, old.target)
        if self.cfg.value_clip:
            # value_loss = max((V - G)^2, (clip(V, V_old - c, V_old + c) - G)^2)
            # Where the clipped value is the worse one, it is constant: it bounds the error, and has no gradient.
            near = now.value.detach().clamp(old.value - clip, old.value + clip)
            value_loss = value_loss.clamp(min=squared_distance(near, old.target))

        with torch.no_grad():
            before: Any = self.policy.head.stored(old.distribution)  # of the kind of the one now
            kl = now.distribution.kl_from(before)
            clip_fraction = ((ratio - 1.0).abs() > clip).float()
        return {
            "loss/policy": clipped_loss(old.advantage, ratio, clip),
            "loss/value": value_loss,
            "loss/bounds": now.distribution.excess(SOFT_BOUND),
            "policy/entropy": now.entropy,
            "policy/kl": kl,
            "policy/clip_fraction": clip_fraction,
        }

    def _fit_minibatches(self, samples: int) -> int:
        return fit_minibatches(self.num_sequences, samples / self.cfg.minibatch_size)

    def _describe_steps(self) -> str:
        number = self.num_minibatches
        size = self._fitted("minibatch_size", self.rollout.num_envs * self.horizon // number)
        return f"{number} minibatch{'es' if number > 1 else ''} of {size}, {self.cfg.epochs} epochs"
