"""CPUs, GPUs, memory and compiler that this process may use. Nothing here imports torch."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from gpusim_rl.errors import ConfigError, address_space_limit_bytes

LEAST_ADDRESS_SPACE = 800_000_000
"""Address space of a training of few envs on the CPU, with a torch without CUDA [bytes]."""

CGROUP_MEMBERSHIP = Path("/proc/self/cgroup")
CGROUP_MOUNT = Path("/sys/fs/cgroup")


def available_cpus() -> int:
    """Returns how many CPUs this process may use, by its affinity mask and its cgroup quota (containers, Slurm).

    The processes that torchrun has started on this machine share them.
    """
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_quota()
    return max(1, min(count, int(quota) if quota else count) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def has_compiler() -> bool:
    """Returns whether there is a C++ compiler, which torch.compile needs to build kernels for the CPU."""
    return any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++"))


def _cgroup_quota() -> float | None:
    """Returns the CPU quota of this process's cgroup (v2, then v1) [CPUs], or None without a limit."""
    with suppress(OSError, ValueError):
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    with suppress(OSError, ValueError):
        limit = int(Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us").read_text())
        period = int(Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us").read_text())
        return None if limit <= 0 else limit / period
    return None


def check_address_space() -> None:
    """Raise ConfigError where the address space (`ulimit -v`) is too small for torch and MuJoCo, which would crash."""
    limit = address_space_limit_bytes()
    if limit is not None and limit < LEAST_ADDRESS_SPACE:
        raise ConfigError(
            f"out of memory: the address space is limited to {limit / 1e9:.2g} GB, and torch and MuJoCo alone take"
            f" {LEAST_ADDRESS_SPACE / 1e9:.2g} GB; try ulimit -v unlimited"
        )


def limit_openmp_spin() -> None:
    """Limits how long torch's idle threads spin before they sleep. Call it before torch is imported.

    In GNU OpenMP a thread that waits for work spins for milliseconds, which takes cores from the physics and from a
    second run on the same machine. A value set by the user stays.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def tune_malloc() -> None:
    """Tells glibc to keep freed memory instead of returning it to the kernel. Without glibc it does nothing.

    Every update frees and allocates the same activations; by default their page faults cost a large share of it.
    """
    if not sys.platform.startswith("linux"):
        return
    m_trim_threshold, m_mmap_threshold = -1, -3  # from malloc.h
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(m_mmap_threshold, 1 << 30)
        libc.mallopt(m_trim_threshold, (1 << 31) - 1)


def describe_gpus() -> dict[str, Any] | None:
    """Returns the driver version, and name and memory of every GPU of the machine; None without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        memory_gb = [round(int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) / 1e9, 1) for handle in handles]
        names = [pynvml.nvmlDeviceGetName(handle) for handle in handles]
        devices = [{"name": name, "memory_gb": size} for name, size in zip(names, memory_gb, strict=True)]
        return {"driver": pynvml.nvmlSystemGetDriverVersion(), "devices": devices}
    except pynvml.NVMLError:
        return None


def has_cuda() -> bool:
    """Return whether torch will find a GPU, without importing torch, which takes seconds.

    A driver too old for this build of torch is not noticed.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip()
    torch = importlib.util.find_spec("torch")
    if visible in ("", "-1") or torch is None or torch.origin is None or describe_gpus() is None:
        return False
    version = Path(torch.origin).with_name("version.py").read_text(encoding="utf-8")
    return re.search(r"^cuda\b.*= *['\"]", version, re.MULTILINE) is not None


def memory_available_bytes() -> int:
    """Returns the memory that this process can still take: free on the machine and within its cgroup's limit.

    The limit may sit on any ancestor of the process's own cgroup (containers, Slurm, systemd).
    """
    available = psutil.virtual_memory().available
    for folder, limit_file, usage_file, cache_key in _memory_cgroups():
        with suppress(OSError, ValueError):  # no such file, or "max": no limit here
            limit = int((folder / limit_file).read_text())
            used = int((folder / usage_file).read_text())
            # File cache counts as used but is given back under pressure.
            cache = re.search(rf"^{cache_key} (\d+)$", (folder / "memory.stat").read_text(), re.MULTILINE)
            available = min(available, limit - used + (int(cache.group(1)) if cache else 0))
    return max(0, available)


def _memory_cgroups() -> Iterator[tuple[Path, str, str, str]]:
    """Yield the cgroups of this process up to the root: folder, files of limit and usage, and key of the cache."""
    v1 = "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
    v2 = "", "memory.max", "memory.current", "inactive_file"
    with suppress(OSError):
        for line in CGROUP_MEMBERSHIP.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "" or "memory" in controllers.split(","):
                root, limit, used, cache = v1 if controllers else v2
                group = Path(path.lstrip("/"))
                for folder in (group, *group.parents):
                    yield CGROUP_MOUNT / root / folder, limit, used, cache
