"""CPUs, GPUs, memory and compiler of this process. Does not import torch."""

from __future__ import annotations

import ctypes
import gc
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

LEAST_ADDRESS_SPACE = 800_000_000  # address space of a small training run with a CPU build of torch [bytes]

CGROUP_MEMBERSHIP = Path("/proc/self/cgroup")
CGROUP_MOUNT = Path("/sys/fs/cgroup")


def available_cpus() -> int:
    """Return the number of CPUs within affinity mask and cgroup quota, divided among the node's torchrun workers."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_quota()
    return max(1, min(count, int(quota) if quota else count) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def has_compiler() -> bool:
    """Return whether torch.compile finds a C++ compiler for CPU kernels."""
    return any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++"))


def _cgroup_quota() -> float | None:
    """Return the CPU quota of this cgroup (v2, then v1) [CPUs], None if unlimited."""
    with suppress(OSError, ValueError):
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    with suppress(OSError, ValueError):
        limit = int(Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us").read_text())
        period = int(Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us").read_text())
        return None if limit <= 0 else limit / period
    return None


def check_address_space() -> None:
    """Raise ConfigError if `ulimit -v` is too small for torch and MuJoCo, which would otherwise crash."""
    limit = address_space_limit_bytes()
    if limit is not None and limit < LEAST_ADDRESS_SPACE:
        least, has = LEAST_ADDRESS_SPACE / 1e9, limit / 1e9
        problem = f"out of memory: the address space is limited to {has:.2g} GB; torch and MuJoCo need {least:.2g} GB"
        raise ConfigError(problem, hint="Try ulimit -v unlimited")


def import_torch() -> None:
    """Import torch with less spinning of idle OpenMP threads, which takes CPU time from the physics."""
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    if "torch" not in sys.modules and gc.isenabled():
        gc.disable()  # or collections would traverse torch's 500,000 permanent objects, now and later (0.3 s)
        try:
            importlib.import_module("torch")
            gc.freeze()
        finally:
            gc.enable()


def tune_malloc() -> None:
    """Make glibc keep freed memory; otherwise page faults take a large share of update time. No-op without glibc."""
    if not sys.platform.startswith("linux"):
        return
    m_trim_threshold, m_mmap_threshold = -1, -3  # malloc.h
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(m_mmap_threshold, 1 << 30)
        libc.mallopt(m_trim_threshold, (1 << 31) - 1)


def describe_gpus() -> dict[str, Any] | None:
    """Return the driver version, and name and memory [GB] of each GPU; None without a driver."""
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
    """Return whether torch will find a GPU, without importing torch. Does not detect a driver too old for torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip()
    torch = importlib.util.find_spec("torch")
    if visible in ("", "-1") or torch is None or torch.origin is None or describe_gpus() is None:
        return False
    version = Path(torch.origin).with_name("version.py").read_text(encoding="utf-8")
    return re.search(r"^cuda\b.*= *['\"]", version, re.MULTILINE) is not None


def memory_available_bytes() -> int:
    """Return the memory available to this process [bytes]: free on the machine and within its cgroup limits."""
    available = psutil.virtual_memory().available
    for folder, limit_file, usage_file, cache_key in _memory_cgroups():
        with suppress(OSError, ValueError):  # no such file, or "max": no limit here
            limit = int((folder / limit_file).read_text())
            used = int((folder / usage_file).read_text())
            # File cache counts as used but is released under pressure.
            cache = re.search(rf"^{cache_key} (\d+)$", (folder / "memory.stat").read_text(), re.MULTILINE)
            available = min(available, limit - used + (int(cache.group(1)) if cache else 0))
    return max(0, available)


def _memory_cgroups() -> Iterator[tuple[Path, str, str, str]]:
    """Yield folder, limit file, usage file and file-cache key for this process's memory cgroup and its parents."""
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
