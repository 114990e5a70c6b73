"""Measures what `env.overlap` gives where the policy takes as long as the envs (two half-batches that step in turn).

    python benchmarks/overlap.py

writes overlap.json: control steps per second of rollouts of PPO on EnvPool's HalfCheetah-v5, without and with overlap,
in interleaved rounds, and the ratio within each round. The learner has one thread. Each half of the envs has a thread
of its own; without overlap the envs have one thread, or two, which is as many. The network is as wide as it takes for
the policy to last as long as a control step of all envs.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TRAINING = ("task=Gymnasium", "env.id=HalfCheetah-v5", "env.vectorization=envpool", "num_envs=256", "ppo.horizon=32")
THREADS = {"one thread without overlap": 1, "two threads without overlap": 2}
WIDTHS = (1024, 1536, 2048)
ROUNDS, SECONDS = 5, 4.0


@contextmanager
def rollouts(width: int, *more: str) -> Iterator[Any]:
    """A trainer of one thread, with a network of two layers so wide."""
    import torch

    from gpusim_rl.api import scratch_training

    with scratch_training([*TRAINING, f"ppo.network.hidden=[{width},{width}]", "seed=1", *more]) as (trainer, _):
        torch.set_num_threads(1)
        trainer.collector.collect()
        yield trainer


def seconds(work: Callable[[], object], least: float = 1.0) -> float:
    """Mean time of a call, over calls that together take at least so long."""
    began, calls = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - began) < least:
        work()
        calls += 1
    return elapsed / calls


def parts(width: int, *more: str) -> dict[str, float]:
    """Milliseconds of a control step of all envs, and of the policy before and after it."""
    with rollouts(width, *more) as trainer:
        trainer.collector.timer.start()
        for _ in range(3):
            trainer.collector.collect()
        times = trainer.collector.timer.flush().phases()
        return {name: 1e3 * times[name] / (3 * trainer.algorithm.horizon) for name in ("simulate", "policy")}


def speed(width: int, *more: str) -> float:
    """Control steps per second, of all envs together."""
    with rollouts(width, *more) as trainer:
        return trainer.cfg.num_envs * trainer.algorithm.horizon / seconds(trainer.collector.collect, SECONDS)


def compare(threads: int) -> dict[str, Any]:
    """Rollouts without overlap, with so many threads for the envs, and with it, with one thread for each half."""
    together, overlapped = f"env.kwargs.num_threads={threads}", ("env.kwargs.num_threads=1", "env.overlap=true")
    found = {width: parts(width, together) for width in WIDTHS}
    width = min(WIDTHS, key=lambda w: abs(found[w]["policy"] - found[w]["simulate"]))
    rounds = []
    for _ in range(ROUNDS):
        rounds.append({"together": speed(width, together), "overlapped": speed(width, *overlapped)})
        print(width, found[width], rounds[-1], flush=True)
    ratios = [each["overlapped"] / each["together"] for each in rounds]
    return {
        "width": width,
        "ms_per_control_step": found[width],
        "steps_per_s": rounds,
        "ratio": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
    }


def main() -> None:
    """Measures and writes."""
    from gpusim_rl.files.provenance import describe_environment, git_state

    result = {
        "command": "python benchmarks/overlap.py",
        "git": git_state(Path(__file__).with_suffix(".json"))[0],
        "environment": describe_environment(),
        "training": " ".join(TRAINING),
        "envpool": {name: compare(threads) for name, threads in THREADS.items()},
        "load_average": os.getloadavg()[0],
    }
    Path(__file__).with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n")
    print({name: each["ratio"] for name, each in result["envpool"].items()})


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, installed or not
    main()
