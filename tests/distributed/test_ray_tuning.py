"""Searches on Ray Tune: what is stopped, what is lost, and what users are told."""

from __future__ import annotations

import csv
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest

from gpusim_rl.distributed import ray_search
from gpusim_rl.distributed.search import read_search
from gpusim_rl.errors import ConfigError
from gpusim_rl.files.checkpoint_file import load
from gpusim_rl.files.safe_open import lock, open_file
from helpers.commands import ROOT, Finished, run_command
from helpers.training import read_csv

SPACE = "ppo.learning_rate: {low: 1.0e-6, high: 1.0e-2, log: true}\nppo.epochs: {choices: [1, 4]}\n"
SMALL = ("task=Cartpole", "device=cpu", "num_envs=32", "space=space.yaml", "study=poles")


def tune(folder: Path, *words: str) -> Finished:
    (folder / "space.yaml").write_text(SPACE)
    return run_command(sys.executable, ROOT / "tools" / "tune.py", *SMALL, *words, cwd=folder, timeout_s=280)


def trials(folder: Path) -> list[dict[str, str]]:
    with (folder / "runs" / "poles" / "trials.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_without_ray_one_line_has_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=re.escape("method=asha needs ray: pip install 'gpusim-rl[ray]'")):
        ray_search.tune(read_search([*SMALL[:-2], "study=poles", "method=asha", f"log.dir={tmp_path}"]))
    assert not (tmp_path / "poles").exists()


def test_one_command_at_a_time_searches_on_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    search = read_search([*SMALL[:-2], "study=poles", "method=asha", f"log.dir={tmp_path}"])
    monkeypatch.setattr(ray_search, "ray_cluster", lambda _: nullcontext())
    (tmp_path / "poles").mkdir()
    with open_file(tmp_path / "poles" / "ray.lock", "ab") as file:
        assert lock(file)
        with pytest.raises(ConfigError, match="another command"):
            ray_search.tune(search)


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
    assert first.startswith("poles: 0/2 trials") and last.startswith("stopped: ")
    assert psutil.wait_procs(below, timeout=10)[1] == []
