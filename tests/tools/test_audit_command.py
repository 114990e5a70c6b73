"""Tests of the command `audit`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from helpers.commands import ROOT, Finished, run_command, run_here

pytest_plugins = ["helpers.tool_runs"]

SMALL = ("device=cpu", "num_envs=16", "ppo.horizon=8", "ppo.minibatch_size=64", "ppo.network.hidden=[16,16]")
READS = """
from gpusim_rl.tasks.cartpole import Cartpole


class Peek(Cartpole):
    def rewards(self):
        terms = super().rewards()
        self.mean = next(iter(terms.values())).mean().item()
        return terms
"""


@pytest.fixture
def audit(tmp_path):
    """Run the tool in an empty folder: `audit("task=Ant", check=False)`."""

    def run(*arguments: str | Path, **options) -> Finished:
        return run_command(sys.executable, ROOT / "tools" / "audit.py", *arguments, cwd=tmp_path, **options)

    return run


def test_ant_has_no_transfers_and_json_has_all_numbers(audit, tmp_path):
    done = audit("task=Ant", *SMALL, "--iterations", "2", "--out", "audit.json")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("Ant, 16 envs, mujoco on cpu") and lines[-1].startswith("ok: ")
    rows = [line.split()[:4] for line in lines[2:8]]
    assert ["rollout", "0", "0", "0"] in rows and ["update", "0", "0", "0"] in rows
    assert [path.name for path in tmp_path.iterdir()] == ["audit.json"]  # no run folder is left

    report = json.loads((tmp_path / "audit.json").read_text())
    environment = {"time", "command", "python", "platform", "versions", "cpu", "memory_gb", "gpu", "git"}
    run = {"task", "num_envs", "sim", "device", "precision", "graph", "log_rows"}
    results = {"phases", "locations", "method", "iterations", "violations", "ok"}
    assert environment | run | results <= set(report)
    assert report["ok"] and report["violations"] == [] and report["log_rows"] == 2
    phases = report["phases"]
    assert {"rollout", "update", "log", "physics (host)"} <= set(phases)
    assert phases["rollout"]["syncs"] == phases["update"]["syncs"] == {}
    assert phases["log"]["to_host"]["count"] == 2 and phases["log"]["to_device"] == {"count": 0, "bytes": 0}
    assert report["versions"]["torch"] and "audit.py" in report["command"]


@pytest.mark.slow
def test_allowed_log_rows_are_those_of_audited_iterations(load_tool, monkeypatch):
    """On CUDA, the iterations after the audited ones only locate lines."""
    from gpusim_rl.diagnose import transfers

    original = transfers.audit

    def audit_and_continue(loop, **settings):
        result = original(loop, **settings)
        loop.iterate()
        loop.iterate()
        return result

    monkeypatch.setattr(transfers, "audit", audit_and_continue)
    tool = load_tool("audit")
    for interval, rows in ((5, 1), (6, 0)):  # the audited iteration is the fifth
        words = ["task=Cartpole", *SMALL, f"log.interval={interval}", "--iterations", "1"]
        report = tool.audit_training(tool.parse(words))
        assert (report["log_rows"], report["violations"]) == (rows, [])


def test_task_with_device_reads_fails_with_its_line(audit, tmp_path):
    (tmp_path / "peek.py").write_text(READS)
    done = audit("task=Cartpole", "task._target_=peek.Peek", *SMALL, "--iterations", "1", check=False)
    assert done.returncode == 1 and done.stderr == ""
    number = 1 + READS.splitlines().index(next(line for line in READS.splitlines() if ".item()" in line))
    assert f"rollout: 8 x item at peek.py:{number}" in done.stdout.splitlines()
    assert done.stdout.splitlines()[-1].startswith("NOT ok: ")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["task=Antt"], "Did you mean 'Ant'?"),
        (["task=Ant", "--iterations", "0"], "--iterations: expected at least 1, got 0"),
        (["task=Ant", "--json", "audit.json"], "Try --out audit.json"),
        (["task=Cartpole", *SMALL, "--iterations", "1", "--out", "/dev/null/a.json"], "cannot write /dev/null/a.json"),
    ],
)
def test_bad_input_is_rejected_in_one_line(tmp_path, arguments, line):
    done = run_here(ROOT / "tools" / "audit.py", *arguments, cwd=tmp_path)
    assert done.refuses(line), done.stderr


def test_counts_and_sizes_are_formatted_per_iteration(load_tool):
    audit = load_tool("audit")
    assert audit.copies({"count": 0, "bytes": 0}, 3) == "0"
    assert audit.copies({"count": 3, "bytes": 312}, 3) == "1 (104 B)"
    assert audit.copies({"count": 4, "bytes": 3_600_000}, 3) == "1.3 (1.2 MB)"
    work = {
        "to_device": {"count": 0, "bytes": 0},
        "to_host": {"count": 2, "bytes": 208},
        "syncs": {"cudaEventSynchronize": 2},
        "launches": 4,
        "kernels": 2468,
        "busy": 0.957,
        "occupied": 0.957,
    }
    assert audit.cells(work, 2, counted=False) == ["0", "1 (104 B)", "1", "2", "1,234", "95.7 %"]
    assert audit.cells(work | {"busy": 0.5}, 2, counted=False)[-1] == "50.0 to 95.7 %"
    assert audit.cells(work | {"busy": None}, 2, counted=False)[-1] == "–"
