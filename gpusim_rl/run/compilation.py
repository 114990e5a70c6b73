"""What torch.compile makes faster in a training: nothing, the learner, or the control steps too."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from statistics import median
from typing import Protocol

import torch

from gpusim_rl.env import Environment
from gpusim_rl.learn.algorithm import Algorithm
from gpusim_rl.machine.hardware import has_compiler
from gpusim_rl.run.cuda_graph import Graphs
from gpusim_rl.settings.schema import RunConfig

logger = logging.getLogger("gpusim_rl.run")

SKIPPED = 3
"""Iterations before the timed ones: two that warm up, one whose kernels are captured."""
TIMED = 3
GAIN = 0.97
"""Compiled code is kept if an iteration takes less than this share of an eager one: less is within the noise."""


@dataclass(frozen=True, slots=True)
class CompileChoice:
    """What is compiled, and why."""

    mode: str
    """`off`, `learner` or `all`; `auto` as long as it is being measured."""
    reason: str
    measured: bool = False
    """In this run: it keeps the choice when it is resumed, because compiled code rounds otherwise than eager code."""

    def __str__(self) -> str:
        what = {
            "off": "off",
            "learner": "learner",
            "all": "learner and control steps",
            "auto": "to be measured",
        }
        return f"{what[self.mode]} ({self.reason})"


def choose_compile(
    wanted: str,
    device: torch.device,
    sim_device: torch.device,
    *,
    check_task: bool,
    deterministic: bool,
    before: str | None,
) -> CompileChoice:
    """Decides for `compile=auto|off|learner|all`.

    Args:
        wanted: The setting.
        device: Where the learner lives.
        sim_device: Where the physics runs.
        check_task: Every hook's values are read at every step.
        deterministic: Runs of one seed must be equal, and measured times are not.
        before: The choice that the run had measured when its checkpoint was saved; `auto` or None if there is none.
    """
    if wanted == "off":
        return CompileChoice("off", "as configured")
    if wanted == "auto" and device.type != "cuda":
        return CompileChoice("off", "auto: the CPU is as fast without")
    if wanted == "auto" and deterministic:
        return CompileChoice("off", "auto: torch_deterministic=true")
    if wanted == "auto" and sim_device != device:
        return CompileChoice("off", f"auto: physics on {sim_device}")
    if device.type == "cuda" and find_spec("triton") is None:
        return CompileChoice("off", "torch.compile needs the package triton")
    if not has_compiler():
        return CompileChoice("off", "torch.compile needs a C++ compiler")
    if check_task and wanted != "learner":
        return CompileChoice("off" if wanted == "auto" else "learner", "debug.check_task reads every step")
    if wanted != "auto":
        return CompileChoice(wanted, "as configured")
    if before in ("off", "all"):
        return CompileChoice(before, "auto: as before the checkpoint", measured=True)
    return CompileChoice("auto", f"in the first {2 * (SKIPPED + TIMED)} iterations")


class Switch(Protocol):
    """Compiles, or goes back to eager code; drops graphs of the other."""

    def __call__(self, enabled: bool) -> None:
        """Switches."""
        ...


class Trial:
    """Times iterations of a training, first without and then with compiled code, and keeps the faster.

    Compiled code is kept only if it saves more than noise does, see `GAIN`.

    The iterations are those of the training: nothing runs beside it, and nothing has to be put back.

    Args:
        switch: Called before the first iteration of each kind, and once more if eager code is faster.
        seconds: Runs an iteration and returns how long the device took [s]; it waits for the device.
    """

    def __init__(self, switch: Switch, seconds: Callable[[Callable[[], None]], float]) -> None:
        self._switch = switch
        self._seconds = seconds
        self._times: dict[bool, list[float]] = {False: [], True: []}

    def run(self, iteration: Callable[[], None]) -> CompileChoice | None:
        """Runs one iteration; after the last one it returns the choice."""
        compiled = len(self._times[False]) == SKIPPED + TIMED
        times = self._times[compiled]
        if compiled and not times:
            self._switch(enabled=True)
        times.append(self._seconds(iteration))
        if not compiled or len(times) < SKIPPED + TIMED:
            return None
        eager_ms, compiled_ms = (1e3 * median(self._times[kind][SKIPPED:]) for kind in (False, True))
        faster = compiled_ms < GAIN * eager_ms
        if not faster:
            self._switch(enabled=False)
        reason = f"auto: an iteration takes {compiled_ms:.2f} ms compiled and {eager_ms:.2f} ms eager"
        return CompileChoice("all" if faster else "off", reason, measured=True)


def cuda_seconds(work: Callable[[], None]) -> float:
    """How long the work takes on the current CUDA stream [s]; waits for its end."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return 1e-3 * begin.elapsed_time(end)


class Compilation:
    """Compiles the parts of a training, and where that is to be measured switches between iterations.

    Args:
        cfg: The run's settings.
        device: Where the learner lives.
        env: Its control steps may be compiled.
        algorithm: What learns.
        graphs: They hold code that was compiled, or was not.
        before: As for `choose_compile`.

    Attributes:
        choice: What is compiled now, and why.
    """

    def __init__(
        self,
        cfg: RunConfig,
        device: torch.device,
        env: Environment,
        algorithm: Algorithm,
        graphs: Graphs,
        before: str | None,
    ) -> None:
        self._env, self._algorithm, self._graphs = env, algorithm, graphs
        self._trial: Trial | None = None
        self._eager_graph = graphs.choice
        if cfg.test:
            self.choice = CompileChoice("off", "an evaluation")
            return
        self.choice = choose_compile(
            cfg.compile,
            device,
            env.device,
            check_task=cfg.debug.check_task,
            deterministic=cfg.torch_deterministic,
            before=before,
        )
        if cfg.compile not in ("auto", self.choice.mode):
            logger.warning("compile=%s has no full effect: %s", cfg.compile, self.choice)
        if self.choice.mode != "off":
            logger.info("torch.compile works in the first iterations, for a minute or more at the first start")
        if self.choice.mode in ("learner", "all"):
            algorithm.compile()
        if self.choice.mode == "all":
            env.compile()
        if self.choice.mode == "auto":
            self._trial = Trial(self._switch, cuda_seconds)

    def run(self, iteration: Callable[[], None]) -> CompileChoice | None:
        """Runs an iteration; returns the choice, where it was the last one of a measurement."""
        if self._trial is None:
            iteration()
            return None
        chosen = self._trial.run(iteration)
        if chosen is not None:
            self.choice, self._trial = chosen, None
        return chosen

    def _switch(self, enabled: bool) -> None:
        if enabled:
            self._eager_graph = self._graphs.choice
        self._algorithm.compile(enabled)
        self._env.compile(enabled)
        self._graphs.restart(self._eager_graph)  # a capture that fails with compiled code needs not fail without
