"""Prioritised sampling from a replay memory, without a host sync."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gpusim_rl.learn.replay import Replay, Transitions

BLOCK = 64
"""Slots of which only the sum is read until one of them is drawn."""
_SMALLEST = 1e-6  # of an error: nothing is left out for ever


class Priorities:
    """Draws transitions by the size of their errors (Schaul et al. 2016, arXiv 1511.05952).

        P(i) = p_i / sum_k p_k,   p_i = (error_i + 1e-6)^alpha

    A new transition has the largest priority so far. A step has none until the whole window that begins with it is
    stored, and none after its slot is overwritten. A transition that turned out not to count has none either.

    A draw is two: of a block of slots by its sum, and of a slot in the block. The sums are formed anew for every draw.
    So they never drift, and changes of priorities cost little (benchmarks/updates/prioritized.json).
    Blocks are drawn in float64: float32 has 2^24 values only.

    Args:
        alpha: Exponent of the errors: 0 draws uniformly, 1 in proportion.

    Attributes:
        values: p_i of all slots, slot * N + env, float32; padded with zeros to whole blocks.
        largest: Largest p_i that any transition has had, [].
    """

    def __init__(self, replay: Replay, alpha: float) -> None:
        self.replay, self.alpha = replay, alpha
        device, slots = replay.total.device, replay.num_steps * replay.num_envs
        self.values = torch.zeros(-(-slots // BLOCK) * BLOCK, device=device)
        self.largest = torch.ones((), device=device)
        self._steps = self.values[:slots].view(replay.num_steps, replay.num_envs)

    def after_write(self, number: int) -> None:
        """Sets the priorities that the last so many steps change: theirs, and those of windows that are whole now."""
        replay = self.replay
        back = torch.arange(min(number + replay.n_step, replay.num_steps), device=self.largest.device)
        step = replay.total - 1 - back
        fresh = self.largest * ((back >= replay.n_step) & (step >= 0))
        self._steps.index_copy_(0, step % replay.num_steps, fresh[:, None].expand(-1, replay.num_envs))

    def clear(self) -> None:
        """Forgets everything, as the memory does."""
        self.values.zero_()

    @torch.no_grad()
    def sample(self, size: int, generator: torch.Generator, beta: Tensor) -> Transitions:
        """Draws transitions with replacement. Their weights make up for the unequal probabilities.

        The weight is p_i^-beta, or 0 where a transition does not count. With `beta` = 1 [] a weighted mean is that of
        all transitions.
        """
        index = self._draw(size, generator)
        drawn, priority = self.replay.at(index), self.values.take(index)
        # From an empty memory something is drawn that has no priority.
        drawn.weight *= torch.where(priority > 0.0, priority.pow(-beta), 0.0)
        return drawn

    def _draw(self, size: int, generator: torch.Generator) -> Int[Tensor, " batch"]:
        blocks = self.values.view(-1, BLOCK)
        upper = blocks.sum(dim=1).double().cumsum_(dim=0)
        u = torch.rand(size, dtype=torch.float64, device=upper.device, generator=generator).mul_(upper[-1])
        # right: the first whose cumulative sum is above, so it has a priority itself
        block = torch.searchsorted(upper, u, right=True).clamp_(max=len(blocks) - 1)
        inside = blocks.index_select(0, block).cumsum_(dim=1)
        v = torch.rand(size, 1, device=upper.device, generator=generator).mul_(inside[:, -1:])
        place = torch.searchsorted(inside, v, right=True).clamp_(max=BLOCK - 1).squeeze(1)
        return block.mul_(BLOCK).add_(place)

    @torch.no_grad()
    def update(
        self,
        index: Int[Tensor, " batch"],
        error: Float[Tensor, " batch"],
        weight: Float[Tensor, " batch"],
        hold: Bool[Tensor, ""],
    ) -> None:
        """Changes the priorities of transitions at slot * N + env by their errors, which are >= 0; none with `hold`.

        The larger error of a place counts. One that is not finite changes nothing. A transition of weight 0 is not
        drawn again.
        """
        new = ((error + _SMALLEST) ** self.alpha).masked_fill_(weight == 0.0, 0.0)
        new = torch.where(new.isfinite() & ~hold, new, self.values.take(index))
        # The largest of equal indices: the same in every run, unlike the last one that is written on a GPU.
        self.values.scatter_reduce_(0, index, new, "amax", include_self=False)
        torch.maximum(self.largest, new.amax(), out=self.largest)

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the priorities of all slots that were written. Reads the number of steps."""
        number = int(self.replay.fill) * self.replay.num_envs
        return {"values": self.values[:number].clone(), "largest": self.largest.clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restores `state_dict`, in place."""
        self.values.zero_()[: len(state["values"])].copy_(state["values"])
        self.largest.copy_(state["largest"])
