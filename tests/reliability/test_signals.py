"""Signals in every phase of a training."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from helpers.commands import ROOT
from helpers.training import the_run
from reliability.at_phase import PHASES
from reliability.processes import SMALL, TRAIN, Slot, rows, saved_iteration, temporary_files, the_error
from reliability.record import record

SCRIPT = ROOT / "tests" / "reliability" / "at_phase.py"
CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
OTHERS = (signal.SIGQUIT, signal.SIGUSR1, signal.SIGKILL)
LAST = 10
AT_ONCE = ("before the run folder", "before the first iteration", "evaluation", "closing")
"""Phases without unsaved work, which a signal ends at once."""


def injected(phase: str, number: signal.Signals, folder: Path, slot: Slot, arguments: Sequence[str]) -> int:
    """Send a signal in a phase; return the exit status after checking that stderr has at most one line."""
    done = slot.run(SCRIPT, phase, str(int(number)), *arguments, cwd=folder)
    assert (folder / "sent").exists(), f"{phase} was never reached\n{done.stderr}"
    assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) <= 1, done.stderr
    return done.returncode


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("numbers", [CAUGHT, OTHERS], ids=["caught", "others"])
def test_signal_in_any_phase_loses_no_saved_iteration(
    numbers: tuple[signal.Signals, ...], tmp_path: Path, slot: Slot
) -> None:
    lost: dict[str, int] = {}
    count = 0
    for number in numbers:
        for phase in PHASES:
            folder = tmp_path / f"{number.name} {phase}".replace(" ", "-")
            folder.mkdir()
            training = [*SMALL, f"max_iterations={LAST}"]
            if phase == "evaluation":
                assert slot.run(TRAIN, *training, cwd=folder).returncode == 0
                run = the_run(folder / "runs")
                before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
                status = injected(phase, number, folder, slot, [f"checkpoint={run}", "test=true"])
                assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before
            else:
                status = injected(phase, number, folder, slot, training)
            count += 1
            at_once = number in OTHERS or (phase in AT_ONCE and number != signal.SIGINT)
            assert status == (-number if at_once else 128 + number), (number.name, phase, status)
            if not list(folder.glob("runs/*/*-*/checkpoints/last.pt")):
                assert phase in AT_ONCE, (number.name, phase)
                if list(folder.glob("runs/*/*-*")):  # run without a checkpoint
                    assert "no checkpoint in" in the_error(slot.run(TRAIN, "checkpoint=Cartpole", cwd=folder))
                continue
            run = the_run(folder / "runs")
            at = int((folder / "sent").read_text())
            saved = saved_iteration(run)
            if number in CAUGHT:
                assert saved >= at, (number.name, phase)
            if number == signal.SIGINT or not at_once:
                assert temporary_files(run) == [] and not (run / "lock").exists()
            lost[phase] = max(lost.get(phase, 0), at - saved)
            again = slot.run(TRAIN, f"checkpoint={run}", f"max_iterations={saved + 2}", cwd=folder)
            assert again.returncode == 0 and again.stderr == "", (number.name, phase, again.stderr)
            assert rows(run) == list(range(1, saved + 3)) and temporary_files(run) == []
            shutil.rmtree(folder)
    names = ", ".join(number.name for number in numbers)
    worst = max(lost.values())
    phases = ", ".join(PHASES)
    if numbers is CAUGHT:
        assert worst == 0
        outcome = "writes a checkpoint and ends; outside of iterations ends at once; always resumed"
        record(names, f"each in each of {len(PHASES)} phases: {phases}", count, outcome, "nothing")
    else:
        outcome = "ends at once; always resumed"
        since = f"at most {worst} iterations"
        record(names, f"each in each of the same {len(PHASES)} phases", count, outcome, since)
