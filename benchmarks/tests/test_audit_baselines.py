"""Command line of `benchmarks/throughput/audit_baselines.py`."""

from __future__ import annotations

import json
import sys

import pytest

from helpers.commands import ROOT, run_command
from throughput import audit_baselines

SMALL = ("device=cpu", "num_envs=16", "ppo.horizon=8", "ppo.minibatch_size=64", "ppo.network.hidden=[16,16]")


def test_audit_compares_baseline_and_names_its_lines(tmp_path):
    pytest.importorskip("rsl_rl")
    arguments = ("task=Cartpole", *SMALL, "--iterations", "1", "--baselines", "rsl_rl", "--out", "audit.json")
    script = ROOT / "benchmarks" / "throughput" / "audit_baselines.py"
    done = run_command(sys.executable, script, *arguments, cwd=tmp_path)
    report = json.loads((tmp_path / "audit.json").read_text())
    baseline = report["baselines"]["rsl_rl"]
    assert {"version", "settings", "phases", "locations"} <= set(baseline)
    assert sum(baseline["phases"]["update"]["syncs"].values()) > 0
    assert "physics (host)" in baseline["phases"]
    assert any(place["where"].startswith("rsl_rl/") for place in baseline["locations"])
    assert report["ours"]["phases"]["update"]["syncs"] == {}
    assert report["environment"]["versions"]["rsl-rl-lib"] == baseline["version"] and "git" in report
    lines = done.stdout.splitlines()
    assert lines[0].startswith("Cartpole, 16 envs, ") and any(line.startswith("rsl_rl copies ") for line in lines)
    assert [path.name for path in tmp_path.iterdir()] == ["audit.json"]  # no run folder


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["task=Antt", "--baselines", "none"], "'Ant'"),
        (["--baselines", "rslrl"], "Available: rsl_rl, skrl,"),
        (["--iterations", "0"], "--iterations"),
    ],
)
def test_bad_input_is_rejected_in_one_line(monkeypatch, capsys, arguments, line):
    monkeypatch.setenv("GOMP_SPINCOUNT", "10000")  # restored after the test
    with pytest.raises(SystemExit) as stopped:
        audit_baselines.main(arguments)
    errors = capsys.readouterr().err
    assert stopped.value.code == 2
    assert errors.startswith("error: ") and errors.count("\n") == 1 and line in errors
