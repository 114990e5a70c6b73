"""Two processes on one run folder, and concurrent reads of checkpoints."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from gpusim_rl.files.checkpoint_file import load
from helpers.training import the_run
from reliability.processes import SMALL, TRAIN, Running, Slot, rows, saved_iteration, temporary_files, the_error
from reliability.record import record

PAIRS = 20


def trains(process: Running) -> bool:
    return "\nresumed  at iteration" in process.out


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_only_one_of_two_processes_trains_in_run_folder(tmp_path: Path, slot: Slot, second_slot: Slot) -> None:
    chance = random.Random(0)
    assert slot.run(TRAIN, *SMALL, "max_iterations=3", cwd=tmp_path).returncode == 0
    run = the_run(tmp_path / "runs")
    kinds = {"is already training": 0, "just continued": 0}
    reads = 0
    for number in range(PAIRS):
        before = saved_iteration(run)
        both = []
        for one in (slot, second_slot):
            both.append(one.start(TRAIN, f"checkpoint={run}", "max_iterations=1000000", cwd=tmp_path))
            time.sleep(chance.choice([0.0, 0.0, 0.02, 0.2, 0.5]))
        end = time.monotonic() + 60
        while all(process.alive for process in both) or not any(trains(process) for process in both):
            load(run / "checkpoints" / "last.pt")  # a partial file raises ConfigError
            reads += 1
            time.sleep(0.01)
            assert time.monotonic() < end, f"pair {number}: both train, or none"
        (loser,) = [process for process in both if not process.alive]
        (winner,) = [process for process in both if process is not loser]
        line = the_error(loser.ended())
        (kind,) = [kind for kind in kinds if kind in line]
        kinds[kind] += 1
        assert f"process {winner.pid} on" in line or kind == "just continued", line
        winner.wait_for(lambda before=before: saved_iteration(run) > before)
        winner.send(signal.SIGTERM)
        assert winner.ended().returncode == 128 + signal.SIGTERM, winner.ended().stderr
        assert rows(run) == list(range(1, saved_iteration(run) + 1))
        assert temporary_files(run) == [] and not (run / "lock").exists()
    record(
        "Two processes resume one run",
        f"started 0 to 0.5 s apart; meanwhile last.pt is read {reads} times",
        PAIRS,
        "one trains, the other ends with one line",
        "nothing",
    )
