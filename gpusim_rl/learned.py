"""Learning results of the bundled tasks, as quoted in README."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from gpusim_rl.files import paths


@dataclass(frozen=True)
class Learned:
    """Best result of a task in the learning benchmark (`benchmarks/learn/learning.py`)."""

    # Threshold and time to reach it, `3,000 in 4 min`, with the number of seeds if only some reached it; the result at
    # the end of training if half of the seeds or more did not, `4,158 of 5,000 in 15 min`.
    result: str
    seconds: float | None  # time to the threshold; None if not reached
    hardware: str  # `1 CPU core`
    overrides: list[str]  # settings that differ from the recipe
    threshold: float
    stat: str  # task metric that the threshold refers to; empty: the return

    @property
    def column(self) -> str:
        """Column of metrics.csv that the threshold refers to."""
        return f"task/{self.stat}" if self.stat else "episode/return"


def learned() -> dict[str, dict[str, Learned]]:
    """Return results by task and recipe; {} without benchmark data."""
    file = paths.learning_file()
    if not file.is_file():
        return {}
    entries = json.loads(file.read_text(encoding="utf-8"))
    return {task: {name: Learned(**row) for name, row in rows.items()} for task, rows in entries.items()}


def median_time(seconds: Sequence[float | None]) -> float | None:
    """Return the median time to a threshold [s]; None, as input or result, means not reached."""
    median = statistics.median([math.inf if time is None else time for time in seconds])
    return None if math.isinf(median) else median


def duration(seconds: float) -> str:
    """Format a time [s]."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
