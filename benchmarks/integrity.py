"""Measures what checksums and the lock of a run folder cost a training; writes integrity.json.

    python benchmarks/integrity.py

A real training of Ant with 4096 envs and the defaults of the checkpoints. The functions that do this work are timed
inside it: the digest of every checkpoint, that of the rows of metrics.csv, and the lock.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

OVERRIDES = ["task=Ant", "num_envs=4096", "log.checkpoint_interval=50"]
ITERATIONS = 100


def timed(owner: Any, name: str, spent: dict[str, list[float]]) -> None:
    """Have every call of a function note its seconds."""
    function: Callable[..., Any] = getattr(owner, name)
    calls = spent.setdefault(name.lstrip("_"), [])

    @wraps(function)
    def measured(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            calls.append(time.perf_counter() - started)

    setattr(owner, name, measured)


def main() -> None:
    """Measures and writes."""
    from gpusim_rl.machine.hardware import limit_openmp_spin

    limit_openmp_spin()
    from gpusim_rl.api import scratch_training
    from gpusim_rl.files import checkpoint_file
    from gpusim_rl.files.provenance import describe_environment, git_state
    from gpusim_rl.run.run_dir import RunDir

    spent: dict[str, list[float]] = {}
    timed(checkpoint_file, "_digest", spent)
    timed(RunDir, "_lock", spent)

    with scratch_training(OVERRIDES) as (trainer, log):
        started = time.perf_counter()
        for _ in range(ITERATIONS):
            trainer.iterate(log)
        total_s = time.perf_counter() - started
        assert log.run_dir is not None
        size = (log.run_dir.path / "checkpoints" / "last.pt").stat().st_size
    seconds = {name: sum(calls) for name, calls in spent.items()}
    result = {
        "command": "python benchmarks/integrity.py",
        "git": git_state(Path("runs"))[0],
        "environment": describe_environment(),
        "overrides": OVERRIDES,
        "iterations": ITERATIONS,
        "iteration_s": total_s / ITERATIONS,
        "checkpoints": len(spent["digest"]),
        "checkpoint_bytes": size,
        "calls": {name: len(calls) for name, calls in spent.items()},
        "seconds": seconds,
        "share": sum(seconds.values()) / total_s,
    }
    Path(__file__).with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n")
    print(
        f"{result['share']:.3%} of {total_s:.1f} s: "
        + ", ".join(f"{name} {len(spent[name])} x {seconds[name] / len(spent[name]) * 1e3:.2f} ms" for name in spent)
    )


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, installed or not
    main()
