"""On-policy actor-critic algorithms: advantages, gradient steps, resume."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gpusim_rl.errors import ConfigError
from gpusim_rl.learn.algorithm import (
    DEFAULT_CONTEXT,
    PRECISIONS,
    Algorithm,
    EnvSpec,
    LearnerContext,
    Observation,
    Transition,
    choose_precision,
    make_generator,
    restore_generator,
)
from gpusim_rl.learn.distributions import squared_distance
from gpusim_rl.learn.exploration import Exploration
from gpusim_rl.learn.gradient_steps import GradientSteps
from gpusim_rl.learn.minibatch import Minibatch, Samples, Sequences
from gpusim_rl.learn.networks import ActorCritic, EvaluatedActions
from gpusim_rl.learn.normalize import moments
from gpusim_rl.learn.rollout import gae
from gpusim_rl.machine.compiled import Compiled

SOFT_BOUND = 1.1
"""Limit of action means; the bounds loss penalises larger magnitudes, as in rl_games: actions are clipped at 1."""


class OnPolicy(Algorithm):
    """Base class of algorithms that learn from a rollout of the newest policy, including BC and distillation.

    The loss is the mean over the valid samples of a batch (default: the whole rollout), with policy = -log pi(a|s) A:

        policy + 0.5 value_coef * value + bounds_coef * bounds - entropy_coef * entropy

    Observation statistics are updated after the optimiser steps, so that the learning policy is the one that acted.
    Statistics of returns are updated before these steps, so that critic targets always have unit scale. Sums over
    samples cover all data-parallel processes. A step with a non-finite gradient is skipped and counted.

    Attributes:
        exploration: Action sampling and rollout recording.
        rollout: Rollout of the current iteration.
        steps: Optimiser steps.
        losses: Names of the statistics that `chunk_loss` returns, in order.
        num_sequences: Sequences per rollout; single samples if feed-forward.
        num_minibatches: Minibatches per epoch.
    """

    cfg: Any
    clip: float = 0.0
    """Clip range of ratio and value in subclasses."""
    policy: ActorCritic

    def __init__(
        self,
        cfg: Any,
        env: EnvSpec,
        context: LearnerContext = DEFAULT_CONTEXT,
        *,
        device: torch.device,
        seed: int,
        max_iterations: int,
    ) -> None:
        self.cfg, self.device, self.horizon, self._section = cfg, device, cfg.horizon, context.section
        self.collective, self.max_iterations = context.collective, max_iterations
        self.policy = self.make_policy(cfg, env, context, device)  # type: ignore[reportIncompatibleVariableOverride]
        self.policy.reduced = PRECISIONS[choose_precision(cfg.precision, device)[0]]
        self.exploration = Exploration(self.policy, env, cfg, context.section, device, seed + 1)
        self.rollout = self.exploration.rollout
        self._shuffle_generator = make_generator(device, seed + 2)
        samples, length = cfg.horizon * env.num_envs, self.rollout.sequence_length
        self.num_sequences = samples // length
        self.num_minibatches = self.fit_minibatches(samples)
        self.steps = GradientSteps(self.policy, context, cfg, samples // self.num_minibatches, length, device)
        self.weigh(self.loss_weights())
        name = f"the {type(self).__name__} loss"
        self._loss = Compiled(self.chunk_loss, name, one_shape=False, now=context.compile)

    @classmethod
    def make_policy(cls, cfg: Any, env: EnvSpec, context: LearnerContext, device: torch.device) -> ActorCritic:
        """Build the networks."""
        return ActorCritic(cfg, env, context.section).to(device)

    def loss_weights(self) -> dict[str, float]:
        """Return the weight of each statistic in the loss; 0 for logging only."""
        cfg = self.cfg
        weights = {"loss/policy": 1.0, "loss/value": 0.5 * cfg.value_coef}
        return {**weights, "loss/bounds": cfg.bounds_coef, "policy/entropy": -cfg.entropy_coef}

    def weigh(self, weights: Mapping[str, float]) -> None:
        """Set the names and loss weights of the statistics that `chunk_loss` returns."""
        self.losses = tuple(weights)
        self._coefficients = torch.tensor([*weights.values()], device=self.device)
        self._logged = {name for name in self.losses[2:] if not weights[name]}  # no gradient

    def fit_minibatches(self, samples: int) -> int:
        """Return the number of minibatches for a rollout of this many samples."""
        return 1

    def begin_rollout(self) -> None:
        """Draw the noise of all steps."""
        self.exploration.begin_rollout()

    def act(self, obs: Observation) -> Tensor:
        """Sample actions, [num_envs, actions]."""
        return self.exploration.act(obs)

    def record(self, action: Tensor, step: Transition) -> None:
        """Write the step into the rollout."""
        self.exploration.record(step)

    def update(self) -> dict[str, Tensor]:
        """Learn from the rollout in one optimiser step; return metrics."""
        self.steps.anneal(self.max_iterations)
        batch, stats = self.prepare(self.rollout.reward * self.cfg.reward_scale, self.policy.inputs(self.rollout.obs))
        weight = Samples.weight_of(batch.packed)
        [count] = self.collective.sum([weight.sum()])
        weight.div_(count.clamp_(min=1.0))
        return stats | self.end_update([self.step(batch, torch.arange(self.num_sequences, device=self.device))])

    @torch.no_grad()
    def prepare(self, reward: Tensor, inputs: Mapping[str, Tensor]) -> tuple[Sequences, dict[str, Tensor]]:
        """Compute advantages and targets from rewards and loss inputs, [T, N, ...]; return sequences and metrics."""
        policy, cfg, rollout = self.policy, self.cfg, self.rollout
        counts, valid = rollout.valid, rollout.valid.float()
        value, next_value = (policy.denormalize_value(x) for x in (rollout.value, self._next_value()))
        advantage, returns = self.advantages(reward, value, next_value, rollout.terminated, rollout.done, counts)
        policy.update_value_norm(returns.flatten(), counts.flatten(), self.collective)
        (mean, mean_return), (variance, return_variance) = moments(
            torch.stack([advantage, returns]), valid, self.collective
        )
        observed = *rollout.obs.values(), *rollout.later_obs.values()
        stats = {
            "value/explained_variance": 1.0 - variance / return_variance.clamp(min=1e-12),
            "value/mean_return": mean_return,
            # one reduction, no host read
            "check/obs": torch.stack([x.sum() for x in observed if x.is_floating_point()]).sum(),
            "check/reward": rollout.reward.sum(),
        }
        if cfg.normalize_advantage:
            advantage = (advantage - mean) / (variance.sqrt() + 1e-8)
        samples = Samples.of(
            rollout.action,
            rollout.distribution,
            policy.head.stored(rollout.distribution).log_prob(rollout.action),
            advantage=advantage,
            value=policy.normalize_value(value),
            target=policy.normalize_value(returns),
            valid=valid,
            clip=self.clip,
        )
        return Sequences.of(rollout, inputs, samples.pack()), stats

    def _next_value(self) -> Tensor:
        rollout = self.rollout
        later_obs = {group: x.flatten(0, 1) for group, x in rollout.later_obs.items()}  # one batch
        hidden = tuple(state.transpose(0, 1).flatten(1, 2) for state in rollout.later_hidden)
        last_value, *final_values = self.policy.value(later_obs, hidden).unflatten(0, (-1, rollout.num_envs))
        return rollout.next_values(last_value, torch.stack(final_values))

    def advantages(self, *rollout: Tensor) -> tuple[Tensor, Tensor]:
        """Return advantages and critic targets, [T, N]; takes the tensor arguments of `gae`."""
        return gae(*rollout, gamma=self.cfg.gamma, gae_lambda=self.cfg.gae_lambda)

    def step(self, batch: Sequences, index: Tensor) -> tuple[Tensor, Tensor]:
        """Take an optimiser step on a minibatch; return its `losses` and gradient norm."""
        losses, norm = self.steps.gradient(self._loss, batch, index, self._coefficients)
        self.steps.make(norm)
        return losses, norm

    def end_update(self, steps: list[tuple[Tensor, Tensor]], *, observed: bool = True) -> dict[str, Tensor]:
        """End the iteration; return metrics of `steps` (losses, gradient norm). `observed`: update obs statistics."""
        means, stats = self.steps.summarize(steps)
        for group, norm in self.policy.obs_norm.items() if observed else ():
            frames = self.rollout.obs[group].flatten(0, 1), self.rollout.valid.flatten()
            norm.update(*frames, self.collective)  # type: ignore[operator]
        stats = dict(zip((*self.losses, "policy/grad_norm"), means.unbind(), strict=True)) | stats
        return stats | self.policy.head.stored(self.rollout.distribution).stats()

    def chunk_loss(self, inputs: dict[str, Tensor], packed: Tensor, hidden: Any, is_first: Tensor | None) -> Tensor:
        """Return the `losses` of a chunk, each a weighted sum over samples."""
        old = Samples.unpack(packed, self.rollout.action.shape[-1], self.policy.head.num_parameters)
        terms = self.evaluate(Minibatch(old, inputs, hidden, is_first))[0]
        if not torch.compiler.is_compiling():
            _check(terms, self.losses, old.weight.shape, self._section)
        rows = [terms[name].detach() if name in self._logged else terms[name] for name in self.losses]
        return (torch.stack(rows) * old.weight).flatten(1).sum(dim=1)

    def evaluate(self, minibatch: Minibatch) -> tuple[dict[str, Tensor], EvaluatedActions]:
        """Return the `losses` of each sample by name, and its action as evaluated by the current policy."""
        old = minibatch.old
        now = self.policy.evaluate(minibatch.inputs, old.action, minibatch.hidden, minibatch.is_first)
        return self.sample_losses(old, now), now

    def sample_losses(self, old: Samples, now: EvaluatedActions) -> dict[str, Tensor]:
        """Return the `losses` of each sample by name."""
        return {
            "loss/policy": old.cost * now.log_prob,
            "loss/value": squared_distance(now.value, old.target),
            "loss/bounds": now.distribution.excess(SOFT_BOUND),
            "policy/entropy": now.entropy,
        }

    def describe(self) -> dict[str, str]:
        """Return the banner lines for network and batch."""
        return self.exploration.describe(self.cfg.network, self._describe_steps())

    def _describe_steps(self) -> str:
        return "one step"

    def state_dict(self) -> dict[str, Any]:
        """Return optimiser, counters, random generators and episode state."""
        state = self.steps.state_dict() | self.exploration.state_dict()
        return state | {"shuffle_generator": self._shuffle_generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`; a changed `learning_rate` or `schedule` restarts the schedule."""
        self.steps.load_state_dict(state)
        self.exploration.load_state_dict(state)
        restore_generator(self._shuffle_generator, state["shuffle_generator"])


def _check(terms: Mapping[str, Tensor], losses: Sequence[str], shape: torch.Size, section: str) -> None:
    for name in sorted(terms.keys() ^ {*losses}):
        problem = f"{name!r} is {'a loss without a weight' if name in terms else 'a weight without a loss'}"
        raise ConfigError(problem, key=f"algo={section}", hint="Weights and losses need the same names")
    for name, term in terms.items():
        if term.shape != shape:
            raise ConfigError(key=f"loss {name!r}", expected=f"shape [time, batch] = {[*shape]}", got=[*term.shape])
