"""Searches that are killed, or whose disk is full, while they write the study database."""

from __future__ import annotations

import random
import signal
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from helpers.commands import ROOT
from reliability.processes import Slot
from reliability.record import record
from reliability.test_disk import KIND, Disk, disk

__all__ = ["disk"]

TUNE = ROOT / "tools" / "tune.py"
SPACE = "ppo.learning_rate: {low: 1.0e-6, high: 1.0e-2, log: true}\n"
SMALL = ("task=Cartpole", "device=cpu", "num_envs=16", "ppo.horizon=4", "ppo.minibatch_size=64", "space=space.yaml")
SMALL = (*SMALL, "study=poles", "pruner=none", "max_iterations=20")


def trials(database: Path, state: str) -> int:
    """Count trials in a state; check that the database is intact."""
    if not database.exists():
        return 0
    with closing(sqlite3.connect(database, timeout=60.0)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        if not connection.execute("SELECT * FROM sqlite_master WHERE name = 'trials'").fetchall():
            return 0
        return connection.execute("SELECT COUNT(*) FROM trials WHERE state = ?", (state,)).fetchone()[0]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_repeatedly_killed_search_keeps_its_study(tmp_path: Path, slot: Slot) -> None:
    count, chance, times, kept = 10, random.Random(0), [], 0
    (tmp_path / "space.yaml").write_text(SPACE)
    database = tmp_path / "runs" / "poles" / "study.db"
    for number in range(count):
        began = time.monotonic()
        search = slot.start(TUNE, *SMALL, "trials=1000", cwd=tmp_path)
        search.wait_for(lambda number=number: trials(database, "RUNNING") > number)
        times.append(time.monotonic() - began)
        time.sleep(chance.uniform(0.0, 3.0))
        search.send(signal.SIGKILL)
        search.ended()
        before, kept = kept, trials(database, "COMPLETE")
        assert kept >= before, "a trial was lost"
    done = slot.run(TUNE, *SMALL, f"trials={kept + 1}", cwd=tmp_path)
    assert done.returncode == 0 and trials(database, "COMPLETE") == kept + 1, done.stderr
    record(
        "`kill -9` of a search",
        "SIGKILL of `tools/tune.py` up to 3 s after a new trial has begun; the same command is given again",
        count,
        f"the same command continues within {max(times):.0f} s",
        "the current trial",
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_search_on_full_disk_ends_in_one_line_and_resumes(disk: Disk) -> None:
    count = 5
    disk.clear()
    (disk.seen / "space.yaml").write_text(SPACE)

    def runs() -> int:
        """Count started runs."""
        return len([*disk.seen.glob("runs/poles.*/2*/metrics.csv")])

    for _ in range(count):
        before = runs()
        search = disk.slot.start(TUNE, *SMALL, "trials=1000", cwd=disk.inside)
        search.wait_for(lambda before=before: runs() > before)
        disk.fill()
        done = search.ended()
        *_, line = done.stderr.splitlines()
        assert done.returncode == 2 and "Traceback" not in done.stderr and line.startswith("error: "), done.stderr
        assert ("No space" in line or "disk is full" in line) and "same command" in line, line
        disk.make_room()
        for run in disk.seen.glob("runs/poles.*/2*/checkpoints"):
            for file in run.iterdir():
                file.unlink()
    done = disk.slot.run(TUNE, *SMALL, "trials=1", cwd=disk.inside)
    assert done.returncode == 0, done.stderr
    record(
        "Full disk, in a search",
        f"{KIND} is filled while a search writes the database of its study; then there is room, and the same command",
        count,
        "one error line; the same command continues",
        "the current trial",
    )
