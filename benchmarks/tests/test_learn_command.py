"""Command line of `benchmarks/bench.py learn`: trainings that stop at a threshold or by time, and resume."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import bench
from helpers.commands import ROOT, run_command
from learn.learning import Goal

BENCH = ROOT / "benchmarks" / "bench.py"

GOALS = """\
Cartpole:
  threshold: {threshold}
  minutes: {minutes}
  overrides: [device=cpu, num_envs=64, ppo.minibatch_size=1024]
  compare: "494"
Pendulum: {{threshold: 700}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("learn")
    (folder / "benchmarks" / "learn").mkdir(parents=True)
    (folder / "docs").mkdir()
    (folder / "docs" / "benchmarks.md").write_text(
        "# Mine\n\n<!-- learn -->\nnothing yet\n<!-- /learn -->\n\nThe end.\n"
    )
    return folder


def learn(folder: Path, *arguments: str, threshold: float = 60.0, minutes: float = 1.0, check: bool = True):
    (folder / "benchmarks" / "learn" / "learn.yaml").write_text(GOALS.format(threshold=threshold, minutes=minutes))
    return run_command(sys.executable, BENCH, "learn", *arguments, cwd=folder, check=check)


def outcomes(folder: Path) -> list[dict]:
    return json.loads((folder / "benchmarks" / "learn" / "tasks.json").read_text())["outcomes"]


@pytest.mark.slow
def test_training_stops_by_time_and_resumes_to_threshold(folder):
    # An unreachable return in almost no time: stops by time, with a checkpoint.
    learn(folder, "Cartpole", threshold=600.0, minutes=0.01)
    [first] = outcomes(folder)
    assert not first["reached"] and first["env_steps"] > 0 and (folder / first["run"] / "checkpoints/last.pt").is_file()

    # The same training continues and ends at the threshold.
    threshold = 60.0 + (first["best_return"] or 0.0)  # above anything reached so far
    done = learn(folder, "Cartpole", threshold=threshold)
    [second] = outcomes(folder)
    assert second["run"] == first["run"] and second["reached"]
    assert second["env_steps"] > first["env_steps"] and second["seconds"] > first["seconds"]
    assert second["best_return"] >= threshold and second["random_return"] < 60.0
    assert second["environment"]["versions"]["torch"] and second["environment"]["cpu"]["available"]
    assert "git" in second["environment"]
    assert [point[0] for point in second["curve"]] == sorted(point[0] for point in second["curve"])

    page = (folder / "docs" / "benchmarks.md").read_text()
    row = next(line for line in done.stdout.splitlines() if line.startswith("|`Cartpole`"))
    assert f"{row}\n\n1 seed " in page and "nothing yet" not in page
    assert "|`device=cpu num_envs=64 ppo.minibatch_size=1024`|" in row and page.endswith(
        "\n<!-- /learn -->\n\nThe end.\n"
    )
    assert (folder / "benchmarks" / "learn" / "tasks.png").read_bytes().startswith(b"\x89PNG")

    # Reached goals are not trained again.
    learn(folder, "Cartpole", threshold=threshold)
    assert outcomes(folder) == [second]

    # A changed threshold is judged by the recorded curve if the run is missing, as in a fresh clone.
    shutil.move(folder / "runs", folder / "elsewhere")
    learn(folder, "--table", threshold=600.0)
    [third] = outcomes(folder)
    assert not third["reached"] and third["seconds_to_threshold"] is None and third["curve"] == second["curve"]
    shutil.move(folder / "elsewhere", folder / "runs")
    learn(folder, "--table", threshold=threshold)
    assert outcomes(folder) == [second]


def test_changed_settings_restart_training():
    goal = Goal(task="Cartpole", threshold=100.0)
    recipe, settings = bench.composed(goal, "auto")
    first = bench.begin(goal, 1, None, recipe, settings)
    first.seconds = 20.0
    assert bench.begin(goal, 1, first, recipe, settings) == first
    first.settings = ""  # written by an older version
    assert bench.begin(goal, 1, first, recipe, settings).seconds == 20.0
    first.settings = "another yaml"
    assert bench.begin(goal, 1, first, recipe, settings).seconds == 0.0
    wider = Goal(task="Cartpole", threshold=100.0, overrides=("num_envs=64",))
    known = bench.begin(goal, 1, None, recipe, settings)
    assert bench.begin(wider, 1, known, recipe, settings).overrides == ["num_envs=64"]
    tasks = ("Cartpole", "Pendulum", "Cartpole")
    hashes = [bench.composed(Goal(task=task, threshold=1.0), "auto")[1] for task in tasks]
    assert hashes[0] == hashes[2] != hashes[1]


def test_random_return_uses_settings_of_goal():
    short = Goal(task="Cartpole", threshold=1.0, overrides=("task.episode_length=2", "num_envs=8"))
    whole = Goal(task="Cartpole", threshold=1.0)
    assert bench.random_return(short, "full") <= 2.0 < bench.random_return(whole, "full")


def test_goal_has_outcome_per_recipe():
    goal = Goal(task="Go1Velocity", threshold=1.0)
    quick, full = bench.composed(goal, "quick"), bench.composed(goal, "full")
    assert (quick[0], full[0]) == ("quick", "full") and quick[1] != full[1]
    assert bench.begin(goal, 1, None, *quick).recipe == "quick"


def test_ctrl_c_stops_all_trainings_and_keeps_results(folder, tmp_path):
    (tmp_path / "learn.yaml").write_text(
        "Cartpole: {threshold: 9999, overrides: [device=cpu, num_envs=16, ppo.minibatch_size=256]}\n"
        "Pendulum: {threshold: 9999}\n"
    )
    command = [sys.executable, BENCH, "learn", "--out", tmp_path, "--runs", tmp_path / "runs"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    rows, deadline = tmp_path / "runs" / "learn-Cartpole" / "latest" / "metrics.csv", time.time() + 100.0
    while not rows.is_file() and time.time() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted" in errors and "Traceback" not in errors
    assert not (tmp_path / "runs" / "learn-Pendulum").exists()
    [found] = json.loads((tmp_path / "tasks.json").read_text())["outcomes"]
    assert found["env_steps"] > 0 and (Path(found["run"]) / "checkpoints" / "last.pt").is_file()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("Cartpol",), "Cartpole, Pendulum"),
        (("Cartpole", "--seeds", "a"), "--seeds"),
        (("Cartpole", "--jobs", "0"), "--jobs"),
        (("Cartpole", "--minutes", "-1"), "--minutes"),
    ],
)
def test_bad_input_is_rejected_in_one_line(folder, arguments, word):
    done = learn(folder, *arguments, check=False)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert word in done.stderr


def test_failed_training_is_reported_and_others_continue(folder):
    goals = folder / "benchmarks" / "learn" / "learn.yaml"
    goals.write_text(
        "Cartpole: {threshold: 10, overrides: [device=cpu, num_env=3]}\n"
        "Nothing: {threshold: 1}\n"
        "Pendulum: {threshold: 10, overrides: [num_envs=-3]}\n"
    )
    done = run_command(sys.executable, BENCH, "learn", cwd=folder, check=False)
    assert "num_env'" in done.stderr and "'Nothing'" in done.stderr
    assert "training Pendulum" in done.stderr and "num_envs" in done.stderr
    assert done.returncode == 1
