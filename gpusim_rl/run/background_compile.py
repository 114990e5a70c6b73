"""torch.compile in the background (`compile=auto`): a child process fills the compiler's cache while the run trains.

The child builds a copy of the run (same classes, shapes and device) and compiles the regions of `compile=all` in one
uncaptured iteration. The run then compiles them from the cache, in seconds, and captures its CUDA graphs again.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch

from gpusim_rl.env.task import load_task_or_environment
from gpusim_rl.errors import ConfigError
from gpusim_rl.files.safe_open import open_file
from gpusim_rl.learn.algorithm import load_algorithm_class
from gpusim_rl.machine.child import Child, same_import_env
from gpusim_rl.machine.hardware import memory_available_bytes
from gpusim_rl.run.collector import Collector
from gpusim_rl.run.devices import CompileChoice
from gpusim_rl.run.held_objects import regions_of
from gpusim_rl.run.logger import Logger
from gpusim_rl.run.make_learner import make_collector
from gpusim_rl.run.run_dir import encoder_for
from gpusim_rl.run.run_spec import RunSpec
from gpusim_rl.run.start import RunStart, RunView, begin
from gpusim_rl.settings.checks import build_run
from gpusim_rl.settings.trust import refuse_classes_of_script

WARM_UP = 5  # iterations in which kernels are compiled and graphs captured
MEASURED_S = 10.0  # time over which the speed of training is measured
WORTH_S = 150.0  # remaining time from which compilation pays, even in the foreground (Ant on an H100: docs/gpu.md)
LONGEST_S = 1800.0  # a compilation that takes longer is considered hung
COMPILE_LOG = "compile.log"  # output of the child, in the run folder
_START = "from gpusim_rl.run.background_compile import main; main()"


class BackgroundCompile:
    """Compilation of a run's code by a child, and the switch to compiled code between two iterations."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._child: Child | None = None
        self._calls = 0
        self._since = (0, 0.0)  # iteration and time [s] at which the measurement of speed begins

    def after_iteration(self, run: RunView, log: Logger) -> RunStart:
        """Begin or poll the compilation; return the run's start, with the new compile mode once it is decided."""
        choice = run.start.compile
        if choice.mode == "later":
            try:
                choice = self._poll(self._child, run, log) if self._child is not None else self._decide(run, log)
            except (OSError, ConfigError) as error:  # too little memory, a full disk; a task of a script
                choice = self._fail(str(error), log)
        return run.start if choice is run.start.compile else replace(run.start, compile=choice)

    def _decide(self, run: RunView, log: Logger) -> CompileChoice:
        """Begin the compilation if the rest of the run, at its measured speed, takes `WORTH_S`."""
        self._calls += 1
        now = time.perf_counter()
        if self._calls <= WARM_UP:
            self._since = run.iteration, now
        iterations, seconds = run.iteration - self._since[0], now - self._since[1]
        if not iterations or seconds < MEASURED_S:
            return run.start.compile
        left = (run.cfg.max_iterations - run.iteration) * seconds / iterations
        if left < WORTH_S:
            return CompileChoice("off", f"auto: the run ends within {WORTH_S:.0f} s")
        if not _room_for_copy(run.start.device):
            raise ConfigError("too little free memory for a second copy of the run")
        refuse_classes_of_script(run.start.spec.config)
        command = [sys.executable, "-c", _START, json.dumps(settings_of_child(run.start))]
        self._child = Child(command, printed=open_file(log.run_dir.path / COMPILE_LOG, "ab+"), env=same_import_env())
        log.console.info(f"compiling in the background, as the run takes another {left / 60:.0f} min")
        return run.start.compile

    def _poll(self, child: Child, run: RunView, log: Logger) -> CompileChoice:
        """Switch to compiled code if the child has finished."""
        status = child.process.poll()
        if status is None and child.silent_s < LONGEST_S:
            return run.start.compile
        if status != 0:
            reason = f"it took over {LONGEST_S / 60:.0f} min" if status is None else child.exit_reason()
            return self._fail(f"{reason}; see {log.run_dir}/{COMPILE_LOG}", log)
        self.close()
        return self._switch(run, log)

    def _switch(self, run: RunView, log: Logger) -> CompileChoice:
        log.console.info(f"switching to compiled code after iteration {run.iteration}")
        self._collector.compile()
        return CompileChoice("all", f"auto: since iteration {run.iteration}", run.iteration)

    def _fail(self, reason: str, log: Logger) -> CompileChoice:
        self.close()
        log.console.warn(f"compilation in the background failed ({reason}); training continues without it")
        return CompileChoice("off", f"auto: {reason}")

    def close(self) -> None:
        """Kill the child."""
        if self._child is not None:
            self._child.close()
            self._child = None


def _room_for_copy(device: torch.device) -> bool:
    """Return whether host and GPU have as much free memory as this process uses (the GPU: as all processes use)."""
    host = memory_available_bytes() > psutil.Process().memory_info().rss
    free, total = torch.cuda.mem_get_info(device) if device.type == "cuda" else (1, 1)
    return host and free > total - free


def settings_of_child(start: RunStart) -> dict[str, Any]:
    """Return the settings of a run's uncaptured copy on the same GPU, as compiled code contains the GPU's number."""
    config, encoder = start.spec.config, encoder_for(start.spec)
    changes = {"compile": "all", "graph": "off", "checkpoint": None, "start_from": None, "device": str(start.device)}
    return {**config, **changes, "pretrained": {**config["pretrained"], "init_from": encoder}}


def fill_cache(config: Mapping[str, Any]) -> None:
    """Build a run and compile its code in one iteration."""
    task, algorithm = (config[group].get("_target_") for group in ("task", "algo"))
    classes = load_task_or_environment(task), load_algorithm_class(algorithm)
    cfg = build_run(config, task_class=classes[0], algorithm_class=classes[1])
    start, _ = begin(RunSpec(cfg, *classes, dict(config), []))
    collector = make_collector(start)
    collector.collect()
    collector.update()
    if not any(region._compiled for region in regions_of((collector.env, collector.algorithm), start.device)):
        raise SystemExit("error: nothing could be compiled")


def main() -> None:
    """Fill the compiler's cache for the settings in the first argument (JSON)."""
    os.nice(19)  # training has priority on the CPU
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # if memory runs out, Linux kills this process first
    fill_cache(json.loads(sys.argv[1]))
