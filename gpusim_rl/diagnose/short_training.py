"""Measurements of short training runs: `train.py` in subprocesses."""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpusim_rl.diagnose.run_stats import read_rows, read_run_stats
from gpusim_rl.errors import ConfigError
from gpusim_rl.files.paths import train_file
from gpusim_rl.files.safe_open import load_json
from gpusim_rl.machine.child import Child
from gpusim_rl.run.phases import PHASES
from gpusim_rl.settings.overrides import quote


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Statistics of a short training run. Shares are fractions of the wall-clock time."""

    error: str | None = None  # one line; all other fields are then empty
    env_steps_per_s: float = 0.0  # median over the measured iterations, all envs
    slowest: float = 0.0  # speed of the slowest iteration [env steps/s]
    fastest: float = 0.0  # speed of the fastest iteration [env steps/s]
    iterations: int = 0  # number of measured iterations
    phases: Mapping[str, float] = field(default_factory=dict)  # nonzero shares
    step_ms: float = 0.0  # duration of a control step of all envs, with the policy, without learning [ms]
    memory_gb: float | None = None  # RAM of the first process and its children; on `cuda`, used GPU memory
    memory_limit_gb: float | None = None
    sim: str = ""
    precision: str = ""  # of the networks
    learner_wait: float | None = None  # share of time waiting for actors, or in sums over processes
    actor_wait: float | None = None  # share of time that actors wait for the learner
    lag: float | None = None  # mean age of actors' samples [updates]
    lag_limit: int | None = None  # maximum age [updates]
    cpu_percent: float | None = None  # of the CPUs available to the first process and its children
    contended: bool = False  # other programs competed for the CPUs


def measure_training(
    overrides: Sequence[str],
    *,
    processes: int | None = None,
    warm_up: int,
    iterations: int,
    seconds: float = 0.0,
    timeout_s: float = 900.0,
) -> Measurement:
    """Run `train.py` for enough iterations; return the measurement, with `error` if training failed.

    Args:
        overrides: Command line of the training run.
        processes: Number of torchrun processes; None = without torchrun.
        warm_up: Iterations to discard.
        iterations: Minimum number of measured iterations.
        seconds: Minimum duration of the measurement [s].
        timeout_s: Maximum total duration [s].
    """
    with tempfile.TemporaryDirectory() as folder:
        quiet = [f"log.dir={quote(folder)}", "log.console=quiet", "log.interval=1", "log.checkpoint_interval=1000000"]
        command = [str(train_file()), *quiet, "compile=off", "max_iterations=1000000", *overrides]
        env = dict(os.environ)
        if processes is not None:
            torchrun = ["--standalone", f"--nproc-per-node={processes}", f"--log-dir={folder}/torchrun"]
            command = ["-m", "torch.distributed.run", *torchrun, *command]
            env.setdefault("OMP_NUM_THREADS", "1")  # torchrun's default for two and more
        with Child([sys.executable, *command], env=env) as training:
            try:
                done = _wait(training, Path(folder), warm_up, iterations, seconds, timeout_s)
                late = training.running
            finally:
                training.stop()
            if not done:
                return Measurement(error=f"took longer than {timeout_s:.0f} s" if late else _failure(training))
        return _measurement(next(Path(folder).glob("*/2*")), warm_up)


def _wait(training: Child, folder: Path, warm_up: int, iterations: int, seconds: float, timeout_s: float) -> bool:
    """Wait for enough rows; return False if training ends or times out first."""
    warm_at = None
    while training.running and training.silent_s < timeout_s:
        time.sleep(0.1)
        names_and_rows = sum(file.read_bytes().count(b"\n") for file in folder.glob("*/2*/metrics.csv"))
        if warm_at is None and names_and_rows > warm_up:
            warm_at = time.monotonic()
        if warm_at is not None and names_and_rows > warm_up + iterations and time.monotonic() - warm_at >= seconds:
            return True
    return False


def _failure(training: Child) -> str:
    errors = [line for line in training.output().splitlines() if line.startswith("error: ")]
    if errors:  # torchrun's report follows
        return errors[0].removeprefix("error: ")
    reason = training.exit_reason()
    return f"{reason}: out of memory?" if reason == "SIGKILL" else reason


def _measurement(run: Path, warm_up: int) -> Measurement:
    try:
        stats, rows = read_run_stats(run, warm_up=warm_up), read_rows(run / "metrics.csv")[warm_up:]
    except ConfigError as error:
        return Measurement(error=str(error))
    speeds = [row["speed/env_steps_per_s"] or 0.0 for row in rows]
    on_cuda, has_actors = stats.rl_device.startswith("cuda"), bool(stats.num_actors)
    return Measurement(
        env_steps_per_s=statistics.median(speeds),
        slowest=min(speeds),
        fastest=max(speeds),
        iterations=len(rows),
        phases={phase: share for phase in PHASES if (share := getattr(stats, phase))},
        step_ms=1000 * stats.step_s,
        memory_gb=stats.gpu_memory_gb if on_cuda else stats.memory_gb,
        memory_limit_gb=stats.gpu_memory_limit_gb if on_cuda else stats.memory_limit_gb,
        sim=stats.sim,
        precision=load_json(run / "env.json")["learner"].get("precision", "fp32"),
        learner_wait=stats.actors if has_actors else stats.sums,
        actor_wait=stats.actor_wait,
        lag=stats.lag_mean if has_actors else None,
        lag_limit=stats.max_policy_lag if has_actors else None,
        cpu_percent=stats.cpu_percent,
        contended=stats.contended,
    )
