"""Measures an update on the CPU with one thread and with all, by rows of a minibatch; writes few_rows.json.

    python benchmarks/few_rows.py

Wall and CPU seconds of a whole iteration's update of HalfCheetah (64 envs) and Ant (the more rows the more envs, a
minibatch is an eighth of the rollout). Medians of interleaved rounds.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROUNDS = 7
SETTINGS = {
    512: ["task=HalfCheetah", "ppo.epochs=2"],
    1024: ["task=Ant", "num_envs=512", "ppo.minibatch_size=1024"],
    2048: ["task=Ant", "num_envs=1024", "ppo.minibatch_size=2048"],
    4096: ["task=Ant", "num_envs=2048", "ppo.minibatch_size=4096"],
}


def measure(settings: list[str], rounds: int) -> dict[int, dict[str, float]]:
    """Seconds by number of threads."""
    import torch

    from gpusim_rl.api import scratch_training
    from gpusim_rl.machine.hardware import available_cpus

    seconds: dict[int, list[tuple[float, float]]] = {1: [], available_cpus(): []}
    with scratch_training(settings) as (trainer, _):
        ppo: Any = trainer.algorithm
        for number in range(rounds + 1):
            for threads, values in seconds.items():
                torch.set_num_threads(threads)
                ppo._chunks._pool = None  # its workers were chosen for another number
                trainer.collector.collect()
                started, worked = time.perf_counter(), time.process_time()
                ppo.update()
                if number > 0:
                    values.append((time.perf_counter() - started, time.process_time() - worked))
    return {
        threads: {"wall_s": statistics.median(w for w, _ in values), "cpu_s": statistics.median(c for _, c in values)}
        for threads, values in seconds.items()
    }


def main() -> None:
    """Measures and writes."""
    from gpusim_rl.machine.hardware import limit_openmp_spin

    limit_openmp_spin()
    from gpusim_rl.files.provenance import describe_environment, git_state

    rows = {rows: measure(settings, ROUNDS) for rows, settings in SETTINGS.items()}
    result = {
        "command": "python benchmarks/few_rows.py",
        "git": git_state(Path("runs"))[0],
        "environment": describe_environment(),
        "update_seconds_by_rows_and_threads": rows,
    }
    Path(__file__).with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n")
    for count, by_threads in rows.items():
        for threads, found in by_threads.items():
            print(f"{count:5} rows, threads {threads}: {found['wall_s']:.3f} s, {found['cpu_s']:.3f} s of CPU time")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, installed or not
    main()
