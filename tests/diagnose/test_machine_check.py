"""Machine checks: every problem comes with a fix."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys

import pytest

from gpusim_rl.diagnose import machine_check
from gpusim_rl.diagnose.machine_check import Check, Gpu, disk_check, gpu_checks, memory_check
from helpers.commands import ROOT

DRIVER = {"driver": "580.1", "devices": [{"name": "Giant", "memory_gb": 80.0}]}
GIANT = Gpu("Giant", "9.0", 80.0, "bf16")


@pytest.mark.parametrize(
    ("driver", "built_for", "gpus", "visible", "state", "text", "fix"),
    [
        (None, None, [], None, "ok", "CPU", ""),
        (DRIVER, None, [], None, "warning", "driver 580.1, GPUs: Giant; ", "CUDA"),
        (DRIVER, "13.0", [], "", "warning", "CUDA_VISIBLE_DEVICES=''", "unset CUDA_VISIBLE_DEVICES"),
        (DRIVER, "13.0", [], None, "warning", "torch cannot use them", "CUDA than 13.0"),
        (DRIVER, "13.0", [Gpu("Old", "5.2", 4.0, False, "no kernel")], None, "failed", "no kernel", "device=cpu"),
        (DRIVER, "13.0", [Gpu("Full", "9.0", 80.0, True, "out of memory")], None, "failed", "memory", "nvidia-smi"),
        (DRIVER, "13.0", [Gpu("Busy", "9.0", 80.0, True, "are busy or")], None, "failed", "busy", "nvidia-smi"),
        (DRIVER, "13.0", [Gpu("Less", "7.5", 16.0, "fp16")], None, "ok", "networks run in fp16", ""),
        (DRIVER, "13.0", [GIANT], None, "ok", "cuda:0 Giant, capability 9.0, 80 GB, networks run in bf16", ""),
    ],
)
def test_gpu_check_reports_state_and_fix(driver, built_for, gpus, visible, state, text, fix):
    [check] = gpu_checks(driver, built_for, gpus, visible)
    assert check.state == state and text in check.text and fix in check.fix
    assert bool(check.fix) == (state != "ok")


def test_little_memory_is_a_warning():
    assert memory_check(16.0).state == "ok"
    assert memory_check(1.0).state == "warning" and "num_envs=512" in memory_check(1.0).fix


def test_unwritable_folder_fails(tmp_path, monkeypatch):
    assert disk_check(tmp_path / "a" / "runs").state in ("ok", "warning")

    def refuse(**_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(machine_check.tempfile, "TemporaryFile", refuse)
    check = disk_check(tmp_path / "runs")
    assert check.state == "failed" and str(tmp_path) in check.text and "Read-only" in check.text


def test_unwritable_kernel_cache_is_reported(command, tmp_path):
    """Run in a separate process, because Warp creates the folder only once at start."""
    (tmp_path / "file").touch()
    script = tmp_path / "check.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from gpusim_rl.diagnose.machine_check import _kernel_cache\n"
        "print(_kernel_cache())\n"
    )
    line, fix = command(sys.executable, script, env={"WARP_CACHE_PATH": str(tmp_path / "file")}).stdout.splitlines()
    assert line.startswith(("warning  kernels    ", "failed   kernels    ")) and str(tmp_path / "file") in line
    assert line.endswith("sim=mjwarp and sim=newton cannot run") and "WARP_CACHE_PATH" in fix


def test_little_disk_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(machine_check, "LITTLE_DISK_GB", 1e9)
    assert disk_check(tmp_path).state == "warning"


def test_package_that_fails_to_import_ends_checks(tmp_path, monkeypatch):
    real = importlib.import_module

    def broken(name, *rest):
        if name == "mujoco":
            raise ImportError("libGL.so.1: cannot open shared object file\nmore")
        return real(name, *rest)

    monkeypatch.setattr(importlib, "import_module", broken)
    checks = machine_check.check_machine(tmp_path)
    [failed] = [check for check in checks if check.state == "failed"]
    assert failed.text.startswith("mujoco ") and "libGL.so.1: " in failed.text
    assert "\n" not in failed.text and not any(check.name == "rendering" for check in checks)


def test_missing_package_is_reported(monkeypatch):
    version = machine_check.installed_version
    monkeypatch.setattr(machine_check, "installed_version", lambda name: None if "warp" in name else version(name))
    fixes = {check.text: check.fix for check in machine_check._packages()}
    assert fixes["mujoco-warp is not installed"] == "pip install mujoco-warp"


@pytest.mark.parametrize(("cuda", "state"), [(False, "warning"), (True, "failed")])
def test_missing_mujoco_warp_fails_only_with_gpu(monkeypatch, cuda, state):
    version = machine_check.installed_version
    monkeypatch.setattr(sys, "version_info", (3, 10, 13, "final", 0))
    monkeypatch.setattr(machine_check, "installed_version", lambda name: None if "warp" in name else version(name))
    monkeypatch.setitem(sys.modules, "warp", None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: cuda)
    [packages] = machine_check._packages()
    assert packages.state == "ok"
    kernels = machine_check._kernel_cache()
    assert kernels.state == state and "Python 3.11 or later" in kernels.text


def test_fix_is_printed_below_check():
    text = str(Check("disk", "warning", "0.1 GB free", "free some"))
    assert text.splitlines() == ["warning  disk       0.1 GB free", f"{'':<19} fix: free some"]
