"""Prioritised replay sampling without host syncs."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gpusim_rl.learn.replay import Replay, Transitions

BLOCK = 64
"""Slots per block; sampling picks a block by its priority sum, then a slot."""
_SMALLEST = 1e-6  # keeps every priority above 0


class Priorities:
    """Sampling in proportion to errors (Schaul et al. 2016, arXiv 1511.05952).

        P(i) = p_i / sum_k p_k,   p_i = (error_i + 1e-6)^alpha

    A transition gets the largest priority so far once its window is complete. Each draw picks a block of slots by its
    float64 sum, then a slot. Sums are recomputed for every draw, so they never drift.
    """

    def __init__(self, replay: Replay, alpha: float) -> None:
        self.replay, self.alpha = replay, alpha
        device, slots = replay.total.device, replay.num_steps * replay.num_envs
        self.values = torch.zeros(-(-slots // BLOCK) * BLOCK, device=device)  # p_i of slot * N + env
        self.largest = torch.ones((), device=device)  # largest p_i so far
        self._steps = self.values[:slots].view(replay.num_steps, replay.num_envs)

    def after_write(self, number: int) -> None:
        """Give the largest priority to windows completed by the last `number` steps, and 0 to incomplete windows."""
        replay = self.replay
        back = torch.arange(min(number + replay.n_step, replay.num_steps), device=self.largest.device)
        step = replay.total - 1 - back
        fresh = self.largest * ((back >= replay.n_step) & (step >= 0))
        self._steps.index_copy_(0, step % replay.num_steps, fresh[:, None].expand(-1, replay.num_envs))

    def clear(self) -> None:
        """Set all priorities to 0."""
        self.values.zero_()

    @torch.no_grad()
    def sample(self, size: int, generator: torch.Generator, beta: Tensor) -> Transitions:
        """Draw transitions with importance weights p_i^-beta; beta = 1 fully corrects the sampling bias."""
        index = self._draw(size, generator)
        drawn, priority = self.replay.at(index), self.values.take(index)
        # an empty memory yields transitions without priority
        drawn.weight *= torch.where(priority > 0.0, priority.pow(-beta), 0.0)
        return drawn

    def _draw(self, size: int, generator: torch.Generator) -> Int[Tensor, " batch"]:
        blocks = self.values.view(-1, BLOCK)
        upper = blocks.sum(dim=1).double().cumsum_(dim=0)
        u = torch.rand(size, dtype=torch.float64, device=upper.device, generator=generator).mul_(upper[-1])
        # right=True skips blocks whose sum is 0
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
        """Update priorities at slot * N + env unless `hold`; for duplicate indices, the largest finite error counts."""
        new = ((error + _SMALLEST) ** self.alpha).masked_fill_(weight == 0.0, 0.0)
        new = torch.where(new.isfinite() & ~hold, new, self.values.take(index))
        # amax makes duplicate indices deterministic on a GPU
        self.values.scatter_reduce_(0, index, new, "amax", include_self=False)
        torch.maximum(self.largest, new.amax(), out=self.largest)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the priorities of all written slots."""
        number = int(self.replay.fill) * self.replay.num_envs
        return {"values": self.values[:number].clone(), "largest": self.largest.clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore `state_dict`, in place."""
        self.values.zero_()[: len(state["values"])].copy_(state["values"])
        self.largest.copy_(state["largest"])
