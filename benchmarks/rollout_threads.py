"""Measures rollouts of Ant with all threads of torch for every operation, and with few for small ones.

    python benchmarks/rollout_threads.py

writes rollout_threads.json: milliseconds of a control step (policy, environment, storage; the physics has all threads
always) by number of envs, medians of interleaved rounds. In a process of `train.py`, whose idle threads sleep soon, and
in one that had imported torch before us, as notebooks do, whose idle threads spin. gpusim_rl/machine/torch_threads.py
says why.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

ROUNDS = 7
NUM_ENVS = (256, 1024, 4096)


def measure(num_envs: int) -> dict[str, Any]:
    """Milliseconds of a control step, by who may use threads."""
    from gpusim_rl.api import scratch_training
    from gpusim_rl.env import vec_env
    from gpusim_rl.run import collector

    kinds = {"all": lambda *_: nullcontext(), "few": collector.limit_torch_threads}
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    with scratch_training(["task=Ant", f"num_envs={num_envs}"]) as (trainer, _):
        for _ in range(2):
            trainer.collector.collect()
        for _ in range(ROUNDS):
            for kind, context in kinds.items():
                vec_env.limit_torch_threads = collector.limit_torch_threads = context
                started = time.perf_counter()
                trainer.collector.collect()
                times[kind].append(1e3 * (time.perf_counter() - started) / trainer.algorithm.horizon)
        vec_env.limit_torch_threads = collector.limit_torch_threads = kinds["few"]
    ratios = [few / every for few, every in zip(times["few"], times["all"], strict=True)]
    return {
        "num_envs": num_envs,
        "step_ms": {kind: statistics.median(values) for kind, values in times.items()},
        "few_over_all": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
    }


def in_process(*, torch_first: bool) -> list[dict[str, Any]]:
    """The measurements of a process of its own."""
    first = (
        "import torch"
        if torch_first
        else "from gpusim_rl.machine.hardware import limit_openmp_spin; limit_openmp_spin()"
    )
    code = f"{first}\nimport json, rollout_threads\nfor n in {NUM_ENVS}: print(json.dumps(rollout_threads.measure(n)))"
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("GOMP_", "OMP_"))}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, Path(__file__).resolve().parents[:2]))
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=True, text=True, stdout=subprocess.PIPE)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def main() -> None:
    """Measures and writes."""
    from gpusim_rl.files.provenance import describe_environment, git_state

    rollouts = {"train.py": in_process(torch_first=False), "torch first": in_process(torch_first=True)}
    result = {
        "command": "python benchmarks/rollout_threads.py",
        "git": git_state(Path("runs"))[0],
        "environment": describe_environment(),
        "rollouts": rollouts,
    }
    Path(__file__).with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n")
    for name, rows in rollouts.items():
        for row in rows:
            print(name, row)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, installed or not
    main()
