"""Actors that are killed or hang while their learner trains."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from helpers.commands import ROOT
from helpers.training import read_csv
from reliability.processes import saved_iteration
from reliability.record import record

TIMEOUT_S = 60.0
WORDS = ("task=Cartpole", "algo=impala", "impala.network.hidden=[16,16]", "num_envs=4", "max_iterations=1000000")
WORDS += ("actors=process", "num_actors=2", "actors.timeout_s=3", "log.console=plain")


class Training:
    """A training with two actors, in the background."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, str(ROOT / "train.py"), *WORDS]
        self.folder, self.said = folder, (folder / "said").open("w+")
        self.process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=self.said)

    @property
    def run(self) -> Path:
        [run] = self.folder.glob("runs/*/2*")
        return run

    def number(self, name: str) -> float:
        rows = read_csv(self.run, machine=True) if [*self.folder.glob("runs/*/2*/metrics.csv")] else []
        return float(rows[-1][name]) if rows else 0.0

    def actors(self) -> list[psutil.Process]:
        below = psutil.Process(self.process.pid).children(recursive=True)
        return [it for it in below if it.status() != "zombie" and "process_engine" in " ".join(it.cmdline())]

    def wait_for(self, condition: Callable[[], bool]) -> float:
        began = time.monotonic()
        while not condition():
            assert self.process.poll() is None, (self.folder / "said").read_text()
            assert time.monotonic() - began < TIMEOUT_S
            time.sleep(0.05)
        return time.monotonic() - began

    def end(self) -> str:
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(TIMEOUT_S) == 130
        assert saved_iteration(self.run) == int(self.number("iteration"))
        return (self.folder / "said").read_text()


@pytest.fixture
def training(tmp_path: Path):
    one = Training(tmp_path)
    yield one
    one.process.kill()
    one.process.wait()
    one.said.close()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("number", "count"), [(signal.SIGSTOP, 3), (signal.SIGKILL, 10)], ids=["hangs", "killed"])
def test_an_actor_that_is_lost_comes_back(training: Training, number: signal.Signals, count: int) -> None:
    hangs, times = number == signal.SIGSTOP, []
    for lost in range(1, count + 1):
        training.wait_for(lambda: training.number("actors/alive") == 2 and len(training.actors()) == 2)
        before = training.number("iteration")
        training.wait_for(lambda before=before: training.number("iteration") > before + 20)
        training.actors()[0].send_signal(number)
        times.append(training.wait_for(lambda lost=lost: training.number("actors/restarts") == lost))
    training.wait_for(lambda: training.number("actors/alive") == 2)
    rollouts, said = training.number("actors/lost_rollouts"), training.end()
    assert said.count("was silent for" if hangs else "died; restarting it") == count and rollouts <= count
    record(
        "An actor hangs" if hangs else "Working actors are killed",
        f"{number.name} to one of two actors, again and again" + ", `actors.timeout_s=3`" * hangs,
        count,
        f"noticed, told and started again, after {max(times):.1f} s at most; the learner goes on meanwhile, and last.pt"
        " is of the last row at the end",
        f"{rollouts:.0f} rollouts",
    )
