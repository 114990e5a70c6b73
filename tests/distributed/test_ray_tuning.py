"""Searches on Ray Tune: what is stopped, what is lost, and what users are told."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from gpusim_rl.distributed.ray_search import _alone
from gpusim_rl.errors import ConfigError
from gpusim_rl.files.checkpoint_file import load
from helpers.commands import ROOT, Finished, run_command
from helpers.training import read_csv

SPACE = "ppo.learning_rate: {low: 1.0e-6, high: 1.0e-2, log: true}\nppo.epochs: {choices: [1, 4]}\n"
SMALL = ("task=Cartpole", "device=cpu", "num_envs=32", "space=space.yaml", "study=poles")


def tune(folder: Path, *words: str, env: dict[str, str] | None = None, check: bool = True) -> Finished:
    (folder / "space.yaml").write_text(SPACE)
    tool = ROOT / "tools" / "tune.py"
    return run_command(sys.executable, tool, *SMALL, *words, cwd=folder, env=env, check=check, timeout_s=280)


def trials(folder: Path) -> list[dict[str, str]]:
    with (folder / "runs" / "poles" / "trials.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_without_ray_one_line_has_the_command(tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("raise ModuleNotFoundError(\"No module named 'ray'\", name='ray')\n")
    done = tune(tmp_path, "method=asha", env={"PYTHONPATH": str(tmp_path)}, check=False)
    assert done.returncode == 2 and "method=asha needs ray: pip install 'gpusim-rl[ray]'" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_population_of_ray_changes_no_sizes(tmp_path: Path) -> None:
    (tmp_path / "space.yaml").write_text("ppo.horizon: {choices: [8, 16]}\n")
    words = (*SMALL, "method=pbt")
    done = run_command(sys.executable, ROOT / "tools" / "tune.py", *words, cwd=tmp_path, check=False)
    assert done.returncode == 2 and "ppo.horizon cannot change from one checkpoint to the next" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_one_command_at_a_time_searches_on_ray(tmp_path: Path) -> None:
    with _alone(tmp_path), pytest.raises(ConfigError, match="another command searches there"), _alone(tmp_path):
        pass
    with _alone(tmp_path):  # the first one has ended
        pass


@pytest.mark.slow
def test_asha_stops_hopeless_trials_and_goes_on_where_it_was(tmp_path: Path) -> None:
    done = tune(tmp_path, "method=asha", "trials=4", "max_iterations=18", "grace=2")
    assert "complete" in done.stdout and "pruned" in done.stdout, done.stdout
    found = trials(tmp_path)
    assert len(found) == 4 and len({row["run"] for row in found}) == 4
    for row in found:
        iterations = int(read_csv(Path(row["run"]))[-1]["iteration"])
        assert iterations == 18 or row["state"] == "pruned"  # which may have been ahead of what Ray had seen
        assert load(Path(row["run"]) / "checkpoints" / "last.pt")["iteration"] == iterations
    again = tune(tmp_path, "method=asha", "trials=5", "max_iterations=18", "grace=2")
    assert again.returncode == 0 and len(trials(tmp_path)) == 5


@pytest.mark.slow
def test_a_trial_that_is_killed_does_not_end_the_search(tmp_path: Path) -> None:
    (tmp_path / "space.yaml").write_text(SPACE)
    words = (*SMALL, "method=asha", "trials=3", "max_iterations=60", "grace=60")
    command = [sys.executable, str(ROOT / "tools" / "tune.py"), *words]
    search = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    end, found = time.monotonic() + 100, None
    while found is None or not [*tmp_path.glob("runs/poles.*/2*/metrics.csv")]:
        assert time.monotonic() < end and search.poll() is None
        lines = {process.pid: process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])}
        runs = [pid for pid, words in lines.items() if any(word.startswith(f"log.dir={tmp_path}") for word in words)]
        found = runs[0] if runs else None
        time.sleep(0.1)
    os.kill(found, signal.SIGKILL)
    said, _ = search.communicate(timeout=250)
    assert search.returncode == 0 and "1 fail" in said, said
    assert sorted(row["state"] for row in trials(tmp_path)) == ["complete", "complete", "fail"], trials(tmp_path)
    assert sorted(row["log"] for row in trials(tmp_path)) == ["0000.log", "0001.log", "0002.log"]


@pytest.mark.slow
def test_sigterm_ends_a_search_on_ray_and_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "space.yaml").write_text(SPACE)
    words = (*SMALL, "method=asha", "trials=2", "max_iterations=5000")
    command = [sys.executable, str(ROOT / "tools" / "tune.py"), *words]
    search = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 100
    while len([*tmp_path.glob("runs/poles.*/2*/metrics.csv")]) < 2:
        assert time.monotonic() < end and search.poll() is None
        time.sleep(0.1)
    below = psutil.Process(search.pid).children(recursive=True)
    search.terminate()
    _, said = search.communicate(timeout=100)
    assert search.returncode == 128 + signal.SIGTERM, said
    first, last = said.splitlines()  # and no stack trace of Ray's
    assert first.startswith("poles: 0 of 2 trials have ended") and last.startswith("stopped: ")
    assert psutil.wait_procs(below, timeout=10)[1] == []


@pytest.mark.slow
def test_a_population_of_ray_copies_checkpoints(tmp_path: Path) -> None:
    done = tune(tmp_path, "method=pbt", "trials=3", "max_iterations=24", "grace=4")
    assert "3 complete" in done.stdout, done.stdout
    assert [row["state"] for row in trials(tmp_path)] == ["complete"] * 3
    # A member that copied has more than one run folder, and the later one goes on from the donor's iteration.
    branches = [run for run in tmp_path.glob("runs/poles.*/2*") if not run.is_symlink()]
    assert len(branches) > 3
    first = [int(read_csv(run)[0]["iteration"]) for run in branches]
    assert {iteration % 4 for iteration in first} == {1} and max(first) > 1
