"""A rollout arranged for training: its samples packed side by side, in sequences that minibatches are made of."""

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
    """Returns the largest divisor of the horizon that is not longer than wanted."""
    return max(d for d in range(1, min(horizon, wanted) + 1) if horizon % d == 0)


def fit_minibatches(sequences: int, wanted: float) -> int:
    """Returns the number of equal minibatches: the divisor of the number of sequences nearest to `wanted`."""
    divisors = [d for low in range(1, int(sequences**0.5) + 1) if sequences % low == 0 for d in (low, sequences // low)]
    return min(divisors, key=lambda d: (abs(d - wanted), d))


def by_sequence(x: Shaped[Tensor, "time envs ..."], length: int) -> Shaped[Tensor, "length sequences ..."]:
    """Reshapes [T, N, ...] to [L, T / L * N, ...]: `length` = L consecutive steps of one env stay together."""
    return x.unflatten(0, (-1, length)).transpose(0, 1).flatten(1, 2)


def by_step(x: Shaped[Tensor, "length sequences ..."], num_envs: int) -> Shaped[Tensor, "time envs ..."]:
    """Undoes `by_sequence`."""
    return x.unflatten(1, (-1, num_envs)).transpose(0, 1).flatten(0, 1)


@dataclass(slots=True)
class Samples:
    """The record of samples that the loss needs, beside the inputs of the networks."""

    action: Tensor
    """Actions, [*batch, actions]."""
    distribution: Tensor
    """Parameters of the distribution that the action was drawn from, [*batch, parameters]."""
    log_prob: Tensor
    cost: Tensor
    """Minus the advantage."""
    least_cost: Tensor
    """Lower bound of the policy's loss, where that is clipped."""
    value_low: Tensor
    """Range of the value prediction, where that is clipped, at the scale of the network."""
    value_high: Tensor
    target: Tensor
    """Return, at the scale of the network."""
    weight: Tensor
    """Weight in sums over a batch: 0.0 where the sample does not count, else 1.0; 1 / their number for means."""

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
        """Computes once what every pass over the samples needs: from the advantage, the old value and the return.

        `valid` is 1.0 where the sample counts, else 0.0; `clip` is the largest distance of the clipped ratio from 1,
        and of the clipped value from the old one.
        """
        cost = -advantage
        least = torch.add(cost, cost.abs(), alpha=-clip)
        return cls(action, distribution, log_prob, cost, least, value - clip, value + clip, target, valid)

    def pack(self) -> Tensor:
        """Returns all of it side by side, [*batch, columns], so that a minibatch is one gather."""
        costs, values = (self.cost, self.least_cost), (self.value_low, self.value_high)
        scalars = torch.stack([self.log_prob, *costs, *values, self.target, self.weight], dim=-1)
        return torch.cat([self.action, self.distribution, scalars], dim=-1)

    @classmethod
    def unpack(cls, packed: Tensor, num_actions: int, num_parameters: int) -> Samples:
        """Undoes `pack`."""
        action, distribution, scalars = packed.split([num_actions, num_parameters, 7], dim=-1)
        return cls(action, distribution, *scalars.unbind(-1))

    @staticmethod
    def weight_of(packed: Tensor) -> Tensor:
        """Returns `weight` of packed samples, a view, without unpacking the rest."""
        return packed[..., -1]


@dataclass(slots=True)
class Minibatch:
    """Samples of a minibatch, or of a chunk of it, as losses see them: [time, batch, ...]."""

    old: Samples
    """The record of the rollout."""
    inputs: dict[str, Tensor]
    """Normalised observations by group, and what extensions have added."""
    hidden: Hidden = ()
    """Recurrent state before each sequence, [layers, batch, size]."""
    is_first: Tensor | None = None
    """Whether an episode begins at the step; None for feed-forward policies."""


def shuffle(
    weight: Tensor, valid: Tensor, minibatches: int, generator: torch.Generator, collective: Collective
) -> tuple[Tensor, ...]:
    """Draw the minibatches of an epoch, and write into `weight` each sample's share of the mean over its minibatch.

    Args:
        weight: Weights of the samples, [steps, sequences].
        valid: 1 for each sample that counts, else 0, [steps, sequences].
        minibatches: Number of minibatches, which divides the number of sequences.
        generator: Random generator.
        collective: Processes whose minibatches belong together.

    Returns:
        Indices of the sequences of each minibatch.
    """
    size = weight.shape[1] // minibatches
    order = torch.randperm(weight.shape[1], generator=generator, device=weight.device)
    shuffled = valid.index_select(1, order).unflatten(1, (-1, size))
    [counts] = collective.sum([shuffled.sum(dim=(0, 2))])
    weight.index_copy_(1, order, (shuffled / counts.clamp_(min=1.0)[:, None]).flatten(1))
    return order.split(size)


@dataclass(slots=True)
class Sequences:
    """A rollout arranged for training: [steps per sequence, sequences, ...]; feed-forward policies have one step."""

    inputs: dict[str, Tensor]
    """Normalised observations."""
    packed: Tensor
    """Result of `Samples.pack`."""
    hidden: Hidden
    """Recurrent state before each sequence, [layers, sequences, size]."""
    is_first: Tensor | None
    """Whether an episode begins at the step; None for feed-forward policies."""

    @classmethod
    def of(
        cls, rollout: Rollout, inputs: Mapping[str, Tensor], packed: Shaped[Tensor, "time envs columns"]
    ) -> Sequences:
        """Arranges a rollout: its normalised observations, [T, N, size] each, and its packed samples."""
        length = rollout.sequence_length
        return cls(
            {group: by_sequence(value, length) for group, value in inputs.items()},
            by_sequence(packed, length),
            tuple(h.transpose(0, 1).flatten(1, 2) for h in rollout.hidden),
            by_sequence(rollout.is_first, length) if rollout.hidden else None,
        )

    def select(self, index: Tensor) -> Sequences:
        """Returns the sequences of a minibatch."""
        return Sequences(
            {group: value.index_select(1, index) for group, value in self.inputs.items()},
            self.packed.index_select(1, index),
            tuple(h.index_select(1, index) for h in self.hidden),
            None if self.is_first is None else self.is_first.index_select(1, index),
        )
