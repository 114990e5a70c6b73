"""Machine checks, one line each, with a fix."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from gpusim_rl.errors import ConfigError, first_line, is_out_of_memory, on_one_line
from gpusim_rl.files.provenance import describe_environment, installed_version
from gpusim_rl.machine.hardware import available_cpus, describe_gpus, memory_available_bytes
from gpusim_rl.public import __version__
from gpusim_rl.settings.simulators import WARP_PYTHON

LITTLE_MEMORY_GB = 2.0  # enough for Cartpole, barely for Ant at 4096 envs
LITTLE_DISK_GB = 1.0  # enough for some checkpoints and videos

# Modules by package: NEEDED for every training run, OF_SIMULATORS for some simulators.
NEEDED = {"torch": "torch", "numpy": "numpy", "mujoco": "mujoco", "hydra-core": "hydra"}
OF_SIMULATORS = {"mujoco-warp": "mujoco_warp", "warp-lang": "warp", "newton": "newton"}


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check."""

    name: str
    state: Literal["ok", "warning", "failed"]
    text: str
    fix: str = ""

    def __str__(self) -> str:
        line = f"{self.state:<8} {self.name:<10} {on_one_line(self.text)}"
        return f"{line}\n{'':<19} fix: {on_one_line(self.fix)}" if self.fix else line


@dataclass(frozen=True, slots=True)
class Gpu:
    """GPU as torch sees it."""

    name: str
    capability: str
    memory_gb: float
    precision: str
    problem: str = ""  # reason why torch cannot use it


def check_machine(runs: Path) -> list[Check]:
    """Run all checks except those that train; `runs` is the folder for run folders."""
    host = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    system = Check("system", "ok", f"gpusim-rl {__version__}, {host}")
    checks = [system, _cpus(), memory_check(memory_available_bytes() / 1e9), *_packages()]
    if any(check.state == "failed" for check in checks):
        return checks  # the other checks import the broken package
    return [*checks, *_gpus(), _kernel_cache(), _rendering(), _wandb(), disk_check(runs)]


def memory_check(free_gb: float) -> Check:
    """Check the RAM available to this process [GB]."""
    total = psutil.virtual_memory().total / 1e9
    text = f"{free_gb:.1f} of {total:.1f} GB available"
    if free_gb < LITTLE_MEMORY_GB:
        return Check("memory", "warning", text, "stop other programs, or train fewer envs: num_envs=512")
    return Check("memory", "ok", text)


def gpu_checks(
    driver: dict[str, Any] | None, built_for: str | None, gpus: Sequence[Gpu], visible: str | None
) -> list[Check]:
    """Check torch's GPUs, or find why there are none; `built_for`: CUDA version, `visible`: CUDA_VISIBLE_DEVICES."""
    checks = []
    for index, gpu in enumerate(gpus):
        text = f"cuda:{index} {gpu.name}, capability {gpu.capability}, {gpu.memory_gb:.0f} GB"
        if gpu.problem:
            fix = "install a newer build of torch (for an old GPU, an older one)"
            if is_out_of_memory(RuntimeError(gpu.problem)) or "busy" in gpu.problem:
                fix = "stop other programs on this GPU (see nvidia-smi)"
            checks.append(Check("GPU", "failed", f"{text}: {gpu.problem}", f"{fix}, or train with device=cpu"))
        else:
            checks.append(Check("GPU", "ok", f"{text}, networks run in {gpu.precision}"))
    if checks:
        return checks
    if driver is None:
        return [Check("GPU", "ok", "none (no driver): physics and learning run on the CPU")]
    names = ", ".join(device["name"] for device in driver["devices"]) or "none"
    text = f"driver {driver['driver']}, GPUs: {names}; torch cannot use them"
    if built_for is None:
        return [Check("GPU", "warning", f"{text} (CPU build)", "install a CUDA build of torch (pytorch.org)")]
    if visible is not None:
        return [Check("GPU", "warning", f"{text}: CUDA_VISIBLE_DEVICES={visible!r}", "unset CUDA_VISIBLE_DEVICES")]
    fix = f"update the driver, or install a torch built for an older CUDA than {built_for}"
    return [Check("GPU", "warning", text, fix)]


