"""Searches on Ray Tune: pruning, lost trials, and console output."""

from __future__ import annotations

import os
import signal
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest

from gpusim_rl.distributed import ray_search
from gpusim_rl.distributed.search import read_search
from gpusim_rl.errors import ConfigError
from gpusim_rl.files.checkpoint_file import load
from gpusim_rl.files.safe_open import lock, open_file
from helpers.searches import SMALL, start, table_of, tune, wait_for
from helpers.training import read_csv


def test_only_one_command_may_search_on_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    search = read_search([*SMALL[:-2], "study=poles", "method=asha", f"log.dir={tmp_path}"])
    monkeypatch.setattr(ray_search, "ray_cluster", lambda _: nullcontext())
    (tmp_path / "poles").mkdir()
    with open_file(tmp_path / "poles" / "ray.lock", "ab") as file:
        assert lock(file)
        with pytest.raises(ConfigError, match="another process"):
            ray_search.tune(search)


@pytest.mark.slow
def test_asha_prunes_trials_and_resumes_search(tmp_path: Path) -> None:
    done = tune(tmp_path, "method=asha", "trials=4", "max_iterations=18", "grace=2")
    assert "complete" in done.stdout and "pruned" in done.stdout, done.stdout
    found = table_of(tmp_path)
    assert len(found) == 4 and len({row["run"] for row in found}) == 4
    for row in found:
        iterations = int(read_csv(Path(row["run"]))[-1]["iteration"])
        assert iterations == 18 or row["state"] == "pruned"  # a pruned run may be ahead of Ray's record
        assert load(Path(row["run"]) / "checkpoints" / "last.pt")["iteration"] == iterations
    again = tune(tmp_path, "method=asha", "trials=5", "max_iterations=18", "grace=2")
    assert again.returncode == 0 and len(table_of(tmp_path)) == 5


@pytest.mark.slow
def test_killed_trial_does_not_end_search(tmp_path: Path) -> None:
    search = start(tmp_path, "method=asha", "trials=3", "max_iterations=60", "grace=60")

    def runs() -> list[int]:
        lines = {process.pid: process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])}
        return [pid for pid, words in lines.items() if any(word.startswith(f"log.dir={tmp_path}") for word in words)]

    wait_for(search, lambda: runs() and [*tmp_path.glob("runs/poles.*/2*/metrics.csv")])
    os.kill(runs()[0], signal.SIGKILL)
    output, _ = search.communicate(timeout=250)
    assert search.returncode == 0 and "1 fail" in output, output
    assert sorted(row["state"] for row in table_of(tmp_path)) == ["complete", "complete", "fail"], table_of(tmp_path)
    assert sorted(row["log"] for row in table_of(tmp_path)) == ["0000.log", "0001.log", "0002.log"]


@pytest.mark.slow
def test_sigterm_ends_ray_search_without_leftover_processes(tmp_path: Path) -> None:
    search = start(tmp_path, "method=asha", "trials=2", "max_iterations=5000")
    wait_for(search, lambda: len([*tmp_path.glob("runs/poles.*/2*/metrics.csv")]) == 2)
    below = psutil.Process(search.pid).children(recursive=True)
    search.terminate()
    _, errors = search.communicate(timeout=100)
    assert search.returncode == 128 + signal.SIGTERM, errors
    first, last = errors.splitlines()  # no stack trace of Ray
    assert first.startswith("poles: 0/2 trials") and last.startswith("stopped: ")
    assert psutil.wait_procs(below, timeout=10)[1] == []
