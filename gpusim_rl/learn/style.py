"""Adversarial motion priors: a discriminator rewards reference-like motion (Peng et al. 2021, arXiv 2104.02180).

The task provides two more observation groups: `style`, features of the agent's recent motion, and `reference`, features
of a reference motion at random times.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from gpusim_rl.errors import ConfigError
from gpusim_rl.learn.algorithm import (
    EnvSpec,
    LearnerContext,
    Observation,
    RecordedTensor,
    Transition,
    make_generator,
    restore_generator,
)
from gpusim_rl.learn.extensions import Extension
from gpusim_rl.learn.networks import MLP, ActorCritic
from gpusim_rl.learn.normalize import DifferenceNormalizer, RunningNormalizer
from gpusim_rl.learn.optimizer import MaskedAdamW
from gpusim_rl.learn.rollout import Rollout
from gpusim_rl.machine.compiled import Compiled
from gpusim_rl.settings.schema import AMPConfig, DiscriminatorConfig

STYLE, REFERENCE = "style", "reference"
"""Feature groups of agent and reference."""
LEAST_DOUBT = 1e-4  # lower bound of 1 - sigmoid(D) in the logistic reward
SLOPES = {
    "relu": lambda h: (h > 0.0).float(),
    "elu": lambda h: h.clamp(max=0.0) + 1.0,
    "tanh": lambda h: 1.0 - h.square(),
}
"""Derivatives of the activations as functions of their outputs h."""


class Discriminator(nn.Module):
    """Network that scores features, clipped to `clip` standard deviations; reference-like motion scores high.

    With `difference`, features are differences from the reference, and normalisation keeps zeros.
    """

    def __init__(self, size: int, cfg: DiscriminatorConfig, clip: float, difference: bool = False) -> None:
        super().__init__()
        self.seen = (DifferenceNormalizer if difference else RunningNormalizer)(size, clip=clip)
        self.layers = MLP(size, cfg)
        self.out = nn.Linear(self.layers.out_size, 1)
        self._slope, self._logistic = SLOPES[cfg.activation], cfg.loss == "logistic"
        self.weights = [layer.weight for layer in (*self.layers, self.out) if isinstance(layer, nn.Linear)]

    def forward(self, x: Float[Tensor, "*batch size"]) -> Float[Tensor, "*batch"]:
        """Return scores D of normalised features."""
        return self.out(self.layers(x))[..., 0]

    def reward(self, score: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        """Return -log(max(1 - sigmoid(D), 1e-4)), or max(0, 1 - (D - 1)^2 / 4) for least squares (equation 7)."""
        if self._logistic:
            return functional.softplus(score).clamp(max=-math.log(LEAST_DOUBT))
        return (1.0 - 0.25 * (score - 1.0).square()).clamp(min=0.0)

    def error(self, score: Float[Tensor, " batch"], target: float) -> Float[Tensor, " batch"]:
        """Return the loss of scores for target 1 or -1."""
        return functional.softplus(-target * score) if self._logistic else (score - target).square()

    def with_gradient(
        self, x: Float[Tensor, "batch size"], since: int
    ) -> tuple[Float[Tensor, " batch"], Float[Tensor, "rest size"]]:
        """Return the scores of all rows, and the gradients of rows from `since` on with respect to their features.

        The chain rule is written out, so no kernel needs a second derivative, and torch.compile works.
        """
        values = []
        for layer in self.layers:
            x = layer(x)
            if not isinstance(layer, nn.Linear):
                values.append(x)
        gradient = self.out.weight
        for weight, value in zip(reversed(self.weights[:-1]), reversed(values), strict=True):
            gradient = (gradient * self._slope(value[since:])) @ weight
        return self.out(x)[:, 0], gradient


class FeatureReplay(nn.Module):
    """Ring buffer of features from earlier rollouts."""

    rows: Tensor
    valid: Tensor  # False for rows of diverged envs
    filled: Tensor  # number of rows written, at most the capacity, int64 []
    _place: Tensor

    def __init__(self, capacity: int, size: int) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(capacity, size))
        self.register_buffer("valid", torch.zeros(capacity, dtype=torch.bool))
        self.register_buffer("filled", torch.zeros((), dtype=torch.int64))
        self.register_buffer("_place", torch.zeros((), dtype=torch.int64))

    def store(self, rows: Float[Tensor, "new size"], valid: Bool[Tensor, " new"]) -> None:
        """Write at most `capacity` rows."""
        number, capacity = len(rows), len(self.rows)
        places = (self._place + torch.arange(number, device=rows.device)).remainder_(capacity)
        self.rows.index_copy_(0, places, rows)
        self.valid.index_copy_(0, places, valid)
        self._place.add_(number).remainder_(capacity)
        self.filled.add_(number).clamp_(max=capacity)

    def draw(self, unit: Float[Tensor, " batch"]) -> tuple[Float[Tensor, "batch size"], Bool[Tensor, " batch"]]:
        """Return the rows that uniform numbers in [0, 1) select, and a mask of valid rows."""
        places = torch.minimum((unit * self.filled).long(), self.filled - 1)
        return self.rows.index_select(0, places), self.valid.index_select(0, places)

    def contents(self) -> dict[str, Tensor]:
        """Return a copy of the state without unwritten rows."""
        number = int(self.filled)
        state = {"rows": self.rows[:number], "valid": self.valid[:number], "filled": self.filled, "_place": self._place}
        return {name: x.clone() for name, x in state.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore `contents` in place."""
        for name, x in self.named_buffers():
            (x[: len(state[name])] if x.ndim else x).copy_(state[name])


