"""Adversarial motion priors: a discriminator rewards moving as a reference does (Peng et al. 2021, arXiv 2104.02180).

The task observes two groups of numbers beside its own: `style`, features of how the agent has just moved, and
`reference`, the same features of a place of a reference motion that is drawn anew in every control step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from gpusim_rl.errors import ConfigError
from gpusim_rl.learn.algorithm import EnvSpec, RecordedTensor, Transition, make_generator, restore_generator
from gpusim_rl.learn.networks import MLP
from gpusim_rl.learn.normalize import DifferenceNormalizer, RunningNormalizer
from gpusim_rl.learn.optimizer import MaskedAdamW
from gpusim_rl.learn.ppo import PPO
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


class AMP(PPO):
    """PPO with a reward for style, which a discriminator learns beside the policy.

        reward = task_weight * reward of the task + style_weight * reward(D(style)) + reward for new states

    After each minibatch of PPO the discriminator makes a step of its own: it learns to tell features of the reference
    from the agent's, half of them of this rollout and half of a replay memory. Its loss is

        (E[error(D(agent), -1)] + E[error(D(reference), 1)]) / 2 + gradient_penalty * E[|dD/dx|^2]
            + logit_decay * |last weights|^2 + weight_decay * |weights|^2

    With `difference` the features are the difference from a reference at the same time, divided by its mean absolute
    value; zeros are the only example of the reference, and the penalty is on the agent's samples (ADD, Zhang et al.
    2025, arXiv 2505.04961).
    """

    Config = AMPConfig

    cfg: AMPConfig  # type: ignore[reportIncompatibleVariableOverride]

    def __init__(self, cfg: AMPConfig, env: EnvSpec, *, device: torch.device, seed: int, max_iterations: int) -> None:
        learns = env.role != "acts"
        groups = (STYLE,) if cfg.difference else (STYLE, REFERENCE)
        if learns:
            _check_groups(env, groups)
        own = {name: size for name, size in env.obs_sizes.items() if name not in (STYLE, REFERENCE)}
        super().__init__(
            cfg, dataclasses.replace(env, obs_sizes=own), device=device, seed=seed, max_iterations=max_iterations
        )
        self._learns = learns
        if not learns:
            return
        size, samples = env.obs_sizes[STYLE], self.horizon * env.num_envs
        self.style = StyleRecord(self.horizon, env.num_envs, dict.fromkeys(groups, size), device)
        with device:
            self.discriminator = Discriminator(size, cfg.discriminator, cfg.clip_obs, cfg.difference)
            self.replay = FeatureReplay(cfg.discriminator.replay, size)
        if env.collective.size > 1:
            state = {name: x.cpu() for name, x in self.discriminator.state_dict().items()}
            self.discriminator.load_state_dict(env.collective.share(state))
        self._kept = min(cfg.discriminator.replay, max(1, round(cfg.discriminator.replay_share * samples)))
        self._draws = make_generator(device, seed + 3)
        parameters = [*self.discriminator.parameters()]
        self.discriminator_optimizer = MaskedAdamW(parameters, cfg.discriminator.learning_rate)
        self._numbers_of_style: list[Tensor] = []  # of each step: loss, penalty, accuracies
        self._style_reward = torch.zeros((), device=device)
        self._style_loss = self._discriminator_loss
        if env.compile:
            self._style_loss = Compiled(self._discriminator_loss, "the loss of the discriminator")

    def record(self, action: Tensor, step: Transition) -> None:
        """Writes the step into the rollout, and its features into their record."""
        self.style.write(self._t, step)
        super().record(action, step)

    def update(self) -> dict[str, Tensor]:
        """Learns from the rollout; returns numbers for the log."""
        valid = self.rollout.valid.flatten()
        features = {name: memory.flatten(0, 1) for name, memory in self.style.groups.items()}
        kept = self._random_rows(self._kept)
        self.replay.store(features[STYLE].index_select(0, kept), valid.index_select(0, kept))
        self._numbers_of_style = []
        stats = super().update()
        # The reference counts where the agent does: of an env that diverged nothing counts.
        for memory in features.values():
            self.discriminator.seen.update(memory, valid, self.collective)
        loss, penalty, of_agent, of_reference = torch.stack(self._numbers_of_style).mean(dim=0).unbind()
        stats["check/obs"] = stats["check/obs"] + torch.stack([x.sum() for x in features.values()]).sum()
        return stats | {
            "loss/discriminator": loss,
            "amp/style_reward": self._style_reward,
            "amp/gradient_penalty": penalty,
            "amp/accuracy_agent": of_agent,
            "amp/accuracy_reference": of_reference,
        }

    def _task_reward(self) -> Tensor:
        cfg, it = self.cfg, self.discriminator
        style = it.reward(it(it.seen(self.style.groups[STYLE])))
        valid = self.rollout.valid.float()
        number, total = self.collective.sum([valid.sum(), (style * valid).sum()])
        self._style_reward = total / number.clamp(min=1.0)
        return cfg.task_weight * super()._task_reward() + (cfg.style_weight * cfg.reward_scale) * style

    def _step(self, norm: Tensor, skip: Tensor) -> None:
        super()._step(norm, skip)
        self._learn_style()

    def _random_rows(self, number: int) -> Tensor:
        samples = self.horizon * self.rollout.num_envs
        return torch.randint(samples, (number,), generator=self._draws, device=self.device)

    def _learn_style(self) -> None:
        """Makes a step of the discriminator."""
        it, number = self.discriminator, self.cfg.discriminator.batch_size
        new, of_reference = self._random_rows(2 * number).split(number)
        unit = torch.rand(number, generator=self._draws, device=self.device)
        old, old_valid = self.replay.draw(unit)
        features = {name: memory.flatten(0, 1) for name, memory in self.style.groups.items()}
        reference = torch.zeros_like(old)
        if REFERENCE in features:
            reference = features[REFERENCE].index_select(0, of_reference)
        weight = torch.cat([self.rollout.valid.flatten().index_select(0, new), old_valid]).float()
        [count] = self.collective.sum([weight.sum()])
        rows = it.seen(torch.cat([features[STYLE].index_select(0, new), old, reference]))
        numbers = self._style_loss(rows, weight / count.clamp(min=1.0), 1.0 / (number * self.collective.size))
        optimizer = self.discriminator_optimizer
        gradients = optimizer.gradients(numbers[0])
        numbers, *gradients = self.collective.sum([numbers.detach(), *gradients])
        optimizer.masked_step(*optimizer.set_gradients(gradients))
        self._numbers_of_style.append(numbers)

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
        told_agent = ((agent < 0.0) * weight).sum()
        told_reference = (reference > 0.0).float().sum() * weight_of_reference
        return torch.stack([loss, penalty, told_agent, told_reference])

    def describe(self) -> dict[str, str]:
        """Returns network, batch, and what tells styles apart."""
        cfg = self.cfg
        if not self._learns:
            return super().describe()
        layers = f"{'x'.join(map(str, cfg.discriminator.hidden))} {cfg.discriminator.activation}"
        features = "differences" if cfg.difference else "features"
        size = self.replay.rows.shape[1]
        text = f"{size} {features}, {layers}, {cfg.discriminator.loss}, weight {cfg.style_weight:g}"
        return super().describe() | {"style": f"{text}, of the task {cfg.task_weight:g}"}

    def state_dict(self) -> dict[str, Any]:
        """Returns what PPO has, and discriminator, its optimiser, replay memory and random generator."""
        if not self._learns:
            return super().state_dict()
        modules = {"discriminator": self.discriminator.state_dict(), "replay": self.replay.contents()}
        rest = {"optimizer": self.discriminator_optimizer.moments(), "generator": self._draws.get_state()}
        return {**super().state_dict(), "style": {**modules, **rest}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict`."""
        super().load_state_dict(state)
        if not self._learns:
            return
        self.discriminator.load_state_dict(state["style"]["discriminator"])
        self.replay.restore(state["style"]["replay"])
        self.discriminator_optimizer.load_moments(state["style"]["optimizer"])
        restore_generator(self._draws, state["style"]["generator"])


def _check_groups(env: EnvSpec, groups: tuple[str, ...]) -> None:
    """Raises ConfigError where the task does not observe the groups, or where they differ in size."""
    sizes, name = env.obs_sizes, env.section
    for group in groups:
        if group not in sizes:
            problem = f"the task has no observation group {group!r}, only {', '.join(sizes)}"
            raise ConfigError(f"algo={name}: {problem}. Try task=HumanoidAMP, or docs/algorithms.md#style")
    found = {group: sizes[group] for group in groups}
    if len(set(found.values())) > 1:
        got = " and ".join(f"{size} in {group!r}" for group, size in found.items())
        raise ConfigError(f"algo={name}: expected as many numbers of the agent as of the reference, got {got}")
