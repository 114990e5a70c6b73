"""Results of the learning benchmark per task, over seeds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from learn.learning import median_time, results


def write(folder: Path, *times: float | None, **judged: Any) -> Path:
    """Write data of one task with one seed per time to the threshold."""
    common = {"task": "Ant", "recipe": "full", "threshold": 3000.0, "seconds": 900.0, "final_return": 2000.0}
    common |= {"stats": {}, **judged}
    machine = {"environment": {"cpu": {"available": 1}, "gpu": None}, "overrides": ["num_envs=64"]}
    seeds = [{**common, **machine, "reached": time is not None, "seconds_to_threshold": time} for time in times]
    (folder / "tasks.json").write_text(json.dumps({"outcomes": seeds}))
    return folder / "tasks.json"


def test_seed_below_threshold_counts_as_longest():
    assert median_time([30.0, None, 10.0]) == 30.0
    assert median_time([30.0, None, None]) is None
    assert median_time([30.0]) == 30.0


@pytest.mark.parametrize(
    ("times", "result"),
    [
        ([90.0, 30.0, 60.0], "3,000 in 60 s"),
        ([240.0, None, 180.0], "3,000 in 4 min (2 of 3 seeds)"),
        ([240.0, None, None], "2,000 of 3,000 in 15 min"),
    ],
)
def test_result_describes_median_seed(tmp_path, times, result):
    known = results(write(tmp_path, *times))["Ant"]["full"]
    assert (known.result, known.hardware, known.overrides) == (result, "1 CPU core", ["num_envs=64"])


@pytest.mark.parametrize(("stats", "end"), [({"success": 0.0639}, "0.064"), ({}, "?")])
def test_result_uses_statistic_of_goal(tmp_path, stats, end):
    judged = {"stat": "success", "threshold": 0.5, "stats": stats}
    assert results(write(tmp_path, None, **judged))["Ant"]["full"].result == f"success {end} of 0.5 in 15 min"
    assert results(write(tmp_path, 400.0, **judged))["Ant"]["full"].result == "success 0.5 in 7 min"
