"""Machine load during a run."""

from __future__ import annotations

import itertools
import threading
from contextlib import suppress
from typing import Any

import psutil
import pynvml
import torch

from gpusim_rl.machine.hardware import available_cpus

NAMES = tuple(f"system/{name}" for name in ("cpu_percent", "memory_gb", "gpu_percent", "gpu_memory_gb", "load"))
CHILDREN_EVERY = 10  # samples between searches for child processes; each search reads all processes of the machine


class SystemMonitor:
    """Background thread that samples CPU and GPU load every `interval_s` [s].

    CPU (100 %: all available CPUs) and memory cover this process and its children; GPU and load, all processes.
    """

    def __init__(self, device: object, interval_s: float = 1.0) -> None:
        self._gpu = _nvml_handle(str(device)) if str(device).startswith("cuda") else None
        self._num_cpus, self._self = available_cpus(), psutil.Process()
        self._self.cpu_percent()  # starts the measurement
        self._processes = {self._self: self._self}
        self._latest: dict[str, float | None] = dict.fromkeys(NAMES)
        self._interval_s, self._stopping = interval_s, threading.Event()
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
        for sample in itertools.count():
            if self._stopping.wait(self._interval_s):
                return
            if sample % CHILDREN_EVERY == 0:  # keep the objects: psutil measures since the last call on the same object
                alive = [self._self, *self._self.children(recursive=True)]
                self._processes = {process: self._processes.get(process, process) for process in alive}
            numbers = (*self._read_cpu(), *self._read_gpu(), psutil.getloadavg()[0])
            self._latest = dict(zip(NAMES, numbers, strict=True))  # one assignment: readers never see a mixed sample

    def _read_cpu(self) -> tuple[float, float]:
        """Return CPU utilisation since the last call [%] and resident memory [GB]."""
        percent, memory = 0.0, 0
        for process in self._processes.values():
            with suppress(psutil.Error):  # it has ended
                percent += process.cpu_percent()
                memory += process.memory_info().rss
        return percent / self._num_cpus, memory / 1e9

    def _read_gpu(self) -> tuple[float | None, float | None]:
        """Return GPU utilisation [%] and memory in use [GB]; None if unknown."""
        percent = memory = None
        if self._gpu is not None:
            with suppress(pynvml.NVMLError):
                percent = float(pynvml.nvmlDeviceGetUtilizationRates(self._gpu).gpu)
            with suppress(pynvml.NVMLError):
                memory = int(pynvml.nvmlDeviceGetMemoryInfo(self._gpu).used) / 1e9
        return percent, memory


def _nvml_handle(device: str) -> Any:
    """Return the NVML handle by UUID: CUDA_VISIBLE_DEVICES renumbers devices for torch, but not for the driver."""
    uuid = torch.cuda.get_device_properties(device).uuid
    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
    for prefix in ("GPU", "MIG"):
        with suppress(pynvml.NVMLError):
            return pynvml.nvmlDeviceGetHandleByUUID(f"{prefix}-{uuid}")
    return None
