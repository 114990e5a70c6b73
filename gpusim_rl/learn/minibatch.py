"""Layout of rollouts for training: packed samples, sequences and minibatches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Shaped
from torch import Tensor

from gpusim_rl.learn.algorithm import Hidden
from gpusim_rl.learn.collective import Collective
from gpusim_rl.learn.rollout import Rollout


def fit_sequence_length(horizon: int, wanted: int) -> int:
    """Return the largest divisor of `horizon` up to `wanted`."""
    return max(d for d in range(1, min(horizon, wanted) + 1) if horizon % d == 0)


def fit_minibatches(sequences: int, wanted: float) -> int:
    """Return the divisor of `sequences` nearest to `wanted`."""
    divisors = [d for low in range(1, int(sequences**0.5) + 1) if sequences % low == 0 for d in (low, sequences // low)]
    return min(divisors, key=lambda d: (abs(d - wanted), d))


def by_sequence(x: Shaped[Tensor, "time envs ..."], length: int) -> Shaped[Tensor, "length sequences ..."]:
    """Reshape [T, N, ...] to [L, T / L * N, ...], with L = `length` consecutive steps of an env as a sequence."""
    return x.unflatten(0, (-1, length)).transpose(0, 1).flatten(1, 2)


def by_step(x: Shaped[Tensor, "length sequences ..."], num_envs: int) -> Shaped[Tensor, "time envs ..."]:
    """Invert `by_sequence`."""
    return x.unflatten(1, (-1, num_envs)).transpose(0, 1).flatten(0, 1)


@dataclass(slots=True)
class Samples:
    """Recorded samples for the loss, without network inputs."""

    action: Tensor  # [*batch, actions]
    distribution: Tensor  # parameters of the acting distribution, [*batch, parameters]
    log_prob: Tensor
    cost: Tensor  # negative advantage
    least_cost: Tensor  # lower bound of a clipped policy loss
    value_low: Tensor  # range of a clipped value prediction, at the scale of the network
    value_high: Tensor
    target: Tensor  # return, at the scale of the network
    weight: Tensor  # sample weight in batch sums: 0 if invalid, else 1, or 1 / number of valid samples for means

    @classmethod
    def of(
        cls,
        action: Tensor,
        distribution: Tensor,
        log_prob: Tensor,
        *,
        advantage: Tensor,
        value: Tensor,
        target: Tensor,
        valid: Tensor,
        clip: float,
    ) -> Samples:
        """Precompute values that epochs share; `valid` is 1.0 or 0.0; `clip` is the clip range of ratio and value."""
        cost = -advantage
        least = torch.add(cost, cost.abs(), alpha=-clip)
        return cls(action, distribution, log_prob, cost, least, value - clip, value + clip, target, valid)

    def pack(self) -> Tensor:
        """Pack all fields into one tensor [*batch, columns], so that a minibatch takes one gather."""
        costs, values = (self.cost, self.least_cost), (self.value_low, self.value_high)
        scalars = torch.stack([self.log_prob, *costs, *values, self.target, self.weight], dim=-1)
        return torch.cat([self.action, self.distribution, scalars], dim=-1)

    @classmethod
    def unpack(cls, packed: Tensor, num_actions: int, num_parameters: int) -> Samples:
        """Invert `pack`."""
        action, distribution, scalars = packed.split([num_actions, num_parameters, 7], dim=-1)
        return cls(action, distribution, *scalars.unbind(-1))

    @staticmethod
    def weight_of(packed: Tensor) -> Tensor:
        """Return a view of the `weight` of packed samples."""
        return packed[..., -1]


@dataclass(slots=True)
class Minibatch:
    """Minibatch, or chunk of a minibatch, for losses: [time, batch, ...]."""

    old: Samples
    inputs: dict[str, Tensor]  # normalised observations by group, and inputs of extensions
    hidden: Hidden = ()  # recurrent state before each sequence, [layers, batch, size]
    is_first: Tensor | None = None  # whether an episode begins at the step; None if feed-forward


def shuffle(
    weight: Tensor, valid: Tensor, minibatches: int, generator: torch.Generator, collective: Collective
) -> tuple[Tensor, ...]:
    """Return random sequence indices per minibatch of an epoch; set `weight` to sample weights in the minibatch mean.

    `weight` and `valid` (1 or 0) are [steps, sequences].
    """
    size = weight.shape[1] // minibatches
    order = torch.randperm(weight.shape[1], generator=generator, device=weight.device)
    shuffled = valid.index_select(1, order).unflatten(1, (-1, size))
    [counts] = collective.sum([shuffled.sum(dim=(0, 2))])
    weight.index_copy_(1, order, (shuffled / counts.clamp_(min=1.0)[:, None]).flatten(1))
    return order.split(size)


@dataclass(slots=True)
class Sequences:
    """Rollout arranged for training, [steps per sequence, sequences, ...]; feed-forward sequences have one step."""

    inputs: dict[str, Tensor]
    packed: Tensor  # output of `Samples.pack`
    hidden: Hidden
    is_first: Tensor | None

    @classmethod
    def of(
        cls, rollout: Rollout, inputs: Mapping[str, Tensor], packed: Shaped[Tensor, "time envs columns"]
    ) -> Sequences:
        """Arrange a rollout, its network inputs and its packed samples."""
        length = rollout.sequence_length
        return cls(
            {group: by_sequence(value, length) for group, value in inputs.items()},
            by_sequence(packed, length),
            tuple(h.transpose(0, 1).flatten(1, 2) for h in rollout.hidden),
            by_sequence(rollout.is_first, length) if rollout.hidden else None,
        )

    def select(self, index: Tensor) -> Sequences:
        """Return the sequences of a minibatch."""
        return Sequences(
            {group: value.index_select(1, index) for group, value in self.inputs.items()},
            self.packed.index_select(1, index),
            tuple(h.index_select(1, index) for h in self.hidden),
            None if self.is_first is None else self.is_first.index_select(1, index),
        )
