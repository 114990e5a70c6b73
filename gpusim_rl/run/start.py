"""Run setup: resolve checkpoint, seed and devices, before anything is built."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from typing import Any

import torch

from gpusim_rl.env import Environment
from gpusim_rl.errors import import_extra
from gpusim_rl.learn.algorithm import Algorithm
from gpusim_rl.learn.collective import ALONE, Collective
from gpusim_rl.machine.hardware import tune_malloc
from gpusim_rl.machine.torch_threads import use_available_cpus
from gpusim_rl.run.checkpoint import load_for, state_of_process
from gpusim_rl.run.cuda_graph import GraphChoice
from gpusim_rl.run.devices import CompileChoice, choose_compile, choose_devices, choose_eval_devices, set_deterministic
from gpusim_rl.run.run_spec import RunSpec
from gpusim_rl.settings.schema import RunConfig
from gpusim_rl.sim import SimChoice

SEEDS_APART = 1_000_003  # seed offset per process


@dataclass(frozen=True, slots=True)
class RunStart:
    """Resolved checkpoint, seed, devices and simulator of a run."""

    spec: RunSpec
    collective: Collective
    seed: int  # seed of the run; see `process_seed`
    device: torch.device  # the learner's device
    sim: SimChoice
    compile: CompileChoice
    resumed: bool = False
    iteration: int = 0  # iterations done before this start
    regrouped: bool = False  # whether the number of processes has changed: new episodes begin, with new noise
    digest: str | None = None  # digest of the checkpoint file

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
        """Seed of this process."""
        return self.seed + SEEDS_APART * self.collective.rank


@dataclass(frozen=True, slots=True)
class RunView:
    """Read-only view of a run at one moment."""

    start: RunStart
    env: Environment
    algorithm: Algorithm
    num_actors: int  # number of processes that step envs for this learner; 0 if it steps its own envs
    graph: GraphChoice
    iteration: int
    env_steps: int  # control steps, summed over envs and processes
    elapsed_s: float  # training time [s], including earlier starts
    best_return: float | None  # best trimmed mean return over a full window

    @property
    def cfg(self) -> RunConfig:
        """Settings of the run."""
        return self.start.cfg

    @property
    def complete(self) -> bool:
        """True if all iterations are done."""
        return self.iteration >= self.cfg.max_iterations


def begin(spec: RunSpec, collective: Collective = ALONE) -> tuple[RunStart, dict[str, Any] | None]:
    """Read the checkpoint, choose seed and devices, and prepare torch; also return this process's checkpoint state."""
    cfg = spec.cfg
    outside = spec.task_class if issubclass(spec.task_class, Environment) else None
    if cfg.log.tensorboard:
        import_extra("tensorboard", "tensorboard", "log.tensorboard=true")
    if cfg.log.video:
        import_extra("imageio_ffmpeg", "view", "log.video=true")
    state, digest = load_for(spec)
    regrouped, seed = False, secrets.randbelow(2**31) if cfg.seed == -1 else cfg.seed
    if state is not None and not cfg.test:
        state, regrouped = state_of_process(state, collective)
        seed = int(state["seed"])
    seed = collective.share(seed)
    device, sim = choose_devices(cfg, outside=outside)
    if cfg.eval.interval and not cfg.test:
        choose_eval_devices(cfg, outside=outside)  # report errors early
    since = None if state is None else state.get("compiled_since")
    compiled = choose_compile(cfg, device, sim.device, outside=outside, since=since)
    torch.manual_seed(seed)
    if cfg.torch_deterministic:  # cuBLAS requires it when CUDA starts
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    set_deterministic(cfg.torch_deterministic)
    use_available_cpus()
    tune_malloc()
    iteration = 0 if state is None else int(state["iteration"])
    resumed, chosen = state is not None, (seed, device, sim, compiled)
    return RunStart(spec, collective, *chosen, resumed, iteration, regrouped, digest), state
