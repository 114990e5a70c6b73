"""Proximal policy optimisation (Schulman et al. 2017, arXiv 1707.06347) without host syncs."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpusim_rl.errors import ConfigError
from gpusim_rl.learn.algorithm import DEFAULT_CONTEXT, EnvSpec, LearnerContext, Transition
from gpusim_rl.learn.distributions import squared_distance
from gpusim_rl.learn.exploration import fitted
from gpusim_rl.learn.extensions import Evaluate, Evaluated, Extension, extension_class, make_extension
from gpusim_rl.learn.gradient_steps import applied_steps
from gpusim_rl.learn.minibatch import Minibatch, Samples, fit_minibatches, shuffle
from gpusim_rl.learn.networks import EvaluatedActions
from gpusim_rl.learn.on_policy import SOFT_BOUND, OnPolicy
from gpusim_rl.learn.rnd import RandomDistillation
from gpusim_rl.learn.style import Style
from gpusim_rl.learn.symmetry import Symmetry
from gpusim_rl.learn.teacher import Teacher
from gpusim_rl.settings.schema import AMPConfig, PPOConfig

EXTENSIONS: dict[str, type[Extension]] = {
    "style": Style,
    "rnd": RandomDistillation,
    "symmetry": Symmetry,
    "teacher": Teacher,
}
"""Built-in extensions, in the order in which they process rewards and losses."""


def clipped_loss(old: Samples, ratio: Tensor) -> Tensor:
    """Return the policy loss max(-A r, -A clip(r, 1 - c, 1 + c)) of each sample, for the probability ratio r."""
    # Fewer kernels: max(-A r, -A - |A| c). The second term is the clipped loss where that is larger, else below -A r.
    return _at_least(old.cost * ratio, old.least_cost)


def _at_least(x: Tensor, low: Tensor) -> Tensor:
    """Return max(x, low) with the gradient of x where x > low; one kernel instead of clamp's three."""
    larger = torch.ge(x.detach(), low, out=torch.empty_like(low))
    return torch.lerp(low, x, larger)


class AdaptiveRate:
    """Adaptation of a learning rate within [low, high] to the policy's KL divergence [nat], by rl_games' rule.

    The rate is divided by 1.5 if the KL exceeds twice the threshold, and multiplied by 1.5 if it is below half of the
    threshold; a KL of 0 (no valid sample) or NaN leaves the rate unchanged.
    """

    def __init__(self, threshold: float, low: float, high: float, device: torch.device) -> None:
        self._limits = low, high
        # A lookup needs fewer operations than comparisons. Intervals include their upper end; NaN comes last.
        half = torch.nextafter(torch.tensor(0.5 * threshold), torch.tensor(0.0)).item()
        self._ends = torch.tensor([0.0, half, 2.0 * threshold, torch.inf], device=device)
        self._factors = torch.tensor([1.0, 1.5, 1.0, 1.0 / 1.5, 1.0], device=device)

    def adapt(self, rate: Tensor, kl: Tensor) -> None:
        """Adapt the rate in place."""
        rate.mul_(self._factors.take(torch.bucketize(kl, self._ends))).clamp_(*self._limits)


