"""Measures how much slower a training of Ant is while policies are evaluated beside it (`eval.interval`).

    python benchmarks/eval_cost.py

writes eval_cost.json: control steps per second of the training without evaluations, with one every 10 iterations, and
with one after the other, in interleaved rounds; and its ratios to the training without, each within its round.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

KINDS = {"off": 0, "every 10 iterations": 10, "always": 1}
ROUNDS = 3
TRAINING = ("task=Ant", "num_envs=512", "ppo.minibatch_size=4096", "seed=1")
WARM_UP_S = 8.0
"""In it the process of evaluations imports torch and builds its envs."""
MEASURED_S = 12.0


def measure(interval: int) -> dict[str, Any]:
    """Speed of a training, and how many evaluations ended meanwhile."""
    from gpusim_rl.api import scratch_training

    with scratch_training([*TRAINING, f"eval.interval={interval}"]) as (trainer, log):
        began = time.perf_counter()
        while time.perf_counter() - began < WARM_UP_S:
            trainer.iterate(log)
        ended, tell = [], log.end_evaluation
        log.end_evaluation = lambda numbers: ended.append(tell(numbers))
        steps, began = trainer.env_steps, time.perf_counter()
        while time.perf_counter() - began < MEASURED_S:
            trainer.iterate(log)
        seconds = time.perf_counter() - began
    return {"steps_per_s": (trainer.env_steps - steps) / seconds, "evaluations": len(ended)}


def main() -> None:
    """Measures and writes."""
    from gpusim_rl.provenance import describe_environment, git_state

    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    loads = []
    for _ in range(ROUNDS):
        for kind, interval in KINDS.items():
            found[kind].append(measure(interval))
            print(kind, found[kind][-1], flush=True)
        loads.append(os.getloadavg()[0])
    speeds = {kind: [each["steps_per_s"] for each in rounds] for kind, rounds in found.items()}
    ratios = {
        kind: [speed / off for speed, off in zip(speeds[kind], speeds["off"], strict=True)]
        for kind in KINDS
        if kind != "off"
    }
    result = {
        "command": "python benchmarks/eval_cost.py",
        "git": git_state(Path(__file__).with_suffix(".json"))[0],
        "environment": describe_environment(),
        "training": " ".join(TRAINING),
        "load_average": loads,
        "rounds": found,
        "over_off": {
            kind: {"median": statistics.median(values), "min": min(values), "max": max(values)}
            for kind, values in ratios.items()
        },
    }
    Path(__file__).with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result["over_off"], indent=2))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, installed or not
    main()