class Style(Extension):
    """Style reward from a discriminator trained alongside the policy.

        reward = task_weight * task reward + style_weight * reward(D(style))

    After each PPO minibatch, the discriminator takes a step; half of the agent's features come from this rollout, half
    from a replay buffer. The loss is

        (E[error(D(agent), -1)] + E[error(D(reference), 1)]) / 2 + gradient_penalty * E[|dD/dx|^2]
            + logit_decay * |last weights|^2 + weight_decay * |weights|^2

    With `difference`, features are differences from a synchronous reference, divided by their mean absolute value; the
    reference is zeros, and the gradient penalty applies to the agent (ADD, Zhang et al. 2025, arXiv 2505.04961).

    Raises:
        ConfigError: The task lacks the `style` or `reference` observation group.
    """

    groups = (STYLE, REFERENCE)

    def __init__(self, cfg: AMPConfig, env: EnvSpec, context: LearnerContext, device: torch.device, seed: int) -> None:
        groups = (STYLE,) if cfg.difference else (STYLE, REFERENCE)
        _check_groups(env.obs_sizes, groups, context.section)
        self.cfg, self.device, self.collective = cfg, device, context.collective
        size, samples = env.obs_sizes[STYLE], cfg.horizon * env.num_envs
        with device:
            self.features = {name: torch.zeros(cfg.horizon, env.num_envs, size) for name in groups}
            self.discriminator = Discriminator(size, cfg.discriminator, cfg.clip_obs, cfg.difference)
            self.replay = FeatureReplay(cfg.discriminator.replay, size)
        if context.collective.size > 1:
            state = {name: x.cpu() for name, x in self.discriminator.state_dict().items()}
            self.discriminator.load_state_dict(context.collective.share(state))
        self._samples = samples
        self._kept = min(cfg.discriminator.replay, max(1, round(cfg.discriminator.replay_share * samples)))
        self._draws = make_generator(device, seed + 3)
        self.optimizer = MaskedAdamW([*self.discriminator.parameters()], cfg.discriminator.learning_rate)
        self._reward = torch.zeros((), device=device)  # mean style reward of the last rollout
        self._valid = torch.zeros(samples, dtype=torch.bool, device=device)
        self._loss = Compiled(self._discriminator_loss, "the discriminator loss", now=context.compile)

    def record(self, t: int, obs: Observation, step: Transition) -> None:
        """Store step t, with the agent's features before any reset."""
        for name, memory in self.features.items():
            memory[t].copy_((step.final_obs if name == STYLE else step.obs)[name])

    def recorded(self, steps: int) -> list[RecordedTensor]:
        """Return the features of the last control steps."""
        axes = "step", "env", "column"
        return [RecordedTensor("an observation", x[-steps:], axes, name) for name, x in self.features.items()]

    def begin_update(self, rollout: Rollout, reward: Tensor, inputs: dict[str, Tensor], policy: ActorCritic) -> Tensor:
        """Add features to the replay buffer; mix task and style rewards."""
        cfg, net, style = self.cfg, self.discriminator, self.features[STYLE]
        self._valid.copy_(rollout.valid.flatten())
        kept = self._random_rows(self._kept)
        self.replay.store(style.flatten(0, 1).index_select(0, kept), self._valid.index_select(0, kept))
        rewards = net.reward(net(net.seen(style)))
        valid = rollout.valid.float()
        number, total = self.collective.sum([valid.sum(), (rewards * valid).sum()])
        self._reward = total / number.clamp(min=1.0)
        return cfg.task_weight * reward + (cfg.style_weight * cfg.reward_scale) * rewards

    def after_minibatch(self, index: Tensor, weight: Tensor, last: bool) -> dict[str, Tensor]:
        """Train the discriminator; after the last minibatch, update the feature statistics."""
        names = "loss/discriminator", "amp/gradient_penalty", "amp/accuracy_agent", "amp/accuracy_reference"
        metrics: dict[str, Tensor] = dict(zip(names, self._learn().unbind(), strict=True))
        if not last:
            return metrics
        features = [memory.flatten(0, 1) for memory in self.features.values()]
        for memory in features:  # the reference of a diverged env is invalid too
            self.discriminator.seen.update(memory, self._valid, self.collective)
        finite = torch.stack([x.sum() for x in features]).sum()
        return {**metrics, "amp/style_reward": self._reward, "check/style": finite}

    def _random_rows(self, number: int) -> Tensor:
        return torch.randint(self._samples, (number,), generator=self._draws, device=self.device)

    def _learn(self) -> Tensor:
        """Take a discriminator step; return loss, penalty and accuracies."""
        net, number = self.discriminator, self.cfg.discriminator.batch_size
        new, reference_rows = self._random_rows(2 * number).split(number)
        unit = torch.rand(number, generator=self._draws, device=self.device)
        old, old_valid = self.replay.draw(unit)
        features = {name: memory.flatten(0, 1) for name, memory in self.features.items()}
        reference = torch.zeros_like(old)
        if REFERENCE in features:
            reference = features[REFERENCE].index_select(0, reference_rows)
        weight = torch.cat([self._valid.index_select(0, new), old_valid]).float()
        [count] = self.collective.sum([weight.sum()])
        rows = net.seen(torch.cat([features[STYLE].index_select(0, new), old, reference]))
        numbers = self._loss(rows, weight / count.clamp(min=1.0), 1.0 / (number * self.collective.size))
        gradients = self.optimizer.gradients(numbers[0])
        numbers, *gradients = self.collective.sum([numbers.detach(), *gradients])
        self.optimizer.masked_step(self.optimizer.set_gradients(gradients))
        return numbers

    def _discriminator_loss(self, x: Tensor, weight: Tensor, reference_weight: float) -> Tensor:
        """Return this process's loss, mean squared gradient and accuracies; `x` has the agent's features first."""
        net, cfg, agents = self.discriminator, self.cfg.discriminator, len(weight)
        automatic = "agent" if self.cfg.difference else "reference"
        penalized = automatic if cfg.penalized == "auto" else cfg.penalized
        score, gradient = net.with_gradient(x, since=agents if penalized == "reference" else 0)
        agent, reference = score[:agents], score[agents:]
        loss = (net.error(agent, -1.0) * weight).sum() + (net.error(reference, 1.0) * reference_weight).sum()
        squares = gradient.square().sum(dim=1)
        penalty = squares[-len(reference) :].sum() * reference_weight
        if penalized != "reference":
            agent_penalty = (squares[:agents] * weight).sum()
            penalty = agent_penalty if penalized == "agent" else 0.5 * penalty + 0.5 * agent_penalty
        decay = cfg.logit_decay * net.out.weight.square().sum()
        decay = decay + cfg.weight_decay * torch.stack([w.square().sum() for w in net.weights]).sum()
        loss = 0.5 * loss + cfg.gradient_penalty * penalty + decay / self.collective.size
        agent_rejected = ((agent < 0.0) * weight).sum()
        reference_accepted = (reference > 0.0).float().sum() * reference_weight
        return torch.stack([loss, penalty, agent_rejected, reference_accepted])

    def describe(self) -> dict[str, str]:
        """Return the banner line: features, network and weights."""
        cfg = self.cfg
        layers = f"{'x'.join(map(str, cfg.discriminator.hidden))} {cfg.discriminator.activation}"
        features = f"{self.replay.rows.shape[1]} {'differences' if cfg.difference else 'features'}"
        weights = f"style weight {cfg.style_weight:g}, task weight {cfg.task_weight:g}"
        return {"style": f"{features}, {layers}, {cfg.discriminator.loss}, {weights}"}

    def state_dict(self) -> dict[str, Any]:
        """Return discriminator, optimiser, replay buffer and random generator."""
        modules = {"discriminator": self.discriminator.state_dict(), "replay": self.replay.contents()}
        return {**modules, "optimizer": self.optimizer.moments(), "generator": self._draws.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        self.discriminator.load_state_dict(state["discriminator"])
        self.replay.restore(state["replay"])
        self.optimizer.load_moments(state["optimizer"])
        restore_generator(self._draws, state["generator"])


def _check_groups(sizes: Mapping[str, int], groups: tuple[str, ...], name: str) -> None:
    for group in groups:
        if group not in sizes:
            problem = f"the task has no observation group {group!r}, only {', '.join(sizes)}"
            hint = "Try task=HumanoidAMP, or see docs/algorithms.md#style"
            raise ConfigError(problem, key=f"algo={name}", hint=hint)
    if len({sizes[group] for group in groups}) > 1:
        got = {group: sizes[group] for group in groups}
        raise ConfigError(key=f"algo={name}", expected="observation groups of equal size", got=got)
