"""How many threads torch takes for a piece of work on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

SMALL_ROWS = 8192
"""Rows of the small tensors of tasks and rollouts that make a thread worth it.

With fewer, others save nothing. Where idle OpenMP threads spin, as in a process that imported torch before us, they
even take time from the threads of the physics: a sixth of a control step of 256 ants (benchmarks/rollout_threads.json).
"""


@contextmanager
def limit_torch_threads(rows: int, device: torch.device, per_thread: int = SMALL_ROWS) -> Iterator[None]:
    """Lets torch use as many threads in the block as the rows keep busy, and no more than it has.

    A thread that begins in the block keeps that number, as torch has it.

    Args:
        rows: Of the tensors in the block.
        device: Where they are; on CUDA nothing changes.
        per_thread: Rows that a thread is worth.
    """
    threads = torch.get_num_threads()
    fewer = max(1, rows // per_thread)
    if device.type != "cpu" or fewer >= threads:
        yield
        return
    torch.set_num_threads(fewer)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
