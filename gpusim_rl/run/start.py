"""Run setup: resolve checkpoint, seed and devices, before anything is built."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from typing import Any

import torch

from gpusim_rl.env import Environment
from gpusim_rl.errors import import_extra
from gpusim_rl.learn.collective import ALONE, Collective
from gpusim_rl.machine.hardware import tune_malloc
from gpusim_rl.machine.torch_threads import use_available_cpus
from gpusim_rl.run.checkpoint import load_for, state_of_process
from gpusim_rl.run.compilation import CompileChoice, choose_compile
from gpusim_rl.run.devices import choose_devices, choose_eval_devices, set_deterministic
from gpusim_rl.run.run_spec import RunSpec
from gpusim_rl.settings.schema import RunConfig
from gpusim_rl.sim import SimChoice

SEEDS_APART = 1_000_003
"""Distance of the seeds of two processes that learn together: their envs and their noise differ."""


@dataclass(frozen=True, slots=True)
class RunStart:
    """Decisions before anything is built.

    Attributes:
        spec: Task, algorithm and settings.
        collective: Processes that learn together; each has `num_envs` envs.
        seed: Seed of the run.
        device: Device of the learner.
        sim: Simulator and its device.
        compile: Mode of torch.compile, and its reason.
        resumed: Whether the run continues from a checkpoint.
        iteration: Iterations done before this start of the run.
        regrouped: Whether another number of processes learned together before: new episodes begin, with other noise.
        digest: Digest of the checkpoint's file.
    """

    spec: RunSpec
    collective: Collective
    seed: int
    device: torch.device
    sim: SimChoice
    compile: CompileChoice
    resumed: bool = False
    iteration: int = 0
    regrouped: bool = False
    digest: str | None = None

    @property
    def cfg(self) -> RunConfig:
        """Settings of the run."""
        return self.spec.cfg

    @property
    def task_name(self) -> str:
        """Name of the task's class."""
        return self.spec.task_class.__name__

    @property
    def process_seed(self) -> int:
        """Seed of this process among those that learn together."""
        return self.seed + SEEDS_APART * self.collective.rank


def begin(spec: RunSpec, collective: Collective = ALONE) -> tuple[RunStart, dict[str, Any] | None]:
    """Reads the checkpoint, chooses seed and devices, and prepares torch for them.

    Returns:
        Start of the run, and the state of the checkpoint from which this process continues; None for a new run.

    Raises:
        ConfigError: Something in the configuration or the checkpoint does not fit.
    """
    cfg = spec.cfg
    outside = spec.task_class if issubclass(spec.task_class, Environment) else None
    if cfg.log.tensorboard:
        import_extra("tensorboard", "tensorboard", "log.tensorboard=true")
    if cfg.log.video:
        for module in ("imageio_ffmpeg", "PIL.Image"):
            import_extra(module, "view", "log.video=true")
    state, digest = load_for(spec)
    regrouped, seed = False, secrets.randbelow(2**31) if cfg.seed == -1 else cfg.seed
    if state is not None and not cfg.test:
        state, regrouped = state_of_process(state, collective)
        seed = int(state["seed"])
    seed = collective.share(seed)
    device, sim = choose_devices(cfg, outside=outside)
    if cfg.eval.interval and not cfg.test:
        choose_eval_devices(cfg, outside=outside)  # what is wrong is said now
    compiled = choose_compile(cfg, device)
    torch.manual_seed(seed)
    if cfg.torch_deterministic:  # without it cuBLAS refuses; read when CUDA starts
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    set_deterministic(cfg.torch_deterministic)
    use_available_cpus()
    tune_malloc()
    iteration = 0 if state is None else int(state["iteration"])
    resumed, chosen = state is not None, (seed, device, sim, compiled)
    return RunStart(spec, collective, *chosen, resumed, iteration, regrouped, digest), state
