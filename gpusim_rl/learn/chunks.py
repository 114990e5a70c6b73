"""Chunked computation on CPUs: one cache-sized chunk per thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

MOST_WORKERS = 16  # maximum worker threads; more would wait for the GIL (held for about 5 % of a chunk)

CPU_CHUNK = 4096  # maximum samples per chunk, so that activations stay in a core's caches


def chunk_samples(minibatch: int) -> int:
    """Return the chunk size [samples]: a quarter of a minibatch, or more if that would be small.

    Independent of the machine, so that runs are reproducible bit for bit.
    """
    half, quarter = -(-minibatch // 2), -(-minibatch // 4)
    return max(CPU_CHUNK // 4, min(CPU_CHUNK // 2, half), min(CPU_CHUNK, quarter))


def most_workers() -> int:
    """Return the maximum number of concurrent chunks."""
    return min(torch.get_num_threads(), MOST_WORKERS)


class Chunks:
    """Sum of a function over chunks of indices; a single chunk except on CPUs.

    On CPUs minibatch-wide operations stream activations through memory and end with a thread barrier; chunks per thread
    stay in the caches (benchmarks/updates/update_chunks.json). Sums are in chunk order, independent of thread timing.
    With `compiled`, a single worker runs all chunks of the first call, which compiles the function.
    """

    def __init__(self, device: torch.device, size: int, *, compiled: bool = False) -> None:
        self._size = max(1, size) if device.type == "cpu" else None
        self._cold = compiled
        self._pool: ThreadPoolExecutor | None = None

    def sum(self, function: Callable[[Tensor], Sequence[Tensor]], index: Tensor) -> list[Tensor]:
        """Add up the results of `function` over the chunks of `index`, tensor by tensor."""
        parts = index.split(self._size) if self._size is not None else (index,)
        # A dispatch mode, such as an operation counter, sees only its own thread.
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
            inner = max(1, torch.get_num_threads() // MOST_WORKERS)
            # torch's thread count is per thread: set it in each worker.
            self._pool = ThreadPoolExecutor(most_workers(), "chunk", torch.set_num_threads, (inner,))
        return self._pool
