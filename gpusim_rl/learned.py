"""How our tasks were seen to learn: the data of the learning benchmark, in few words."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gpusim_rl.files import paths


@dataclass(frozen=True)
class Learned:
    """What the learning benchmark (`benchmarks/bench.py learn`) says of a task."""

    # The threshold and the median time to it, `3,000 in 4 min`, with the number of seeds that reached it where some did
    # not; the end of the training where half of them or more did not, `4,158 of 5,000 in 15 min`.
    result: str
    seconds: float | None  # median time to the threshold; None where half of the seeds or more did not reach it
    hardware: str  # `1 CPU core`
    overrides: list[str]  # settings other than those in the task's yaml


def learned() -> dict[str, Learned]:
    """Returns the results by task; none where the benchmark's data is not there."""
    file = paths.learning_file()
    if not file.is_file():
        return {}
    seeds: dict[str, list[dict[str, Any]]] = {}
    for outcome in json.loads(file.read_text(encoding="utf-8"))["outcomes"]:
        seeds.setdefault(outcome["task"], []).append(outcome)
    return {task: _of_task(outcomes) for task, outcomes in seeds.items()}


def median_time(seconds: Sequence[float | None]) -> float | None:
    """Returns the median time to a threshold [s]; None for a seed that did not reach it, or if half or more did not."""
    median = statistics.median([math.inf if time is None else time for time in seconds])
    return None if math.isinf(median) else median


def duration(seconds: float) -> str:
    """Returns a time [s] in few words."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _of_task(seeds: Sequence[dict[str, Any]]) -> Learned:
    """Returns the words for all seeds of a task."""
    first, stat = seeds[0], seeds[0].get("stat") or ""
    form = ".2g" if stat else ",.0f"
    threshold, name = f"{first['threshold']:{form}}", f"{stat} " if stat else ""
    seconds = median_time([seed["seconds_to_threshold"] for seed in seeds])
    reached = sum(bool(seed["reached"]) for seed in seeds)
    if seconds is not None:
        some = f" ({reached} of {len(seeds)} seeds)" if reached < len(seeds) else ""
        result = f"{name}{threshold} in {duration(seconds)}{some}"
    else:
        ends = [seed["stats"].get(stat) if stat else seed["final_return"] for seed in seeds]
        known = [end for end in ends if end is not None]
        end = f"{statistics.median(known):{form}}" if known else "?"
        result = f"{name}{end} of {threshold} in {duration(statistics.median(seed['seconds'] for seed in seeds))}"
    gpu, cpus = first["environment"].get("gpu"), first["environment"].get("cpu", {}).get("available")
    hardware = "GPU" if gpu else f"{cpus} CPU core{'' if cpus == 1 else 's'}"
    return Learned(result, seconds, hardware, list(first.get("overrides") or []))
