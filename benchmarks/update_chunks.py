"""Measures what chunks do for an update on the CPU (gpusim_rl/learn/chunks.py); writes update_chunks.json.

    python benchmarks/update_chunks.py
    python benchmarks/update_chunks.py --compile

Seconds of one whole update of Ant (4096 envs, 16 steps, 2 of its epochs) by samples per chunk, with a thread for each
chunk and with all threads in each operation. 32768 samples are a whole minibatch. Medians of
interleaved rounds. With `--compile` the loss is compiled, and only chunks of the package's size are measured; the rest
of the file stays.
"""

from __future__ import annotations

import argparse
import builtins
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

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", action="store_true", help="measure compiled updates only")
    compiled = parser.parse_args().compile
    limit_openmp_spin()
    from gpusim_rl.api import scratch_training
    from gpusim_rl.files.provenance import describe_environment, git_state
    from gpusim_rl.learn.chunks import CPU_CHUNK

    # every other size would be compiled anew
    sizes = (CPU_CHUNK,) if compiled else SIZES
    seconds: dict[tuple[int, bool], list[float]] = {(size, threads): [] for threads in (True, False) for size in sizes}
    compiling = f"compile={'learner' if compiled else 'off'}"
    with scratch_training(["task=Ant", "num_envs=4096", "ppo.epochs=2", compiling]) as (trainer, _):
        ppo: Any = trainer.algorithm
        trainer.collector.collect()
        ppo.update()
        chunks = ppo._chunks
        pool = chunks._workers()
        for number in range(1 + ROUNDS):
            for (size, threads), values in seconds.items():
                chunks._size, chunks._workers = size, lambda threads=threads: pool if threads else builtins
                started = time.perf_counter()
                ppo.update()
                if number:  # the first one may compile
                    values.append(time.perf_counter() - started)
        precision = "bf16" if ppo.policy.bf16 else "fp32"
    rows = [
        {"samples_per_chunk": size, "thread_per_chunk": threads, "seconds": statistics.median(values), "all": values}
        for (size, threads), values in seconds.items()
    ]
    result = {
        "command": f"python benchmarks/update_chunks.py{' --compile' * compiled}",
        "git": git_state(Path("runs"))[0],
        "environment": describe_environment(),
        "precision": precision,
        "update_seconds": rows,
    }
    file = Path(__file__).with_suffix(".json")
    known = json.loads(file.read_text()) if file.exists() else {}
    kept = {**known, "compiled": result} if compiled else {**result, "compiled": known.get("compiled")}
    file.write_text(json.dumps(kept, indent=2) + "\n")
    for row in rows:
        who = "a thread per chunk" if row["thread_per_chunk"] else "all threads in each operation"
        print(f"{row['samples_per_chunk']:6} samples, {who:30} {row['seconds']:.3f} s")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, installed or not
    main()
