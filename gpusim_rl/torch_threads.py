"""Limits torch's threads for small work on the CPU.

`gpusim_rl/run/devices.py:use_available_cpus` sets the number of threads of the whole process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

SMALL_ROWS = 8192
"""Rows per thread in `VecEnv.step`. The trainer's rollout around it uses `run/devices.py:ROWS_PER_THREAD` (1024).

With fewer rows, another thread saves no time. It can even cost time: where idle OpenMP threads spin (torch was imported
before `limit_openmp_spin`), they take CPU time from the physics. For 256 ants that is a sixth of a control step
(benchmarks/rollout_threads.json).
"""


@contextmanager
def limit_torch_threads(rows: int, device: torch.device, per_thread: int = SMALL_ROWS) -> Iterator[None]:
    """Limits torch's threads inside a `with` block to one per `per_thread` rows; it never raises their number.

    A Python thread that starts inside the block keeps the limited number: torch copies it then.

    Args:
        rows: Rows of the tensors in the block.
        device: Device of the tensors; the limit is for the CPU only.
        per_thread: Rows per thread.
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
