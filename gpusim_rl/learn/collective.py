"""Sums over the processes that learn together; a process that learns alone has nothing to add."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor


class Collective:
    """A process that learns alone; `distributed.data_parallel` has one of several.

    All processes must call the same methods in the same order.

    Attributes:
        rank: Number of the process.
        size: Number of processes.
        summing_s: Time so far in sums, with the wait for the slowest process [s]. None where the host does not wait
            for a sum: alone, and on CUDA.
    """

    rank: int = 0
    size: int = 1
    summing_s: float | None = None

    def sum(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns the sums over all processes of floating-point tensors of one type; they may share their memory."""
        return list(tensors)

    def mean(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns the means over all processes."""
        return self.sum(tensors) if self.size == 1 else [total / self.size for total in self.sum(tensors)]

    def launches_apart(self, launch_between: Callable[[Callable[[], None]], None]) -> AbstractContextManager[None]:
        """Takes no sum in the block: hands over a function that takes it, between two recordings of a CUDA graph."""
        return nullcontext()

    def share(self, value: Any) -> Any:
        """Returns the value of the first process, plain data; waits for it on the host."""
        return value

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of all processes in the first one, in order; an empty list in the others."""
        return [value]

    def run_dir(self, path: str | None) -> str:
        """Returns the run folder, which the first process has opened; processes that are restarted continue it."""
        return self.share(path)

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """Returns of each flag whether a process has it set; waits for all of them on the host."""
        return flags


ALONE = Collective()
