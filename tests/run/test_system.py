"""Tests of system metrics: background readings, GPUs, memory limits of containers."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pynvml
import pytest
import torch

from gpusim_rl.machine import hardware
from gpusim_rl.machine.hardware import available_cpus, describe_gpus, memory_available_bytes
from gpusim_rl.run import system
from gpusim_rl.run.system import SystemMonitor

NAMES = {"system/cpu_percent", "system/memory_gb", "system/gpu_percent", "system/gpu_memory_gb", "system/load"}


def wait_for_reading(monitor: SystemMonitor, expected: Callable[[Any], bool] = lambda _: True) -> dict[str, Any]:
    """Return the first reading that is as expected, or the latest after 10 s."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        reading = monitor.latest()
        if reading["system/memory_gb"] is not None and expected(reading):
            return reading
        time.sleep(0.01)
    return monitor.latest()


@pytest.fixture
def monitor():
    monitor = SystemMonitor("cpu", interval_s=0.3)
    yield monitor
    monitor.close()


def test_values_are_none_before_first_reading(monitor):
    assert monitor.latest() == dict.fromkeys(NAMES)


@pytest.mark.serial
def test_cpu_percent_is_relative_to_available_cpus(monitor):
    wait_for_reading(monitor)
    began, used_s, seen = time.monotonic(), time.process_time(), []
    while len(seen) < 4 and time.monotonic() - began < 20:  # one busy thread
        if monitor.latest()["system/cpu_percent"] not in seen:
            seen.append(monitor.latest()["system/cpu_percent"])
    share = (time.process_time() - used_s) / (time.monotonic() - began)  # below 1 on a shared machine
    assert 50 * share / available_cpus() < max(seen) < 125 / available_cpus()


@pytest.mark.serial
def test_child_processes_count_in_memory_and_cpu(monitor, monkeypatch):
    monkeypatch.setattr(system, "CHILDREN_EVERY", 1)
    before = wait_for_reading(monitor)["system/memory_gb"]
    script = "x = bytearray(300_000_000)\nprint(flush=True)\nwhile True: pass"
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    child.stdout.readline()
    busy = 5 / available_cpus()  # one busy child on a possibly busy machine
    reading = wait_for_reading(
        monitor, lambda now: now["system/memory_gb"] > before + 0.2 and now["system/cpu_percent"] > busy
    )
    child.kill()
    child.wait()
    child.stdout.close()
    assert reading["system/memory_gb"] == pytest.approx(before + 0.31, abs=0.1)
    assert reading["system/cpu_percent"] > busy


def test_latest_is_non_blocking_and_close_ends_the_thread():
    threads = threading.active_count()
    monitor = SystemMonitor("cpu", interval_s=1000.0)
    began = time.monotonic()
    for _ in range(1000):
        monitor.latest()
    monitor.close()
    monitor.close()
    assert time.monotonic() - began < 100  # not the interval
    assert threading.active_count() == threads


def test_process_exits_with_unclosed_monitor():
    script = "from gpusim_rl.run.system import SystemMonitor; SystemMonitor('cpu', 0.01)"
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", script], cwd=root, timeout=120).returncode == 0


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch):
    """Driver with two GPUs; torch sees the second as cuda:0."""
    gpu = SimpleNamespace(percent=87, used=5 * 10**9, mig=False)

    def by_uuid(uuid):
        if uuid != ("MIG-beef" if gpu.mig else "GPU-beef"):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return "second"

    def utilization(handle):
        assert handle == "second"
        if gpu.mig:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return SimpleNamespace(gpu=gpu.percent)

    functions = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: ["first", "second"][index],
        "nvmlDeviceGetHandleByUUID": by_uuid,
        "nvmlDeviceGetName": lambda handle: f"Giant {handle}",
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(used=gpu.used, total=80 * 10**9),
        "nvmlDeviceGetUtilizationRates": utilization,
        "nvmlSystemGetDriverVersion": lambda: "580.1",
    }
    for name, function in functions.items():
        monkeypatch.setattr(pynvml, name, function)
    properties = SimpleNamespace(uuid="beef")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return gpu


@pytest.mark.parametrize(("mig", "percent"), [(False, 87.0), (True, None)])
def test_gpu_values_are_of_the_gpu_in_use(fake_gpu, mig, percent):
    fake_gpu.mig = mig
    monitor = SystemMonitor(torch.device("cuda:0"), interval_s=0.01)
    reading = wait_for_reading(monitor)
    monitor.close()
    assert (reading["system/gpu_percent"], reading["system/gpu_memory_gb"]) == (percent, 5.0)


def test_gpus_are_described_with_their_driver(fake_gpu):
    assert describe_gpus() == {
        "driver": "580.1",
        "devices": [{"name": "Giant first", "memory_gb": 80.0}, {"name": "Giant second", "memory_gb": 80.0}],
    }


def test_missing_driver_means_no_gpus(monkeypatch):
    def fail():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    assert describe_gpus() is None


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Machine with 64 GB free and a process in the cgroups of the given files."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=64 * 10**9))
    monkeypatch.setattr(hardware, "CGROUP_MEMBERSHIP", tmp_path / "self")
    monkeypatch.setattr(hardware, "CGROUP_MOUNT", tmp_path / "mount")

    def make(membership: str, files: dict[str, str]) -> None:
        (tmp_path / "self").write_text(membership)
        for name, content in files.items():
            path = tmp_path / "mount" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)

    return make


def test_cgroup_v2_limit_excludes_page_cache(cgroups):
    assert memory_available_bytes() == 64 * 10**9, "no cgroups: free memory of the machine"
    cgroups(
        "0::/job\n",
        {
            "job/memory.max": f"{10 * 10**9}\n",
            "job/memory.current": f"{4 * 10**9}\n",
            "job/memory.stat": f"anon 1\ninactive_file {3 * 10**9}\nactive_file 5\n",
        },
    )
    assert memory_available_bytes() == 9 * 10**9


def test_cgroup_limit_of_an_ancestor_applies(cgroups):
    files = {
        f"{folder}/memory.{name}": value
        for folder, limit in (("slurm", str(8 * 10**9)), ("slurm/job/step", "max"))
        for name, value in (("max", limit), ("current", "0"), ("stat", "inactive_file 0\n"))
    }
    cgroups("0::/slurm/job/step\n", files)
    assert memory_available_bytes() == 8 * 10**9


def test_cgroup_v1_limit_applies_inside_a_container(cgroups):
    cgroups(
        "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/\n",
        {
            "memory/memory.limit_in_bytes": f"{6 * 10**9}\n",
            "memory/memory.usage_in_bytes": f"{2 * 10**9}\n",
            "memory/memory.stat": "inactive_file 9\ntotal_inactive_file 1000\n",
        },
    )
    assert memory_available_bytes() == 4 * 10**9 + 1000