def disk_check(runs: Path) -> Check:
    """Check that run folders can be written, and that enough disk space is free."""
    folder = runs.absolute()
    while not folder.is_dir():
        folder = folder.parent
    free = shutil.disk_usage(folder).free / 1e9
    text = f"{free:.1f} GB free for {runs}/"
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return Check("disk", "failed", f"cannot write to {folder}: {error.strerror}", "try log.dir=<another folder>")
    if free < LITTLE_DISK_GB:
        return Check("disk", "warning", text, "free some space, or try log.dir=<another folder>")
    return Check("disk", "ok", text)


def _cpus() -> Check:
    cpu = describe_environment()["cpu"]
    load = psutil.getloadavg()[0]
    text = f"{available_cpus()} of {cpu['threads']} available ({cpu['model']}), load {load:.1f}"
    if load > 1.25 * (cpu["threads"] or 1):
        return Check("CPUs", "warning", f"{text}: other programs are using them", "stop them before measuring speeds")
    return Check("CPUs", "ok", text)


def _packages() -> list[Check]:
    checks, versions = [], []
    for package, module in {**NEEDED, **(OF_SIMULATORS if sys.version_info >= WARP_PYTHON else {})}.items():
        version = installed_version(package)
        if version is None:
            if package != "newton":  # newton is optional (an extra)
                checks.append(Check("packages", "failed", f"{package} is not installed", f"pip install {package}"))
            continue
        try:
            importlib.import_module(module)
        except Exception as error:
            state = "failed" if package in NEEDED else "warning"
            fix, text = f"pip install --force-reinstall {package}", f"{package} {version} cannot be imported"
            checks.append(Check("packages", state, f"{text}: {type(error).__name__}: {first_line(error)}", fix))
        else:
            versions.append(f"{package} {version}")
    return [Check("packages", "ok", ", ".join(versions)), *checks]


def _gpus() -> list[Check]:
    import torch

    from gpusim_rl.learn.algorithm import choose_precision

    gpus = []
    for index in range(torch.cuda.device_count()):
        device, problem = torch.cuda.get_device_properties(index), ""
        with torch.cuda.device(index):
            precision = choose_precision("auto", torch.device("cuda", index))[0]
            try:
                torch.ones(1, device="cuda").sum().item()
            except RuntimeError as error:  # e.g. no kernels in this build of torch, or no memory left
                problem = first_line(error)
        gpus.append(Gpu(device.name, f"{device.major}.{device.minor}", device.total_memory / 1e9, precision, problem))
    return gpu_checks(describe_gpus(), torch.version.cuda, gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))


def _kernel_cache() -> Check:
    import torch

    cuda = torch.cuda.is_available()
    if sys.version_info < WARP_PYTHON:
        text = "sim=mjwarp and sim=newton need Python 3.11 or later; sim=mujoco does not"
        return Check("kernels", "failed" if cuda else "warning", text, "install a newer Python to use a GPU")

    from gpusim_rl.sim.warp import start_warp

    try:
        start_warp(torch.device("cuda" if cuda else "cpu"))
        import warp

        folder = Path(warp.config.kernel_cache_dir or "")
        modules = [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (ConfigError, OSError) as error:
        reason = str(error).partition("; try ")[0].partition(". Try ")[0]
        text = f"{reason}: sim=mjwarp and sim=newton cannot run"
        return Check("kernels", "failed" if cuda else "warning", text, "set WARP_CACHE_PATH to a writable folder")
    text = f"{folder}: {len(modules)} modules" if modules else f"{folder}: empty; the first run compiles kernels"
    return Check("kernels", "ok", text)


def _rendering() -> Check:
    from gpusim_rl.view.renderer import DEBIAN_GL, gl_platforms, gl_works

    tried = gl_platforms()
    working = [name for name in tried if gl_works(name)]
    if working:
        return Check("rendering", "ok", f"OpenGL through {', '.join(working)}")
    text = f"OpenGL does not work without a display (tried {', '.join(tried)}): videos use a slower ray caster"
    fix = f"on Debian or Ubuntu: apt-get install {DEBIAN_GL}" if sys.platform.startswith("linux") else ""
    return Check("rendering", "warning", text, fix)


def _wandb() -> Check:
    from gpusim_rl.run.writers import INIT_TIMEOUT_S, wandb_mode

    mode, reason = wandb_mode()
    if reason:
        return Check("W&B", "ok", f"{mode} ({reason}); runs are stored locally for `wandb sync`")
    return Check("W&B", "ok", f"{mode}, or offline if the server does not answer in {INIT_TIMEOUT_S:.0f} s")
