"""Searches on Ray Tune: what is stopped, what is lost, and what users are told."""

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
    found = table_of(tmp_path)
    assert len(found) == 4 and len({row["run"] for row in found}) == 4
    for row in found:
        iterations = int(read_csv(Path(row["run"]))[-1]["iteration"])
        assert iterations == 18 or row["state"] == "pruned"  # which may have been ahead of what Ray had seen
        assert load(Path(row["run"]) / "checkpoints" / "last.pt")["iteration"] == iterations
    again = tune(tmp_path, "method=asha", "trials=5", "max_iterations=18", "grace=2")
    assert again.returncode == 0 and len(table_of(tmp_path)) == 5


@pytest.mark.slow
def test_a_trial_that_is_killed_does_not_end_the_search(tmp_path: Path) -> None:
    search = start(tmp_path, "method=asha", "trials=3", "max_iterations=60", "grace=60")

    def runs() -> list[int]:
        lines = {process.pid: process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])}
        return [pid for pid, words in lines.items() if any(word.startswith(f"log.dir={tmp_path}") for word in words)]

    wait_for(search, lambda: runs() and [*tmp_path.glob("runs/poles.*/2*/metrics.csv")])
    os.kill(runs()[0], signal.SIGKILL)
    said, _ = search.communicate(timeout=250)
    assert search.returncode == 0 and "1 fail" in said, said
    assert sorted(row["state"] for row in table_of(tmp_path)) == ["complete", "complete", "fail"], table_of(tmp_path)
    assert sorted(row["log"] for row in table_of(tmp_path)) == ["0000.log", "0001.log", "0002.log"]


@pytest.mark.slow
def test_sigterm_ends_a_search_on_ray_and_leaves_no_process(tmp_path: Path) -> None:
    search = start(tmp_path, "method=asha", "trials=2", "max_iterations=5000")
    wait_for(search, lambda: len([*tmp_path.glob("runs/poles.*/2*/metrics.csv")]) == 2)
    below = psutil.Process(search.pid).children(recursive=True)
    search.terminate()
    _, said = search.communicate(timeout=100)
    assert search.returncode == 128 + signal.SIGTERM, said
    first, last = said.splitlines()  # and no stack trace of Ray's
    assert first.startswith("poles: 0/2 trials") and last.startswith("stopped: ")
    assert psutil.wait_procs(below, timeout=10)[1] == []
