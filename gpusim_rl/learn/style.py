"""Adversarial motion priors: a discriminator rewards moving as a reference does (Peng et al. 2021, arXiv 2104.02180).

The task observes two groups of numbers beside its own: `style`, features of how the agent has just moved, and
`reference`, the same features of a place of a reference motion that is drawn anew in every control step.
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
"""Groups with features of the agent and of the reference."""
LEAST_DOUBT = 1e-4
"""Least 1 - sigmoid(D) in the logistic reward, which is bounded by that."""
SLOPES = {
    "relu": lambda h: (h > 0.0).float(),
    "elu": lambda h: h.clamp(max=0.0) + 1.0,
    "tanh": lambda h: 1.0 - h.square(),
}
"""Derivatives of the activations, from their values h."""


class Discriminator(nn.Module):
    """Scores features: high where they could be of the reference, low where they could not.

    Args:
        size: Number of features.
        cfg: Settings.
        clip: Limit of normalised features [standard deviations].
        difference: Whether features are differences from the reference, whose zeros normalisation keeps.
    """

    def __init__(self, size: int, cfg: DiscriminatorConfig, clip: float, difference: bool = False) -> None:
        super().__init__()
        self.seen = (DifferenceNormalizer if difference else RunningNormalizer)(size, clip=clip)
        self.layers = MLP(size, cfg)
        self.out = nn.Linear(self.layers.out_size, 1)
        self._slope, self._logistic = SLOPES[cfg.activation], cfg.loss == "logistic"
        self.weights = [layer.weight for layer in (*self.layers, self.out) if isinstance(layer, nn.Linear)]

    def forward(self, x: Float[Tensor, "*batch size"]) -> Float[Tensor, "*batch"]:
        """Returns scores D of normalised features."""
        return self.out(self.layers(x))[..., 0]

    def reward(self, score: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        """Returns the reward for a score.

        Logistic -log(max(1 - sigmoid(D), 1e-4)); of least squares max(0, 1 - (D - 1)^2 / 4), equation 7.
        """
        if self._logistic:
            return functional.softplus(score).clamp(max=-math.log(LEAST_DOUBT))
        return (1.0 - 0.25 * (score - 1.0).square()).clamp(min=0.0)

    def error(self, score: Float[Tensor, " batch"], target: float) -> Float[Tensor, " batch"]:
        """Returns the loss of scores whose sign should be that of the target, 1 or -1."""
        return functional.softplus(-target * score) if self._logistic else (score - target).square()

    def with_gradient(
        self, x: Float[Tensor, "batch size"], since: int
    ) -> tuple[Float[Tensor, " batch"], Float[Tensor, "rest size"]]:
        """Returns scores, and of the rows from `since` on their gradients with respect to the features.

        The gradient is the chain rule, written down. So that of its norm is a plain backward pass, which torch.compile
        can take, and no second derivative of every kernel.
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
    """Features of earlier rollouts, in a ring of fixed memory: the newest rows replace the oldest.

    Args:
        capacity: Number of rows.
        size: Number of features.
    """

    rows: Tensor
    valid: Tensor
    """Whether a row counts: its env had not diverged."""
    filled: Tensor
    """Rows that have been written, int64 []."""
    _place: Tensor

    def __init__(self, capacity: int, size: int) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(capacity, size))
        self.register_buffer("valid", torch.zeros(capacity, dtype=torch.bool))
        self.register_buffer("filled", torch.zeros((), dtype=torch.int64))
        self.register_buffer("_place", torch.zeros((), dtype=torch.int64))

    def store(self, rows: Float[Tensor, "new size"], valid: Bool[Tensor, " new"]) -> None:
        """Writes rows, no more than the ring has."""
        number, capacity = len(rows), len(self.rows)
        places = (self._place + torch.arange(number, device=rows.device)).remainder_(capacity)
        self.rows.index_copy_(0, places, rows)
        self.valid.index_copy_(0, places, valid)
        self._place.add_(number).remainder_(capacity)
        self.filled.add_(number).clamp_(max=capacity)

    def draw(self, unit: Float[Tensor, " batch"]) -> tuple[Float[Tensor, "batch size"], Bool[Tensor, " batch"]]:
        """Returns the rows for numbers drawn uniformly from [0, 1), and whether each of them counts."""
        places = torch.minimum((unit * self.filled).long(), self.filled - 1)
        return self.rows.index_select(0, places), self.valid.index_select(0, places)

    def contents(self) -> dict[str, Tensor]:
        """Returns a copy of the state, without rows that were never written. Reads their number."""
        number = int(self.filled)
        state = {"rows": self.rows[:number], "valid": self.valid[:number], "filled": self.filled, "_place": self._place}
        return {name: x.clone() for name, x in state.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restores `contents` in place."""
        for name, x in self.named_buffers():
            (x[: len(state[name])] if x.ndim else x).copy_(state[name])


class StyleRecord:
    """Features of agent and reference in the control steps of a rollout, [T, N, size] each.

    Attributes:
        groups: Features by observation group; without the reference where that is zero.
    """

    def __init__(self, horizon: int, num_envs: int, sizes: dict[str, int], device: torch.device) -> None:
        self.groups = {name: torch.zeros(horizon, num_envs, size, device=device) for name, size in sizes.items()}

    def write(self, t: int, step: Transition) -> None:
        """Stores step t: of the agent what came of its action, also where that ended the episode."""
        for name, memory in self.groups.items():
            memory[t].copy_((step.final_obs if name == STYLE else step.obs)[name])

    def recorded(self, steps: int) -> list[RecordedTensor]:
        """Returns the features of the last control steps."""
        axes = "step", "env", "column"
        return [RecordedTensor("an observation", x[-steps:], axes, name) for name, x in self.groups.items()]


class Style(Extension):
    """Reward for style, which a discriminator learns beside the policy.

        reward = task_weight * reward of the task + style_weight * reward(D(style))

    After each minibatch of PPO the discriminator makes a step of its own: it learns to tell features of the reference
    from the agent's, half of them of this rollout and half of a replay memory. Its loss is

        (E[error(D(agent), -1)] + E[error(D(reference), 1)]) / 2 + gradient_penalty * E[|dD/dx|^2]
            + logit_decay * |last weights|^2 + weight_decay * |weights|^2

    With `difference` the features are the difference from a reference at the same time, divided by its mean absolute
    value; zeros are the only example of the reference, and the penalty is on the agent's samples (ADD, Zhang et al.
    2025, arXiv 2505.04961).

    Raises:
        ConfigError: The task does not observe the groups.
    """

    groups = (STYLE, REFERENCE)

    def __init__(self, cfg: AMPConfig, env: EnvSpec, context: LearnerContext, device: torch.device, seed: int) -> None:
        groups = (STYLE,) if cfg.difference else (STYLE, REFERENCE)
        _check_groups(env.obs_sizes, groups, context.section)
        self.cfg, self.device, self.collective = cfg, device, context.collective
        size, samples = env.obs_sizes[STYLE], cfg.horizon * env.num_envs
        self.features = StyleRecord(cfg.horizon, env.num_envs, dict.fromkeys(groups, size), device)
        with device:
            self.discriminator = Discriminator(size, cfg.discriminator, cfg.clip_obs, cfg.difference)
            self.replay = FeatureReplay(cfg.discriminator.replay, size)
        if context.collective.size > 1:
            state = {name: x.cpu() for name, x in self.discriminator.state_dict().items()}
            self.discriminator.load_state_dict(context.collective.share(state))
        self._samples, kept = samples, max(1, round(cfg.discriminator.replay_share * samples))
        self._kept = min(cfg.discriminator.replay, kept)
        self._draws = make_generator(device, seed + 3)
        self.optimizer = MaskedAdamW([*self.discriminator.parameters()], cfg.discriminator.learning_rate)
        self._reward = torch.zeros((), device=device)  # mean of the last rollout
        self._valid = torch.zeros(samples, dtype=torch.bool, device=device)
        self._loss = self._discriminator_loss
        if context.compile:
            self._loss = Compiled(self._discriminator_loss, "the loss of the discriminator")

    def record(self, t: int, obs: Observation, step: Transition) -> None:
        """Store the features of step t."""
        self.features.write(t, step)

    def begin_update(self, rollout: Rollout, reward: Tensor, inputs: dict[str, Tensor], policy: ActorCritic) -> Tensor:
        """Keep some features in the replay memory; weigh the task's rewards and add those for style."""
        cfg, it, style = self.cfg, self.discriminator, self.features.groups[STYLE]
        self._valid.copy_(rollout.valid.flatten())
        kept = self._random_rows(self._kept)
        self.replay.store(style.flatten(0, 1).index_select(0, kept), self._valid.index_select(0, kept))
        rewards = it.reward(it(it.seen(style)))
        valid = rollout.valid.float()
        number, total = self.collective.sum([valid.sum(), (rewards * valid).sum()])
        self._reward = total / number.clamp(min=1.0)
        return cfg.task_weight * reward + (cfg.style_weight * cfg.reward_scale) * rewards

    def after_minibatch(self, index: Tensor, weight: Tensor, last: bool) -> dict[str, Tensor]:
        """Make a step of the discriminator; after the last one update the statistics of features."""
        loss, penalty, of_agent, of_reference = self._learn().unbind()
        numbers = {
            "loss/discriminator": loss,
            "amp/gradient_penalty": penalty,
            "amp/accuracy_agent": of_agent,
            "amp/accuracy_reference": of_reference,
        }
        if not last:
            return numbers
        features = [memory.flatten(0, 1) for memory in self.features.groups.values()]
        # The reference counts where the agent does: of an env that diverged nothing counts.
        for memory in features:
            self.discriminator.seen.update(memory, self._valid, self.collective)
        finite = torch.stack([x.sum() for x in features]).sum()
        return {**numbers, "amp/style_reward": self._reward, "check/style": finite}

    def _random_rows(self, number: int) -> Tensor:
        return torch.randint(self._samples, (number,), generator=self._draws, device=self.device)

    def _learn(self) -> Tensor:
        """Make a step of the discriminator; return its loss, penalty and accuracies."""
        it, number = self.discriminator, self.cfg.discriminator.batch_size
        new, of_reference = self._random_rows(2 * number).split(number)
        unit = torch.rand(number, generator=self._draws, device=self.device)
        old, old_valid = self.replay.draw(unit)
        features = {name: memory.flatten(0, 1) for name, memory in self.features.groups.items()}
        reference = torch.zeros_like(old)
        if REFERENCE in features:
            reference = features[REFERENCE].index_select(0, of_reference)
        weight = torch.cat([self._valid.index_select(0, new), old_valid]).float()
        [count] = self.collective.sum([weight.sum()])
        rows = it.seen(torch.cat([features[STYLE].index_select(0, new), old, reference]))
        numbers = self._loss(rows, weight / count.clamp(min=1.0), 1.0 / (number * self.collective.size))
        gradients = self.optimizer.gradients(numbers[0])
        numbers, *gradients = self.collective.sum([numbers.detach(), *gradients])
        self.optimizer.masked_step(*self.optimizer.set_gradients(gradients))
        return numbers

    def _discriminator_loss(self, x: Tensor, weight: Tensor, weight_of_reference: float) -> Tensor:
        """Returns loss, mean square of the gradient, and the accuracies on agent and reference: this process's share.

        Args:
            x: Normalised features, the agent's before those of the reference, [batch, size].
            weight: Weights of the agent's samples in means.
            weight_of_reference: Weight of a sample of the reference.
        """
        it, cfg, agents = self.discriminator, self.cfg.discriminator, len(weight)
        penalized = cfg.penalized
        if penalized == "auto":
            penalized = "agent" if self.cfg.difference else "reference"
        score, gradient = it.with_gradient(x, since=agents if penalized == "reference" else 0)
        agent, reference = score[:agents], score[agents:]
        loss = (it.error(agent, -1.0) * weight).sum() + (it.error(reference, 1.0) * weight_of_reference).sum()
        squares = gradient.square().sum(dim=1)
        penalty = squares[-len(reference) :].sum() * weight_of_reference
        if penalized != "reference":
            of_agent = (squares[:agents] * weight).sum()
            penalty = of_agent if penalized == "agent" else 0.5 * penalty + 0.5 * of_agent
        decay = cfg.logit_decay * it.out.weight.square().sum()
        decay = decay + cfg.weight_decay * torch.stack([w.square().sum() for w in it.weights]).sum()
        loss = 0.5 * loss + cfg.gradient_penalty * penalty + decay / self.collective.size
        agent_rejected = ((agent < 0.0) * weight).sum()
        reference_accepted = (reference > 0.0).float().sum() * weight_of_reference
        return torch.stack([loss, penalty, agent_rejected, reference_accepted])

    def describe(self) -> dict[str, str]:
        """Return what tells styles apart."""
        cfg = self.cfg
        layers = f"{'x'.join(map(str, cfg.discriminator.hidden))} {cfg.discriminator.activation}"
        features = "differences" if cfg.difference else "features"
        size = self.replay.rows.shape[1]
        text = f"{size} {features}, {layers}, {cfg.discriminator.loss}, weight {cfg.style_weight:g}"
        return {"style": f"{text}, of the task {cfg.task_weight:g}"}

    def state_dict(self) -> dict[str, Any]:
        """Return discriminator, its optimiser, replay memory and random generator."""
        modules = {"discriminator": self.discriminator.state_dict(), "replay": self.replay.contents()}
        return {**modules, "optimizer": self.optimizer.moments(), "generator": self._draws.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        self.discriminator.load_state_dict(state["discriminator"])
        self.replay.restore(state["replay"])
        self.optimizer.load_moments(state["optimizer"])
        restore_generator(self._draws, state["generator"])


def _check_groups(sizes: Mapping[str, int], groups: tuple[str, ...], name: str) -> None:
    """Raises ConfigError where the task does not observe the groups, or where they differ in size."""
    for group in groups:
        if group not in sizes:
            problem = f"the task has no observation group {group!r}, only {', '.join(sizes)}"
            raise ConfigError(f"algo={name}: {problem}. Try task=HumanoidAMP, or docs/algorithms.md#style")
    found = {group: sizes[group] for group in groups}
    if len(set(found.values())) > 1:
        got = " and ".join(f"{size} in {group!r}" for group, size in found.items())
        raise ConfigError(f"algo={name}: expected as many numbers of the agent as of the reference, got {got}")
