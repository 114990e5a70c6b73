"""Work on a batch in chunks that fit the caches of a CPU core, one thread for each chunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

MOST_WORKERS = 16
"""Beyond this Python's lock, held for some 5 % of a chunk, would keep them waiting."""

CPU_CHUNK = 4096
"""Samples whose activations one CPU thread computes at a time; they stay in its caches."""


def chunk_samples(minibatch: int) -> int:
    """Returns the samples of a chunk of a minibatch on the CPU: a quarter, or a half or all where that would be small.

    The settings alone decide, not the machine, so that equal runs have equal bits.
    """
    half, quarter = -(-minibatch // 2), -(-minibatch // 4)
    return max(CPU_CHUNK // 4, min(CPU_CHUNK // 2, half), min(CPU_CHUNK, quarter))


def most_workers() -> int:
    """Returns the number of chunks that can be under way at a time on the CPU."""
    return min(torch.get_num_threads(), MOST_WORKERS)


class Chunks:
    """Sums a function of indices over chunks of them.

    On the CPU an operation on a whole minibatch streams every activation through memory and ends with a barrier between
    threads. Here each thread takes chunks of its own, whose activations stay in its caches
    (benchmarks/updates/update_chunks.json). Sums are taken in the order of the chunks, so the result does not
    depend on which thread was faster, or on how many there are, up to MOST_WORKERS.

    On other devices there is one chunk. A `compiled` function is compiled in its first calls, for each shape of a chunk
    and for the number of torch's threads: one worker makes these, and the others find its code.
    """

    def __init__(self, device: torch.device, size: int, *, compiled: bool = False) -> None:
        self._size = max(1, size) if device.type == "cpu" else None
        self._cold = compiled
        self._pool: ThreadPoolExecutor | None = None

    def sum(self, function: Callable[[Tensor], Sequence[Tensor]], index: Tensor) -> list[Tensor]:
        """Calls `function` with each chunk of `index` and adds up the results, tensor by tensor."""
        parts = index.split(self._size) if self._size is not None else (index,)
        # A dispatch mode, such as one that counts operations, sees its own thread only.
        if len(parts) == 1 or _get_current_dispatch_mode() is not None:
            results = map(function, parts)
        elif self._cold:
            results, self._cold = self._workers().submit(lambda: [*map(function, parts)]).result(), False
        else:
            results = self._workers().map(function, parts)
        total, *others = results
        for result in others:
            total = [a + b for a, b in zip(total, result, strict=True)]
        return list(total)

    def _workers(self) -> ThreadPoolExecutor:
        if self._pool is None:
            workers = most_workers()
            # The number is each thread's own: threads that exist keep theirs.
            self._pool = ThreadPoolExecutor(
                workers,
                "chunk",
                initializer=torch.set_num_threads,
                initargs=(max(1, torch.get_num_threads() // MOST_WORKERS),),
            )
        return self._pool
