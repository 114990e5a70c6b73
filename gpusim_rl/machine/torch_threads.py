"""Number of torch's CPU threads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gpusim_rl.machine.hardware import available_cpus

SMALL_ROWS = 8192
"""Minimum rows per thread in `VecEnv.step`: with fewer, spinning OpenMP threads take a sixth of a control step of 256
ants (benchmarks/updates/rollout_threads.json).
"""

ROWS_PER_THREAD = 1024  # matrix rows that keep a thread busy in updates and rollouts (benchmarks/updates/few_rows.json)


@contextmanager
def limit_torch_threads(rows: int, device: torch.device, per_thread: int = SMALL_ROWS) -> Iterator[None]:
    """Limit torch's threads in the block to one per `per_thread` rows of CPU tensors; never increase their number.

    Python threads started in the block keep the limit.
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


def use_available_cpus(batch_rows: int | None = None) -> None:
    """Use a torch thread per available CPU, at most one per `ROWS_PER_THREAD` rows, unless `OMP_NUM_THREADS` is set."""
    if "OMP_NUM_THREADS" in os.environ:
        return
    threads = available_cpus()
    if batch_rows is not None:
        threads = min(threads, max(1, batch_rows // ROWS_PER_THREAD))
    torch.set_num_threads(threads)
