"""Training processes that tests can kill, signal and starve.

Each is forked from a Python process with all imports done, and starts in half a second of CPU time.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

import psutil
import pytest

from gpusim_rl.run.run_dir import SAVE_ALL
from helpers.commands import ROOT, Finished

TRAIN = ROOT / "train.py"
# 20 ms per iteration; one episode per evaluation.
SMALL = (
    *("num_envs=16", "ppo.horizon=4", "ppo.epochs=1", "ppo.minibatch_size=64", "ppo.network.hidden=[16,16]"),
    *("task.episode_length=60", "device=cpu", "wandb_activate=false"),
    *("log.console=plain", "log.checkpoint_interval=3", "log.keep=3"),
)
MODULES = ("mujoco", "gpusim_rl.api", "gpusim_rl.settings.compose", "gpusim_rl.run.trainer", "gpusim_rl.tasks.cartpole")
TIMEOUT_S = 60
HANGS = -signal.SIGALRM
"""Exit status of a command that exceeds TIMEOUT_S."""


class Slot:
    """Python server that runs one command at a time.

    Args:
        prefix: Command prefix, such as `unshare -m`.
    """

    def __init__(self, *prefix: str) -> None:
        script = ROOT / "tests" / "helpers" / "warm_python.py"
        command = [*prefix, sys.executable, str(script), *MODULES]
        # One thread each, because 100 trainings share the machine with the tests.
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self.server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables)
        self._running: Running | None = None

    def start(self, *words: str | Path, cwd: Path) -> Running:
        """Start a Python script after killing leftovers of a failed test."""
        self._kill()
        self._running = Running(self, [str(word) for word in words], cwd)
        return self._running

    def run(self, *words: str | Path, cwd: Path) -> Finished:
        """Run a Python script to its end; a hang returns `HANGS`."""
        return self.start(*words, cwd=cwd).ended()

    def close(self) -> None:
        """End the server and its command."""
        self._kill()
        assert self.server.stdin is not None and self.server.stdout is not None
        self.server.stdin.close()
        self.server.wait(TIMEOUT_S)
        self.server.stdout.close()

    def _kill(self) -> None:
        if self._running is not None and self.server.poll() is None:
            self._running.send(signal.SIGKILL)
            self._running.ended()


class Running:
    """Running command."""

    def __init__(self, slot: Slot, words: list[str], cwd: Path) -> None:
        server = slot.server
        assert server.stdin is not None and server.stdout is not None
        self._replies: IO[str] = server.stdout
        self._files = [tempfile.NamedTemporaryFile("r") for _ in range(2)]  # noqa: SIM115 - closed in `ended`
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB", "HYDRA"))}
        kept |= {"NO_COLOR": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        kept[SAVE_ALL] = "1"  # saving every 3 iterations of 20 ms exceeds the 5 % limit
        request = {"argv": words, "cwd": str(cwd), "env": kept, "timeout_s": TIMEOUT_S, "announce": True}
        request |= {"stdout": self._files[0].name, "stderr": self._files[1].name}
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        self.pid: int = json.loads(self._replies.readline())["pid"]
        self._finished: Finished | None = None

    @property
    def out(self) -> str:
        """Output to stdout so far."""
        return Path(self._files[0].name).read_text()

    @property
    def err(self) -> str:
        """Output to stderr so far."""
        return Path(self._files[1].name).read_text()

    @property
    def alive(self) -> bool:
        """Return whether the command still runs."""
        return self._finished is None and psutil.pid_exists(self.pid)

    def wait_for(self, condition: Callable[[], object]) -> None:
        """Wait until the condition holds."""
        end = time.monotonic() + TIMEOUT_S
        while not condition():
            assert self.alive, f"ended early:\n{self.out[-2000:]}\n{self.err[-2000:]}"
            assert time.monotonic() < end, f"waited in vain:\n{self.out[-2000:]}\n{self.err[-2000:]}"
            time.sleep(0.005)

    def send(self, number: int) -> None:
        """Send a signal unless the command has ended."""
        if self.alive:
            os.kill(self.pid, number)

    def ended(self) -> Finished:
        """Wait for the end; return exit status and output."""
        if self._finished is None:
            reply = self._replies.readline()
            assert reply, "server has ended"
            self._finished = Finished(stdout=self.out, stderr=self.err, **json.loads(reply))
            for file in self._files:
                file.close()
        return self._finished


@pytest.fixture(scope="module")
def slot() -> Iterator[Slot]:
    """Start a server for commands."""
    one = Slot()
    yield one
    one.close()


@pytest.fixture(scope="module")
def second_slot() -> Iterator[Slot]:
    """Start a second server for concurrent commands."""
    one = Slot()
    yield one
    one.close()


def the_error(done: Finished, *, progress: str = "warning: ") -> str:
    """Return the final error line of a command; only warnings and lines starting with `progress` may precede it."""
    assert done.returncode == 2, f"exit {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    *before, last = done.stderr.splitlines()
    assert last.startswith("error: "), done.stderr
    assert all(line.startswith(("warning: ", progress)) for line in before), done.stderr
    return last


def saved_iteration(run: Path) -> int:
    """Return the iteration of last.pt."""
    from gpusim_rl.files.checkpoint_file import load

    return int(load(run / "checkpoints" / "last.pt")["iteration"])


def rows(run: Path) -> list[int]:
    """Return the iterations of the complete rows of metrics.csv."""
    file = run / "metrics.csv"
    lines = file.read_bytes().split(b"\n")[1:-1] if file.exists() else []
    return [int(line.partition(b",")[0]) for line in lines]


def temporary_files(run: Path) -> list[str]:
    """Return temporary files of interrupted writes."""
    return sorted(path.name for path in run.rglob(".*") if re.fullmatch(r"\..+\.tmp", path.name))


def process_of_rank(rank: int, processes: Iterable[psutil.Process]) -> psutil.Process:
    """Return the training process of a rank among the processes of torchrun."""
    for process in processes:
        with suppress(psutil.Error):
            if process.environ().get("RANK") == str(rank) and str(TRAIN) in process.cmdline()[:3]:
                return process
    raise AssertionError(f"no process of rank {rank}")