class PPO(OnPolicy):
    """PPO: `epochs` passes over a rollout in minibatches; AMP is PPO with the `style` extension."""

    Config = PPOConfig

    cfg: PPOConfig

    def __init__(self, cfg: PPOConfig, env: EnvSpec, context: LearnerContext = DEFAULT_CONTEXT, **rest: Any) -> None:
        device, key, custom = rest["device"], f"{context.section}.extensions", cfg.extensions
        if clashes := custom.keys() & EXTENSIONS.keys():
            raise ConfigError("reserved for a built-in extension", key=f"{key}.{min(clashes)}", hint="Try another name")
        classes = EXTENSIONS | {name: extension_class(f"{key}.{name}", settings) for name, settings in custom.items()}
        used = {"style": isinstance(cfg, AMPConfig), "teacher": cfg.teacher.weight > 0.0}
        hidden = {group for name, cls in classes.items() if used.get(name, True) for group in cls.groups}

        def seen(*groups: str) -> EnvSpec:  # omits groups that only extensions see, except `groups`
            sizes = {name: size for name, size in env.obs_sizes.items() if name in groups or name not in hidden}
            return dataclasses.replace(env, obs_sizes=sizes)

        # The order of weight initialisations affects fixed-seed runs: the teacher is built before the policy.
        teacher = Teacher(cfg, seen(*Teacher.groups), context, device) if used["teacher"] else None
        super().__init__(cfg, seen(), context, **rest)
        self.clip = cfg.clip
        self._adaptive_rate = AdaptiveRate(cfg.kl_threshold, cfg.learning_rate_min, cfg.learning_rate_max, device)
        rnd, symmetry = cfg.rnd, cfg.symmetry
        made: dict[str, Any] = {
            "rnd": RandomDistillation(cfg, seen(), context, device) if rnd.weight or rnd.final_weight else None,
            "style": Style(cfg, env, context, device, rest["seed"]) if isinstance(cfg, AMPConfig) else None,
            "symmetry": Symmetry.of(cfg, env, context, device) if symmetry.augment or symmetry.mirror_loss else None,
            "teacher": teacher,
        }
        self.extensions: dict[str, Extension] = {name: made[name] for name in EXTENSIONS if made[name] is not None}
        for name, settings in custom.items():
            self.extensions[name] = make_extension(f"{key}.{name}", settings, seen(*classes[name].groups), device)
        added = {name: w for extension in self.extensions.values() for name, w in extension.weights.items()}
        self.weigh(self.loss_weights() | {name: 1.0 if isinstance(w, Tensor) else w for name, w in added.items()})
        self._moving = {self.losses.index(name): w for name, w in added.items() if isinstance(w, Tensor)}
        self._evaluators = [e for e in self.extensions.values() if type(e).losses is not Extension.losses]

    def loss_weights(self) -> dict[str, float]:
        return {**super().loss_weights(), "policy/kl": 0.0, "policy/clip_fraction": 0.0}

    def fit_minibatches(self, samples: int) -> int:
        return fit_minibatches(self.num_sequences, samples / self.cfg.minibatch_size)

    def record(self, action: Tensor, step: Transition) -> None:
        for extension in self.extensions.values():
            extension.record(self.exploration.step, self.exploration.acted_on, step)
        super().record(action, step)

    def update(self) -> dict[str, Tensor]:
        cfg, rollout, extensions = self.cfg, self.rollout, self.extensions.values()
        kl = self.losses.index("policy/kl")
        self.steps.anneal(self.max_iterations)
        with torch.no_grad():
            reward, inputs = rollout.reward * cfg.reward_scale, self.policy.inputs(rollout.obs)
            for extension in extensions:
                reward = extension.begin_update(rollout, reward, inputs, self.policy)
        for i, coefficient in self._moving.items():
            self._coefficients[i].copy_(coefficient)

        batch, stats = self.prepare(reward, inputs)  # advantages and targets
        weight = Samples.weight_of(batch.packed)  # share of each sample in its minibatch mean
        valid, steps, metrics = weight.clone(), [], []
        for epoch in range(cfg.epochs):
            for index in shuffle(weight, valid, self.num_minibatches, self._shuffle_generator, self.collective):
                losses, norm = self.steps.gradient(self._loss, batch, index, self._coefficients)  # sample_losses
                if cfg.schedule_per == "minibatch" and steps:  # the first KL compares the policy with itself
                    self._adapt(torch.add(losses[kl], norm, alpha=0.0))  # NaN if the step was skipped
                self.steps.make(norm)
                steps.append((losses, norm))
                last = len(steps) == cfg.epochs * self.num_minibatches
                trained = [extension.after_minibatch(index, weight, last) for extension in extensions]
                metrics.append({name: value for row in trained for name, value in row.items()})
            if cfg.schedule_per == "epoch" and (epoch > 0 or self.num_minibatches > 1):
                self._adapt(applied_steps(steps[-self.num_minibatches :])[0][:, kl].mean())
        return stats | self.end_update(steps) | _means(metrics)

    def sample_losses(self, old: Samples, now: EvaluatedActions) -> dict[str, Tensor]:
        clip = self.cfg.clip
        ratio = torch.exp(now.log_prob - old.log_prob)
        value_loss = squared_distance(now.value, old.target)
        if self.cfg.value_clip:
            # value_loss = max((V - G)^2, (clip(V, V_old - c, V_old + c) - G)^2), no gradient where clipped
            near = now.value.detach().clamp(old.value_low, old.value_high)
            value_loss = _at_least(value_loss, squared_distance(near, old.target))
        with torch.no_grad():
            before: Any = self.policy.head.stored(old.distribution)
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

    def evaluate(self, minibatch: Minibatch) -> Evaluated:
        evaluate: Evaluate = super().evaluate
        for extension in self._evaluators:
            evaluate = partial(extension.losses, evaluate)
        return evaluate(minibatch)

    def _adapt(self, kl: Tensor) -> None:
        if self.cfg.schedule == "adaptive":
            self._adaptive_rate.adapt(self.steps.learning_rate, kl)

    def describe(self) -> dict[str, str]:
        added = [extension.describe() for extension in self.extensions.values()]
        return {**super().describe(), **{label: text for lines in added for label, text in lines.items()}}

    def _describe_steps(self) -> str:
        number, wanted = self.num_minibatches, self.cfg.minibatch_size
        size = fitted(self.rollout.num_envs * self.horizon // number, wanted, f"{self._section}.minibatch_size")
        return f"{number} minibatch{'es' if number > 1 else ''} of {size}, {self.cfg.epochs} epochs"

    def state_dict(self) -> dict[str, Any]:
        states = {name: extension.state_dict() for name, extension in self.extensions.items()}
        return super().state_dict() | ({"extensions": states} if states else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`; an extension new to the run starts from scratch."""
        super().load_state_dict(state)
        episodes = state["episodes"]
        # Older runs store states elsewhere. A teacher's schedule also counts the steps before it was added.
        teacher = {"steps": state["iteration"] * self.horizon, "episodes": (episodes or {}).get("teacher")}
        older = {name: state[name] for name in ("style", "rnd") if name in state}
        saved = {"teacher": teacher, **older, **state.get("extensions", {})}
        for name in saved.keys() & self.extensions.keys():
            forget = {"episodes": None} if episodes is None and "episodes" in saved[name] else {}
            self.extensions[name].load_state_dict({**saved[name], **forget})


def _means(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Average the metrics that all minibatches report; take the others from the last minibatch."""
    names = [*rows[0]]
    means = torch.stack([torch.stack([row[name] for name in names]) for row in rows]).mean(dim=0) if names else ()
    return {**rows[-1], **dict(zip(names, means, strict=True))}
