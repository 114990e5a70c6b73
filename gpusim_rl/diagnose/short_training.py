"""A short training in processes of its own, as a user starts it, and its numbers."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpusim_rl.diagnose.run_stats import read_rows, read_run_stats
from gpusim_rl.errors import ConfigError
from gpusim_rl.files.paths import train_file
from gpusim_rl.files.safe_open import load_json
from gpusim_rl.settings.overrides import quote

ENDS_WITHIN_S = 60.0
"""A training that was told to stop ends after its iteration, with a checkpoint."""


def measure_training(
    overrides: Sequence[str],
    *,
    processes: int | None = None,
    warm_up: int,
    iterations: int,
    seconds: float = 0.0,
    timeout_s: float = 900.0,
) -> dict[str, Any] | str:
    """Starts `train.py`, and stops it when it has trained for long enough.

    Args:
        overrides: Its command line.
        processes: Of torchrun, which learn together; None trains without torchrun.
        warm_up: Iterations that do not count.
        iterations: That count, at least.
        seconds: That these take, at least [s].
        timeout_s: For all of it [s].

    Returns:
        The numbers of a `ParallelPoint`, and `git` of the checkout; or one line that tells what went wrong.
    """
    with tempfile.TemporaryDirectory() as folder:
        quiet = [f"log.dir={quote(folder)}", "log.console=quiet", "log.interval=1", "log.checkpoint_interval=1000000"]
        command = [str(train_file()), *quiet, "max_iterations=1000000", *overrides]
        variables = dict(os.environ)
        if processes is not None:
            torchrun = ["--standalone", f"--nproc-per-node={processes}", f"--log-dir={folder}/torchrun"]
            command = ["-m", "torch.distributed.run", *torchrun, *command]
            variables.setdefault("OMP_NUM_THREADS", "1")  # as torchrun sets it for two and more
        with (Path(folder) / "output").open("w+") as output:
            training = subprocess.Popen(
                [sys.executable, *command], stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=variables
            )
            try:
                done = _wait(training, Path(folder), warm_up, iterations, seconds, timeout_s)
                code = training.poll()
            finally:
                _stop(training)
            if not done:
                output.seek(0)
                return f"took longer than {timeout_s:.0f} s" if code is None else _what_went_wrong(code, output.read())
        return _numbers(next(Path(folder).glob("*/2*")), warm_up)


def _wait(
    training: subprocess.Popen[bytes], folder: Path, warm_up: int, iterations: int, seconds: float, timeout_s: float
) -> bool:
    """Waits until there are rows enough; False where the training has ended before, or takes too long."""
    deadline, warm_at = time.monotonic() + timeout_s, None
    while training.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
        names_and_rows = sum(file.read_bytes().count(b"\n") for file in folder.glob("*/2*/metrics.csv"))
        if warm_at is None and names_and_rows > warm_up:
            warm_at = time.monotonic()
        if warm_at is not None and names_and_rows > warm_up + iterations and time.monotonic() - warm_at >= seconds:
            return True
    return False


def _stop(training: subprocess.Popen[bytes]) -> None:
    training.terminate()
    try:
        training.wait(timeout=ENDS_WITHIN_S)
    except subprocess.TimeoutExpired:
        training.kill()
        training.wait()


def _what_went_wrong(code: int, output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]  # torchrun tells of its processes below it
    if errors:
        return errors[0].removeprefix("error: ")
    return lines[-1] if lines else f"ended with exit code {code}"


def _numbers(run: Path, warm_up: int) -> dict[str, Any] | str:
    try:
        stats, rows = read_run_stats(run, warm_up=warm_up), read_rows(run / "metrics.csv")[warm_up:]
    except ConfigError as error:
        return str(error)
    speeds = [row["speed/env_steps_per_s"] or 0.0 for row in rows]
    return {
        "env_steps_per_s": statistics.median(speeds),
        "slowest": min(speeds),
        "fastest": max(speeds),
        "iterations": len(rows),
        "learner_wait": stats.actors if stats.num_actors else stats.sums,
        "actor_wait": stats.actor_wait,
        "lag": stats.lag_mean if stats.num_actors else None,
        "lag_limit": stats.max_policy_lag if stats.num_actors else None,
        "cpu_percent": stats.cpu_percent,
        "crowded": stats.crowded,
        "git": load_json(run / "env.json").get("git"),
    }
