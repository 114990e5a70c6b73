"""Number of torch's threads on the CPU: in the whole process, and in a block of small work."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gpusim_rl.machine.hardware import available_cpus

SMALL_ROWS = 8192
"""Rows per thread in `VecEnv.step`.

With fewer rows, another thread saves no time. It can even cost time: where idle OpenMP threads spin (torch was imported
before `limit_openmp_spin`), they take CPU time from the physics. For 256 ants that is a sixth of a control step
(benchmarks/updates/rollout_threads.json).
"""

ROWS_PER_THREAD = 1024
"""Rows of a matrix that keep a thread busy, in updates and rollouts (benchmarks/updates/few_rows.json)."""


@contextmanager
def limit_torch_threads(rows: int, device: torch.device, per_thread: int = SMALL_ROWS) -> Iterator[None]:
    """Limits torch's threads inside a `with` block to one per `per_thread` rows; it never raises their number.

    It is for tensors with this number of rows on the CPU. A Python thread that starts inside the block keeps the
    limited number: torch copies it then.
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
    """Gives torch a thread for each CPU of this process, unless the user chose a number, which torch has followed.

    `batch_rows` are those of the largest matrices of a training; None for an environment alone. Threads that share few
    rows wait for each other longer than they work, so there is one for every ROWS_PER_THREAD at most.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return
    threads = available_cpus()
    if batch_rows is not None:
        threads = min(threads, max(1, batch_rows // ROWS_PER_THREAD))
    torch.set_num_threads(threads)
