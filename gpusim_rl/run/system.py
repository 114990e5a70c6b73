"""Load of the machine during a run."""

from __future__ import annotations

import threading
from contextlib import suppress

import psutil

from gpusim_rl.machine.hardware import available_cpus

NAMES = tuple(f"system/{name}" for name in ("cpu_percent", "memory_gb", "gpu_percent", "gpu_memory_gb", "load"))
CHILDREN_EVERY = 10  # samples; to find the children, psutil reads about every process of the machine


class SystemMonitor:
    """Background thread that samples CPU and GPU load every `interval_s` [s].

    CPU and memory include child processes; 100 % is all CPUs available to this process. GPU numbers include other
    processes. The load average is the machine's over one minute.
    """

    def __init__(self, device: object, interval_s: float = 1.0) -> None:
        self._cpu = _Cpu()
        self._gpu = _Gpu(str(device)) if str(device).startswith("cuda") else None
        self._latest: dict[str, float | None] = dict.fromkeys(NAMES)
        self._interval_s = interval_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="system-monitor", daemon=True)
        self._thread.start()

    def latest(self) -> dict[str, float | None]:
        """Return the last sample; unknown numbers are None."""
        return dict(self._latest)

    def close(self) -> None:
        """Stop the thread; idempotent."""
        self._stopping.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while not self._stopping.wait(self._interval_s):
            gpu = self._gpu.read() if self._gpu else (None, None)
            numbers = (*self._cpu.read(), *gpu, psutil.getloadavg()[0])
            # One assignment: a reader sees the old sample or the new one, never half of each.
            self._latest = dict(zip(NAMES, numbers, strict=True))


class _Cpu:
    def __init__(self) -> None:
        self._available = available_cpus()
        self._self = psutil.Process()
        self._self.cpu_percent()  # counts from here
        self._processes = {self._self: self._self}
        self._samples = 0

    def read(self) -> tuple[float, float]:
        """Return the CPU share since the last call [%] and resident memory [GB]."""
        if self._samples % CHILDREN_EVERY == 0:
            # psutil counts from the last call on the same object: keep the object of every process.
            alive = [self._self, *self._self.children(recursive=True)]
            self._processes = {process: self._processes.get(process, process) for process in alive}
        self._samples += 1
        percent, memory = 0.0, 0
        for process in self._processes.values():
            with suppress(psutil.Error):  # ended just now
                percent += process.cpu_percent()
                memory += process.memory_info().rss
        return percent / self._available, memory / 1e9


class _Gpu:
    def __init__(self, device: str) -> None:
        import pynvml
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
        """Return busy time [%] and memory in use [GB], None if unknown."""
        import pynvml

        percent = memory = None
        if self._handle is not None:
            with suppress(pynvml.NVMLError):
                percent = float(pynvml.nvmlDeviceGetUtilizationRates(self._handle).gpu)
            with suppress(pynvml.NVMLError):
                memory = int(pynvml.nvmlDeviceGetMemoryInfo(self._handle).used) / 1e9
        return percent, memory
