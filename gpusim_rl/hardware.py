"""CPUs, compiler and memory settings of this process. Nothing here imports torch."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path


def available_cpus() -> int:
    """Returns how many CPUs this process may use, by its affinity mask and its cgroup quota (containers, Slurm)."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_quota()
    return max(1, min(count, int(quota) if quota else count))


def has_compiler() -> bool:
    """Returns whether there is a C++ compiler, which torch.compile needs to build kernels for the CPU."""
    return any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++"))


def _cgroup_quota() -> float | None:
    """Returns the CPU quota of this process's cgroup (v2, then v1) [CPUs], or None without a limit."""
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
    """Limits how long torch's idle threads spin before they sleep. Call it before torch is imported.

    In GNU OpenMP a thread that waits for work spins for milliseconds. The spinning takes cores from threads that have
    work: from the physics, and from a second run on the same machine. Two runs on two cores then slow each other down
    several times more than they should (benchmarks/cpu_settings.py measures it). A value set by the user stays.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def tune_malloc() -> None:
    """Tells glibc to keep freed memory instead of returning it to the kernel. Without glibc it does nothing.

    Every update frees and allocates the same activations. By default glibc asks the kernel for blocks of that size each
    time. The page faults cost a large part of an update on the CPU (benchmarks/cpu_settings.py measures it).
    """
    if not sys.platform.startswith("linux"):
        return
    m_trim_threshold, m_mmap_threshold = -1, -3  # from malloc.h
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(m_mmap_threshold, 1 << 30)
        libc.mallopt(m_trim_threshold, (1 << 31) - 1)
