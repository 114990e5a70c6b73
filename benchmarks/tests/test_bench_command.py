"""Command line of `benchmarks/bench.py`, with small sizes."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import bench
from helpers.commands import ROOT, run_command

BENCH = ROOT / "benchmarks" / "bench.py"
SMALL = ("task=Cartpole", "device=cpu", "ppo.horizon=4", "--rounds", "2", "--seconds", "0.01", "--warm-up", "1")
HAS_RSL_RL = importlib.util.find_spec("rsl_rl") is not None


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Run a real bench; return its output, json and folder."""
    folder = tmp_path_factory.mktemp("bench")
    baselines = ("--baselines", "rsl_rl" if HAS_RSL_RL else "none", "--modes", "same")
    done = run_command(sys.executable, BENCH, *SMALL, "num_envs=[8]", *baselines, cwd=folder, timeout_s=280)
    return done, json.loads((folder / "benchmarks" / "throughput" / "Cartpole" / "bench.json").read_text()), folder


def test_bench_writes_json_page_and_plot(measured):
    done, result, folder = measured
    there = folder / "benchmarks" / "throughput" / "Cartpole"
    assert done.stdout.endswith(
        ", ".join(f"benchmarks/throughput/Cartpole/bench.{ending}" for ending in ("json", "md", "png")) + "\n"
    )
    assert (there / "bench.png").read_bytes().startswith(b"\x89PNG")
    page = (there / "bench.md").read_text()
    table = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(table) == (9 if HAS_RSL_RL else 7)
    assert all(line in page for line in table)
    assert result["command"].startswith("python benchmarks/bench.py task=Cartpole ")
    assert str(folder) not in page + json.dumps(result)


def test_json_contains_measurements(measured):
    _, result, _ = measured
    assert result["schema"] == 3 and result["task"] == "Cartpole" and result["horizon"] == 4
    assert result["git"] is None or set(result["git"]) == {"sha", "dirty"}
    assert result["environment"]["versions"]["torch"] and result["environment"]["cpu"]["available"]
    [part] = result["env_counts"]
    rows = {row["name"]: row for row in part["cases"]}
    assert list(rows)[:5] == [
        "bare physics, persistent=false",
        "bare physics, persistent=true",
        "env step",
        "+ policy",
        "+ training",
    ]
    for row in rows.values():
        assert row["error"] is None
        assert len(row["rounds"]) == 2 and row["env_steps_per_s"]["min"] > 0
        assert 50e6 < row["memory_bytes"]["resident"] < 2e9
    assert rows["+ training"]["settings"]["precision"] == result["precision"]
    assert sum(rows["+ training"]["phases"].values()) == pytest.approx(1.0)
    assert {"simulate", "policy", "update", "log", "other"} == set(rows["+ training"]["phases"])
    assert set(rows["+ policy"]["phases"]) == {"simulate", "policy", "other"}
    assert result["training_over_physics"] == part["training_over_physics"] > 0
    for name, row in rows.items():
        if row["kind"] in ("policy", "training", "baseline"):
            rounds = zip(row["trainer_us_rounds"], row["rounds"], strict=True)
            assert all(0.0 < own < 1e6 / speed for own, speed in rounds), name
        else:
            assert row["trainer_us"] is None
    assert rows["+ training"]["trainer_us"]["min"] > rows["+ policy"]["trainer_us"]["max"]
    assert part["trainer_us"] == rows["+ training"]["trainer_us"]["median"]
    low, high = result["training_over_physics_range"]
    assert low <= result["training_over_physics"] <= high


def test_all_cases_have_same_process_settings(measured):
    _, result, _ = measured
    rows = {row["name"]: row["settings"] for row in result["env_counts"][0]["cases"]}
    keys = ("openmp_spins", "threads", "physics_threads")
    processes = {name: [settings.get(key) for key in keys] for name, settings in rows.items()}
    assert set(map(tuple, processes.values())) == {tuple(processes["+ training"])}, processes
    assert None not in processes["+ training"]


