"""Load of the machine during a run, and how much memory the run may take."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pynvml

from gpusim_rl.hardware import available_cpus

CGROUP_MEMBERSHIP = Path("/proc/self/cgroup")
CGROUP_MOUNT = Path("/sys/fs/cgroup")
CHILDREN_EVERY = 10  # readings; to find them takes reading about every process of the machine


class SystemMonitor:
    """Reads the load of CPU and GPU once a second, in a thread of its own.

    CPU and memory are of this process and its children, 100 % being all CPUs that it may use. GPU
    numbers are of the whole GPU, whoever uses it; the load is the machine's, over the last minute.
    """

    def __init__(self, device: object, interval_s: float = 1.0) -> None:
        """Start the thread.

        Args:
            device: Device of the run, a torch.device or its name. On `cpu` no GPU numbers.
            interval_s: Time between two readings.
        """
        self._cpu = _Cpu()
        self._gpu = _Gpu(str(device)) if str(device).startswith("cuda") else None
        self._latest: dict[str, float | None] = self._named(None, None, None, None, None)
        self._interval_s = interval_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="system-monitor", daemon=True)
        self._thread.start()

    def latest(self) -> dict[str, float | None]:
        """Last reading, None where nothing is known (yet). Returns at once."""
        return dict(self._latest)

    def close(self) -> None:
        """Stop the thread; a second call does nothing."""
        self._stopping.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while not self._stopping.wait(self._interval_s):
            # One assignment: a reader sees the old reading or the new one, never half of each.
            gpu = self._gpu.read() if self._gpu else (None, None)
            self._latest = self._named(*self._cpu.read(), *gpu, psutil.getloadavg()[0])

    @staticmethod
    def _named(
        cpu_percent: float | None,
        memory_gb: float | None,
        gpu_percent: float | None,
        gpu_memory_gb: float | None,
        load: float | None,
    ) -> dict[str, float | None]:
        return {
            "system/cpu_percent": cpu_percent,
            "system/memory_gb": memory_gb,
            "system/gpu_percent": gpu_percent,
            "system/gpu_memory_gb": gpu_memory_gb,
            "system/load": load,
        }


class _Cpu:
    """CPU share and memory of this process and its children."""

    def __init__(self) -> None:
        self._available = available_cpus()
        self._self = psutil.Process()
        self._self.cpu_percent()  # counts from here
        self._children: dict[psutil.Process, psutil.Process] = {}
        self._readings = 0

    def read(self) -> tuple[float, float]:
        """Share of the available CPUs since the last call [%], resident memory now [GB]."""
        if self._readings % CHILDREN_EVERY == 0:
            # psutil counts from the last call on the same object: keep the object of every child.
            alive = self._self.children(recursive=True)
            self._children = {child: self._children.get(child, child) for child in alive}
        self._readings += 1
        percent, memory = 0.0, 0
        for process in (self._self, *self._children.values()):
            with suppress(psutil.Error):  # ended just now
                percent += process.cpu_percent()
                memory += process.memory_info().rss
        return percent / self._available, memory / 1e9


class _Gpu:
    """Load and memory of one CUDA device, as the driver reports them."""

    def __init__(self, device: str) -> None:
        import torch

        # By identity: CUDA_VISIBLE_DEVICES renumbers what torch sees, not what the driver sees.
        uuid = torch.cuda.get_device_properties(device).uuid
        self._handle = None
        with suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
        for prefix in ("GPU", "MIG"):
            with suppress(pynvml.NVMLError):
                self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"{prefix}-{uuid}")
                break

    def read(self) -> tuple[float | None, float | None]:
        """Busy time [%] and memory in use [GB]; None for what the driver does not tell."""
        percent = memory = None
        if self._handle is not None:
            with suppress(pynvml.NVMLError):
                percent = float(pynvml.nvmlDeviceGetUtilizationRates(self._handle).gpu)
            with suppress(pynvml.NVMLError):
                memory = int(pynvml.nvmlDeviceGetMemoryInfo(self._handle).used) / 1e9
        return percent, memory


def describe_gpus() -> dict[str, Any] | None:
    """Driver version, and name and memory of every GPU of the machine; None without a driver."""
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        devices = [
            {
                "name": pynvml.nvmlDeviceGetName(handle),
                "memory_gb": round(int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) / 1e9, 1),
            }
            for handle in handles
        ]
        return {"driver": pynvml.nvmlSystemGetDriverVersion(), "devices": devices}
    except pynvml.NVMLError:
        return None


def memory_available_bytes() -> int:
    """Memory that this process can still take: free on the machine and within its cgroup's limit.

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
    """The cgroups of this process, its own to the root, with the file names of version 2 or 1."""
    with suppress(OSError):
        for line in CGROUP_MEMBERSHIP.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            own = Path(path.lstrip("/"))
            for below in (own, *own.parents):
                if controllers == "":
                    yield CGROUP_MOUNT / below, "memory.max", "memory.current", "inactive_file"
                elif "memory" in controllers.split(","):
                    folder = CGROUP_MOUNT / "memory" / below
                    yield (
                        folder,
                        "memory.limit_in_bytes",
                        "memory.usage_in_bytes",
                        "total_inactive_file",
                    )
