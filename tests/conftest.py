"""Helpers for all tests: the checkout, and `train.py` as a user runs it."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Workers of pytest-xdist share the cores: without this, each would start a thread per core.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that starts the tests in the background makes them, and all that they start, deaf to Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@dataclass(frozen=True)
class Finished:
    """A command that ended."""

    returncode: int
    stdout: str
    stderr: str
    cpu_s: float  # CPU time; unlike the wall clock it does not depend on what else runs


def run_command(
    *command: str | Path,
    cwd: Path,
    env: dict[str, str] | None = None,
    timeout_s: float = 120,
    check: bool = True,
) -> Finished:
    """Run a command as a user would; with `check`, a failure shows what it printed."""
    variables = {key: value for key, value in os.environ.items() if key not in ("HYDRA_FULL_ERROR", "PYTHONPATH")}
    variables |= {"NO_COLOR": "1", "COLUMNS": "200", "WANDB_MODE": "offline", **(env or {})}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=variables,
        timeout=timeout_s,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if check:
        assert done.returncode == 0, f"{command} exited {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return Finished(done.returncode, done.stdout, done.stderr, cpu_s)


@pytest.fixture(scope="session")
def checkout() -> Path:
    """Root of the source checkout."""
    return ROOT


@pytest.fixture
def train_cli(tmp_path: Path):
    """Run `python train.py` in an empty folder: `train_cli("task=Ant", check=False)`."""

    def train(*arguments: str, cwd: Path = tmp_path, **options) -> Finished:
        return run_command(sys.executable, ROOT / "train.py", *arguments, cwd=cwd, **options)

    return train


@pytest.fixture
def command(tmp_path: Path):
    """Run any command in an empty folder: `command(sys.executable, "-c", "...")`."""

    def run(*parts: str | Path, cwd: Path = tmp_path, **options) -> Finished:
        return run_command(*parts, cwd=cwd, **options)

    return run
