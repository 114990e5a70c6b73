"""Trainings in the background that a test kills or stops."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from helpers.commands import ROOT
from helpers.training import read_csv


class Training:
    """Training in the background, and its actors."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        command = [sys.executable, str(ROOT / "train.py"), *arguments]
        self.folder, self.printed = folder, (folder / "printed").open("w+")
        self.process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=self.printed)

    def rows(self) -> list[dict[str, str]]:
        """Return rows of metrics.csv so far."""
        found = [*self.folder.glob("runs/Cartpole/2*/metrics.csv")]
        return read_csv(found[0].parent, machine=True) if found else []

    def number(self, name: str) -> float:
        """Return a value of the latest row, 0 if there is none."""
        rows = self.rows()
        return float(rows[-1][name]) if rows else 0.0

    def actors(self, word: str = "process_engine") -> list[psutil.Process]:
        """Return the live descendants with a word in the command line."""
        found = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.Error):  # just ended
                found += [child] if child.status() != "zombie" and word in " ".join(child.cmdline()) else []
        return found

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> float:
        """Wait for a condition; return the time taken [s]."""
        began = time.monotonic()
        while not condition():
            assert self.process.poll() is None, self.stderr()
            assert time.monotonic() - began < timeout_s, self.rows()[-1:]
            time.sleep(0.05)
        return time.monotonic() - began

    def stderr(self) -> str:
        return (self.folder / "printed").read_text()

    def end(self) -> str:
        """Interrupt the training; return its stderr."""
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(60) == 130, self.stderr()
        return self.stderr()


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Callable[..., Training]]:
    """Start trainings, killed at the end of the test."""
    running: list[Training] = []

    def start(*arguments: str) -> Training:
        running.append(Training(tmp_path, *arguments))
        return running[-1]

    yield start
    for it in running:
        it.process.kill()
        it.process.wait()
        it.printed.close()
