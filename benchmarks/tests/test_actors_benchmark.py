"""Actor benchmark: one real case, and page and plot of known rows."""

from __future__ import annotations

import json
import sys

import pytest

from measuring.checkout import provenance
from parallel import actors

pytest.importorskip("gymnasium")


def section(tmp_path, rows):
    command = "python benchmarks/parallel/actors.py"
    return {**provenance(tmp_path), "command": command, "what": "A step sleeps.", "rows": rows}


def speed(kind, count, steps_per_s, efficiency):
    about = {"lag": 2.0, "wait": 0.01, "update": 0.03, "runs": [steps_per_s]}
    return {"kind": kind, "actors": count, "steps_per_s": steps_per_s, "efficiency": efficiency, **about}


@pytest.mark.slow
def test_training_is_not_faster_than_its_envs():
    [[row]] = actors.scaling(["process"], [1], {"wait_ms": 20.0}, rounds=1, seconds=2.0)
    assert row["kind"] == "process" and row["actors"] == 1 and row["efficiency"] == 1.0
    assert 5 < row["steps_per_s"] < 60  # 50 without overhead; the clock starts and ends with an update
    assert 0.0 < row["lag"] <= 2.0 and 0.0 <= row["wait"] < 1.0 and 0.0 < row["update"] < 1.0


def test_efficiency_is_median_of_ratios_within_rounds():
    found = {
        ("process", 1): [{"steps_per_s": 100.0}, {"steps_per_s": 50.0}, {"steps_per_s": 100.0}],
        ("process", 4): [{"steps_per_s": 300.0}, {"steps_per_s": 180.0}, {"steps_per_s": 400.0}],
    }
    row = actors._summary("process", 4, found)
    assert row["efficiency"] == 0.9 and row["steps_per_s"] == 300 and row["runs"] == [300, 180, 400]


def test_gap_is_longest_time_between_updates():
    assert actors._gap([{"time/elapsed_s": at} for at in (1.0, 1.5, 3.0, 3.25)]) == 1.5


def test_page_and_plot_show_every_section(tmp_path):
    rows = [speed("process", 1, 90, 1.0), speed("process", 8, 5, 0.95), speed("TorchRL sync", 1, 80, 1.0)]
    del rows[2]["lag"]  # collectors do not learn
    killed = {"kind": "ray", "killed": "actor", "gap_s": 0.123, "left_processes": 0, "run_folder_whole": True}
    data = {
        "rows": [{"processes": 2, "steps_per_s": 30475, "efficiency": 0.958}],
        "scaling": section(tmp_path, rows),
        "faults": section(tmp_path, [killed, killed | {"killed": "learner", "lost_iterations": 14}]),
        "copies": section(tmp_path, [{"kind": "process", "obs_mb": 4.1, "ms": 2.83}]),
    }
    file = tmp_path / "scale.json"
    file.write_text(json.dumps(data))
    actors.report(file)
    lines = file.with_suffix(".md").read_text().splitlines()
    for line in (
        "| 2 | 30,475 | 0.958 |",
        "| process | 8 | 5 | 0.95 | 2.0 | 0.01 | 0.03 |",
        "| process | 4.1 | 2.83 |",
    ):
        assert line in lines
    assert "| TorchRL sync | 1 | 80 | 1.0 |  | 0.01 | 0.03 |" in lines
    assert sum("0.123" in line for line in lines) == 1 and sum("| 14 |" in line for line in lines) == 1
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_new_section_replaces_old_one_and_keeps_others(tmp_path, monkeypatch):
    file = tmp_path / "scale.json"
    file.write_text(json.dumps({"rows": [1], "copies": {"rows": [2]}}))
    monkeypatch.setattr(sys, "argv", ["actors.py", "copies"])
    actors.note("copies", actors.parse(["copies", "--out", str(file)]), [{"ms": 3}])
    found = json.loads(file.read_text())
    assert found["rows"] == [1] and found["copies"]["rows"] == [{"ms": 3}]
    assert found["copies"]["command"] == "python benchmarks/parallel/actors.py copies"
    assert "torch" in str(found["copies"])


def test_page_matches_data():
    file = actors.ROOT / "benchmarks" / "parallel" / "scale.json"
    assert file.with_suffix(".md").read_text() == actors.markdown(json.loads(file.read_text()))
