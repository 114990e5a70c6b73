"""What this process may use of the machine."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path


def available_cpus() -> int:
    """CPUs that this process may use: its affinity mask, further limited by a cgroup quota (containers, Slurm)."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_quota()
    return max(1, min(count, int(quota) if quota else count))


def has_compiler() -> bool:
    """Whether torch.compile can build kernels for the CPU: it needs a C++ compiler."""
    return any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++"))


def _cgroup_quota() -> float | None:
    """CPU quota of this process's cgroup in CPUs (v2, then v1), or None without a limit."""
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        pass
    try:
        limit = int(Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us").read_text())
        period = int(Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us").read_text())
        return None if limit <= 0 else limit / period
    except (OSError, ValueError):
        return None


def limit_openmp_spin() -> None:
    """Lets torch's idle threads sleep soon; call it before torch is imported.

    GNU OpenMP lets a thread that waits for work spin for milliseconds. Between physics steps, and beside a second run
    on the same machine, that spinning takes the cores from threads that have work: two runs on two cores slow each
    other down several times more than they should (benchmarks/cpu_settings.py measures it). A value that the user
    has set stays.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def tune_malloc() -> None:
    """Tells glibc to keep freed memory instead of returning it to the kernel; nothing happens elsewhere.

    An update frees and takes the same activations again and again. By default glibc maps blocks of that size anew
    each time, and the page faults cost a good part of an update on the CPU (benchmarks/cpu_settings.py measures it).
    """
    if not sys.platform.startswith("linux"):
        return
    m_trim_threshold, m_mmap_threshold = -1, -3  # from malloc.h
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(m_mmap_threshold, 1 << 30)
        libc.mallopt(m_trim_threshold, (1 << 31) - 1)
