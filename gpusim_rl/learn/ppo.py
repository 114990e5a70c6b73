"""Proximal policy optimisation (Schulman et al. 2017, arXiv 1707.06347) without a host sync."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from gpusim_rl.learn.algorithm import EnvSpec
from gpusim_rl.learn.distributions import squared_distance
from gpusim_rl.learn.minibatch import Samples, Sequences, fit_minibatches
from gpusim_rl.learn.networks import EvaluatedActions
from gpusim_rl.learn.on_policy import SOFT_BOUND, OnPolicy
from gpusim_rl.learn.rnd import RandomDistillation
from gpusim_rl.learn.symmetry import SYMMETRY_LOSS, Symmetry
from gpusim_rl.learn.teacher import GROUP, IMITATION, LABEL, Teacher
from gpusim_rl.settings.schema import PPOConfig


def clipped_loss(old: Samples, ratio: Tensor) -> Tensor:
    """Returns the loss of the policy, max(-A r, -A clip(r, 1 - c, 1 + c)), of each sample.

    Args:
        old: Samples; they know their advantage A and the largest distance c of the clipped ratio from 1.
        ratio: Ratio r of the probabilities of the action now and when it was chosen.
    """
    # With fewer kernels: max(-A r, -A - |A| c). The second term is -A (1 + c) for A > 0 and -A (1 - c) for A < 0: the
    # clipped term where that is the larger one, and below -A r everywhere else.
    return _at_least(old.cost * ratio, old.least_cost)


def _at_least(x: Tensor, low: Tensor) -> Tensor:
    """Returns max(x, low); the gradient goes to x where that is larger. It takes one kernel, that of clamp three."""
    larger = torch.ge(x.detach(), low, out=torch.empty_like(low))
    return torch.lerp(low, x, larger)


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
        self._symmetry = Symmetry.of(cfg, env, device)
        if self._symmetry is not None:
            self.losses = (*self.losses, SYMMETRY_LOSS)
        if env.role != "acts" and cfg.imitation.weight:
            self.teacher = Teacher(env, f"{env.section}.imitation.teacher", cfg.imitation.teacher, cfg.horizon, device)
            self.losses = (*self.losses, IMITATION)
            sizes = {group: size for group, size in env.obs_sizes.items() if group != GROUP}
            env = dataclasses.replace(env, obs_sizes=sizes)
        super().__init__(cfg, env, device=device, seed=seed, max_iterations=max_iterations)
        self._rnd: RandomDistillation | None = None
        if env.role != "acts" and (cfg.rnd.weight or cfg.rnd.final_weight):
            self._rnd = RandomDistillation(cfg, env, self.policy.critic_group, device)
        self._adaptive_rate = AdaptiveRate(cfg.kl_threshold, cfg.learning_rate_min, cfg.learning_rate_max, device)
        self._clip, self._kl = cfg.clip, self.losses.index("policy/kl")

    def loss_weights(self) -> dict[str, float]:
        cfg = self.cfg
        return {**super().loss_weights(), SYMMETRY_LOSS: cfg.symmetry.mirror_loss, IMITATION: cfg.imitation.weight}

    def update(self) -> dict[str, Tensor]:
        """Learns from the rollout; returns numbers for the log."""
        cfg = self.cfg.imitation
        if self.teacher is not None and cfg.end > 0:
            steps = self.iteration * self.horizon
            left = ((cfg.end - steps) / max(1, cfg.end - cfg.begin)).clamp(0.0, 1.0)
            self._coefficients[self.losses.index(IMITATION)].copy_(cfg.weight * left)
        stats = super().update()
        return stats if self._rnd is None else stats | self._rnd.end_update(self.rollout)

    def learned_reward(self) -> Tensor:
        reward = self._task_reward()
        return reward if self._rnd is None else reward + self._rnd.reward(self.rollout) * self.cfg.reward_scale

    def _task_reward(self) -> Tensor:
        return super().learned_reward()

    def _inputs(self) -> dict[str, Tensor]:
        inputs = super()._inputs()
        if self.teacher is not None:
            inputs |= {LABEL: self.teacher.actions}
        return inputs if self._symmetry is None else inputs | self._symmetry.images(self.policy, self.rollout.obs)

    def _learn(self, batch: Sequences) -> list[tuple[Tensor, Tensor]]:
        cfg, steps = self.cfg, []
        weight = Samples.weight_of(batch.packed)
        valid = weight.clone()
        for epoch in range(cfg.epochs):
            for index in self._shuffle(weight, valid):
                losses, norm, skip = self._gradient(batch, index)
                # The first minibatch compares the policy with itself: a KL of rounding errors, which says nothing.
                if cfg.schedule_per == "minibatch" and steps:
                    self._adapt(torch.add(losses[self._kl], norm, alpha=0.0))  # NaN where the step is left out
                self._step(norm, skip)
                if self._rnd is not None:
                    self._rnd.learn(index, weight.index_select(1, index))
                steps.append((losses, norm))
            if cfg.schedule_per == "epoch" and (epoch > 0 or self.num_minibatches > 1):
                self._adapt(self._numbers(steps[-self.num_minibatches :])[0][:, self._kl].mean())
        return steps

    def _adapt(self, kl: Tensor) -> None:
        if self.cfg.schedule == "adaptive":
            self._adaptive_rate.adapt(self.learning_rate, kl)

    def _evaluate(self, old: Samples, inputs: dict[str, Tensor], *state: Any) -> dict[str, Tensor]:
        if self._symmetry is None:
            now = self.policy.evaluate(inputs, old.action, *state)
            losses = self.sample_losses(old, now)
        else:
            both = self._symmetry.with_images(old, inputs)
            now = self.policy.evaluate(both.inputs, both.old.action)
            losses = self._symmetry.fold(self.sample_losses(both.old, now), now)
        if self.teacher is not None:
            mean = now.distribution.mode if self._symmetry is None else now.distribution.mode[:1]
            losses[IMITATION] = squared_distance(mean, inputs[LABEL]).mean(dim=-1)
        return losses

    def sample_losses(self, old: Samples, now: EvaluatedActions) -> dict[str, Tensor]:
        clip = self.cfg.clip
        ratio = torch.exp(now.log_prob - old.log_prob)
        value_loss = squared_distance(now.value, old.target)
        if self.cfg.value_clip:
            # value_loss = max((V - G)^2, (clip(V, V_old - c, V_old + c) - G)^2)
            # Where the clipped value is the worse one, it is constant: it bounds the error, and has no gradient.
            near = now.value.detach().clamp(old.value_low, old.value_high)
            value_loss = _at_least(value_loss, squared_distance(near, old.target))

        with torch.no_grad():
            before: Any = self.policy.head.stored(old.distribution)  # of the kind of the one now
            kl = now.distribution.kl_from(before)
            clip_fraction = torch.ne(ratio, ratio.clamp(1.0 - clip, 1.0 + clip), out=torch.empty_like(ratio))
        return {
            "loss/policy": clipped_loss(old, ratio),
            "loss/value": value_loss,
            "loss/bounds": now.distribution.excess(SOFT_BOUND),
            "policy/entropy": now.entropy,
            "policy/kl": kl,
            "policy/clip_fraction": clip_fraction,
        }

    def _fit_minibatches(self, samples: int) -> int:
        return fit_minibatches(self.num_sequences, samples / self.cfg.minibatch_size)

    def describe(self) -> dict[str, str]:
        """Returns network, batch and what is added to the loss."""
        added = [it.describe() for it in (self._symmetry, self._rnd) if it is not None]
        if self.teacher is not None:
            cfg = self.cfg.imitation
            course = f", 0 from step {cfg.end} on" if cfg.end else ""
            added.append({"teacher": f"{cfg.teacher}, observes {self.teacher.group}, weight {cfg.weight:g}{course}"})
        return {**super().describe(), **{label: text for lines in added for label, text in lines.items()}}

    def state_dict(self) -> dict[str, Any]:
        """Returns what all on-policy algorithms have, and what tells new states."""
        return super().state_dict() | ({} if self._rnd is None else {"rnd": self._rnd.state_dict()})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict`; with the state of a run without it, all states are new."""
        super().load_state_dict(state)
        if self._rnd is not None and "rnd" in state:
            self._rnd.load_state_dict(state["rnd"])

    def _describe_steps(self) -> str:
        number = self.num_minibatches
        size = self._fitted("minibatch_size", self.rollout.num_envs * self.horizon // number)
        return f"{number} minibatch{'es' if number > 1 else ''} of {size}, {self.cfg.epochs} epochs"
