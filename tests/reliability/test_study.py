"""A search that is killed, or whose disk is full, while it writes the journal of its study."""

from __future__ import annotations

import json
import random
import signal
import time
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


def is_whole(journal: Path) -> bool:
    """Every line is a record."""
    text = journal.read_bytes()
    return text.endswith(b"\n") and all(isinstance(json.loads(line), dict) for line in text.splitlines())


def ended(journal: Path) -> int:
    """Trials that are complete."""
    return sum(b'"op_code":6' in line and b'"state":1' in line for line in journal.read_bytes().splitlines())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_search_that_is_killed_again_and_again_keeps_its_study(tmp_path: Path, slot: Slot) -> None:
    count, chance, torn, times = 10, random.Random(0), 0, []
    (tmp_path / "space.yaml").write_text(SPACE)
    journal = tmp_path / "runs" / "poles" / "journal.log"
    for number in range(count):
        before = journal.read_bytes() if number else b""
        kept = before[: before.rfind(b"\n") + 1]
        began = time.monotonic()
        search = slot.start(TUNE, *SMALL, "trials=1000", cwd=tmp_path)
        search.wait_for(lambda kept=kept: journal.exists() and len(journal.read_bytes()) > len(kept) + 500)
        times.append(time.monotonic() - began)
        time.sleep(chance.uniform(0.0, 3.0))
        search.send(signal.SIGKILL)
        search.ended()
        text = journal.read_bytes()
        assert text.startswith(kept), "a record was lost"
        if number % 2:  # the moment within a write is too short to be met: what it leaves
            begin = text.rindex(b"\n", 0, -1) + 1
            journal.write_bytes(text[: chance.randrange(begin + 1, len(text))])
            torn += 1
    done = slot.run(TUNE, *SMALL, f"trials={ended(journal) + 1}", cwd=tmp_path)
    assert done.returncode == 0 and is_whole(journal), done.stderr
    record(
        "`kill -9` of a search",
        "SIGKILL of `tools/tune.py` up to 3 s after a new trial has begun; every second time its last record is then"
        " cut at a random byte, as a kill within a write leaves it; the same command is given again",
        count,
        f"the same command went on every time, {max(times):.0f} s after it was given at the latest; all whole"
        " records stay",
        f"the trial under way, and the record that was cut ({torn} times)",
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_search_whose_disk_is_full_ends_in_one_line_and_goes_on(disk: Disk) -> None:
    count = 5
    disk.clear()
    (disk.seen / "space.yaml").write_text(SPACE)
    journal = disk.seen / "runs" / "poles" / "journal.log"
    for number in range(count):
        search = disk.slot.start(TUNE, *SMALL, "trials=1000", cwd=disk.inside)
        size = journal.stat().st_size if number else 0
        search.wait_for(lambda size=size: journal.exists() and journal.stat().st_size > size + 500)
        disk.fill()
        done = search.ended()
        *_, line = done.stderr.splitlines()
        assert done.returncode == 2 and "Traceback" not in done.stderr and line.startswith("error: "), done.stderr
        assert "No space left on device" in line and "The same command goes on" in line, line
        assert is_whole(journal)
        disk.make_room()
        for run in disk.seen.glob("runs/poles.*/2*/checkpoints"):
            for file in run.iterdir():
                file.unlink()
    done = disk.slot.run(TUNE, *SMALL, f"trials={ended(journal) + 1}", cwd=disk.inside)
    assert done.returncode == 0, done.stderr
    record(
        "Full disk, in a search",
        f"{KIND} is filled while a search writes the journal of its study; then there is room, and the same command",
        count,
        "one line, exit code 2; no half record is left; the same command goes on every time",
        "the trial under way",
    )
