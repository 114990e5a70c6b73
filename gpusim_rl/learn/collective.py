"""Collective operations of processes that learn together; `distributed.data_parallel` implements several processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor


class Collective:
    """Collectives of a single process: no-ops. All processes of a run must call the same methods in the same order.

    Attributes:
        summing_s: Total time in sums, including waits for other processes [s]; None if the host never waits (CUDA).
    """

    rank: int = 0
    size: int = 1
    summing_s: float | None = None

    def sum(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Sum floating-point tensors of one dtype over all processes; the results may share memory."""
        return list(tensors)

    def mean(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Average floating-point tensors over all processes; see `sum`."""
        return self.sum(tensors) if self.size == 1 else [total / self.size for total in self.sum(tensors)]

    def defer_launches(self, launch_between: Callable[[Callable[[], None]], None]) -> AbstractContextManager[None]:
        """In the block, pass each sum to `launch_between`, which schedules it between replays of two CUDA graphs."""
        return nullcontext()

    def share(self, value: Any) -> Any:
        """Broadcast plain data from the first process; blocks the host."""
        return value

    def gather(self, value: Any) -> list[Any]:
        """Gather the values of all processes, ordered by rank, in the first process; return an empty list in others."""
        return [value]

    def run_dir(self, path: str | None) -> str:
        """Return the first process's run folder; processes restarted by torchrun continue in it."""
        return self.share(path)

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """Return, for each flag, whether any process has set it; blocks the host."""
        return flags


ALONE = Collective()