@pytest.mark.skipif(not HAS_RSL_RL, reason="rsl_rl is not installed")
def test_baseline_is_compared_to_equal_work(measured):
    _, result, _ = measured
    rows = {row["name"]: row for row in result["env_counts"][0]["cases"]}
    baseline = rows["rsl_rl, same"]
    assert baseline["settings"]["trunk"] == rows["+ training, separate trunks"]["settings"]["trunk"] == "separate"
    assert baseline["ours"] == "+ training, separate trunks" and baseline["ours_over_this"]["median"] > 0
    assert baseline["settings"]["precision"].startswith(result["precision"])
    assert result["env_counts"][0]["fastest_baseline"] == "rsl_rl, same"
    assert result["training_over_fastest_baseline"] == baseline["ours_over_this"]["median"]
    assert result["baseline_trainer_us_over_ours"] == baseline["trainer_us_over_ours"]["median"] > 0
    assert result["env_counts"][0]["leanest_baseline"] == "rsl_rl, same"


# The real command with fake cases.
DRIVER = """
import importlib.util, os, sys
tool, fake, *arguments = sys.argv[1:]
sys.path[0] = os.path.dirname(tool)
spec = importlib.util.spec_from_file_location("bench_tool", tool)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.worker_command = lambda: [sys.executable, fake]
sys.exit(module.main(arguments))
"""


def test_interrupted_bench_keeps_results_and_leaves_no_process(tmp_path):
    arguments = ["task=Cartpole", "num_envs=[4,8]", "--rounds", "1000000", "--baselines", "none"]
    command = [sys.executable, "-c", DRIVER, BENCH, Path(__file__).with_name("fake_worker.py"), *arguments]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) as running:
        file = tmp_path / "benchmarks" / "throughput" / "Cartpole" / "bench.json"
        for _ in range(1200):
            if file.exists() or running.poll() is not None:
                break
            time.sleep(0.1)
        workers = psutil.Process(running.pid).children()
        running.send_signal(signal.SIGINT)
        _, errors = running.communicate(timeout=60)
    assert running.returncode == 130, errors.decode()
    assert errors.decode().endswith("interrupted\n")
    assert len(workers) == 5 and not any(worker.is_running() for worker in workers)
    result = json.loads(file.read_text())
    assert result["training_over_physics"] == 1.0
    assert [part["num_envs"] for part in result["env_counts"]] == [4]
    assert set(result["env_counts"][0]["cases"][4]["rounds"]) == {200.0}


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["num_envs=many"], "got many"),
        (["num_envs=[8,0]"], "got [8,0]"),
        (["task=Antt", "--baselines", "none"], "'Ant'"),
        (["task.max_forse=1", "--baselines", "none"], "Did you mean"),
        (["--baselines", "rsl"], "'rsl_rl'"),
        (["--baselines", "none", "--modes", "slow"], "got slow"),
        (["--rounds", "0"], "--rounds, --seconds and --warm-up"),
    ],
)
def test_bad_input_is_rejected_in_one_line(capsys, arguments, line):
    with pytest.raises(SystemExit) as stopped:
        bench.main(arguments)
    errors = capsys.readouterr().err
    assert stopped.value.code == 2
    assert errors.startswith("error: ") and errors.count("\n") == 1
    assert line in errors


def test_num_envs_may_be_a_list():
    env_counts = bench.env_counts
    assert env_counts(["task=Ant", "num_envs=[256,1024]", "seed=1"]) == ([256, 1024], ["task=Ant", "seed=1"])
    assert env_counts(["num_envs=256,1024,256"]) == ([256, 1024], [])
    assert env_counts(["num_envs=64"]) == ([64], [])
    assert env_counts([]) == ([], [])


def test_missing_matplotlib_is_reported_and_plot_skipped(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert bench.draw({}, tmp_path / "bench.png") is False
    assert "pip install 'gpusim-rl[view]'" in capsys.readouterr().err
    assert not (tmp_path / "bench.png").exists()


def test_missing_baselines_are_named(monkeypatch, capsys):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "skrl" else find_spec(name))
    bench.measure_task(bench.parse(["task=Cartpole"]), ["task=Cartpole"], [8])
    assert "not installed: skrl" in capsys.readouterr().err
