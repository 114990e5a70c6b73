"""What this process may use of the machine."""

from __future__ import annotations

import os
from pathlib import Path


def available_cpus() -> int:
    """CPUs that this process may use: its affinity mask, further limited by a cgroup quota (containers, Slurm)."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_quota()
    return max(1, min(count, int(quota) if quota else count))


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
