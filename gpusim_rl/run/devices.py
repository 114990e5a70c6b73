"""Devices, simulator and torch threads of a run."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from gpusim_rl.config import RunConfig
from gpusim_rl.env import Step
from gpusim_rl.errors import ConfigError
from gpusim_rl.hardware import available_cpus
from gpusim_rl.sim import SimChoice, choose_sim
from gpusim_rl.simulators import SIMULATORS

ROWS_PER_THREAD = 1024
"""Rows of a matrix that keep a thread of torch busy, in an update and in the trainer's rollout
(benchmarks/few_rows.json).

`VecEnv.step` inside it has smaller work: `torch_threads.SMALL_ROWS` (8192).
"""


def choose_devices(cfg: RunConfig) -> tuple[torch.device, SimChoice]:
    """Where the learner lives, and the simulator with its device.

    Raises:
        ConfigError: There is no such device, or the simulator cannot run on it.
    """
    rl_device = _device(cfg.rl_device or cfg.device, "rl_device" if cfg.rl_device else "device")
    sim_device = _device(cfg.sim_device or cfg.device, "sim_device" if cfg.sim_device else "device")
    if cfg.sim_device is None and cfg.sim.name != "auto" and SIMULATORS[cfg.sim.name].devices == ("cpu",):
        sim_device = torch.device("cpu")  # the only place where it runs; a policy on the GPU can still use it
    return rl_device, choose_sim(cfg.sim.name, sim_device)


def use_available_cpus(batch_rows: int | None = None) -> None:
    """Gives torch a thread for each CPU of this process, unless the user chose a number, which torch has followed.

    `gpusim_rl/torch_threads.py:limit_torch_threads` lowers the number for a block of small work.

    Args:
        batch_rows: Rows of the largest matrices of a training; None for an environment alone. Threads that share few
            rows wait for each other longer than they work, so there is one for every ROWS_PER_THREAD at most.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return
    threads = available_cpus()
    if batch_rows is not None:
        threads = min(threads, max(1, batch_rows // ROWS_PER_THREAD))
    torch.set_num_threads(threads)


def moved(step: Step, device: torch.device) -> Step:
    """A step of the environments on the learner's device.

    Physics on the CPU under a policy on the GPU is the one configuration that copies, as its user asked.
    """
    if step.reward.device == device:
        return step

    def to_device(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(device)
        return {name: item.to(device) for name, item in value.items()}

    return Step(**{name: to_device(getattr(step, name)) for name in Step.__slots__})


def _device(name: str, key: str) -> torch.device:
    """The device that a user means.

    Raises:
        ConfigError: There is no such device.
    """
    if name == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count()
        index = device.index or 0
        if index >= count:
            has = f"{count} CUDA device{'s' if count != 1 else ''}" if count else "no CUDA device"
            raise ConfigError(f"{key}={name}: this machine has {has}; try {key}={'cuda:0' if count else 'cpu'}")
        device = torch.device("cuda", index)
    return device
