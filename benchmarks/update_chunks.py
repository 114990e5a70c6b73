"""Measures what chunks do for an update on the CPU (gpusim_rl/learn/chunks.py); writes update_chunks.json.

    python benchmarks/update_chunks.py

Seconds of one whole update of Ant (4096 envs, 16 steps, 2 of its epochs) by samples per chunk, with a thread for each
chunk and with all threads in each operation. 32768 samples are a whole minibatch. Medians of
interleaved rounds.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROUNDS = 5
SIZES = (1024, 2048, 4096, 8192, 32768)


def main() -> None:
    """Measures and writes."""
    from gpusim_rl.machine.hardware import limit_openmp_spin

    limit_openmp_spin()
    from gpusim_rl.api import scratch_training
    from gpusim_rl.files.provenance import describe_environment, git_state

    seconds: dict[tuple[int, bool], list[float]] = {(size, threads): [] for threads in (True, False) for size in SIZES}
    with scratch_training(["task=Ant", "num_envs=4096", "ppo.epochs=2"]) as (trainer, _):
        ppo: Any = trainer.algorithm
        trainer.collector.collect()
        ppo.update()
        chunks = ppo._chunks
        for _ in range(ROUNDS):
            for (size, threads), values in seconds.items():
                chunks._size, chunks._threads = size, threads
                started = time.perf_counter()
                ppo.update()
                values.append(time.perf_counter() - started)
        precision = "bf16" if ppo.policy.bf16 else "fp32"
    rows = [
        {"samples_per_chunk": size, "thread_per_chunk": threads, "seconds": statistics.median(values), "all": values}
        for (size, threads), values in seconds.items()
    ]
    result = {
        "command": "python benchmarks/update_chunks.py",
        "git": git_state(Path("runs"))[0],
        "environment": describe_environment(),
        "precision": precision,
        "update_seconds": rows,
    }
    Path(__file__).with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n")
    for row in rows:
        who = "a thread per chunk" if row["thread_per_chunk"] else "all threads in each operation"
        print(f"{row['samples_per_chunk']:6} samples, {who:30} {row['seconds']:.3f} s")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, installed or not
    main()
