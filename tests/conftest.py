"""Shared fixtures: the checkout, and `train.py` as a user runs it."""

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path

import pytest

from helpers import shape_check  # noqa: F401  # --jaxtyping-packages names it, and finds it only where it is imported
from helpers.commands import ROOT, Finished, run_command, run_here
from helpers.serial import Turns, is_serial

MAX_WORKERS = 16  # each takes 1.5 GB; more would only wait for the longest file
IN_A_WORKER = "PYTEST_XDIST_WORKER" in os.environ
# Workers of pytest-xdist share the cores; without this, each starts a thread per core.
if IN_A_WORKER:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that starts the tests in the background makes them and their children ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return the processes of `-n auto`: one per CPU, and one more because many tests wait for child processes.

    0 with one CPU, and in tests started by a test.
    """
    from gpusim_rl.machine.hardware import available_cpus

    cpus = available_cpus()
    return 0 if cpus == 1 or IN_A_WORKER else min(cpus + 1, MAX_WORKERS)


def pytest_configure(config: pytest.Config) -> None:
    """Cache composed configs, and make timing tests run alone."""
    gc.disable()  # during imports it would scan a million objects again and again, and free none
    from helpers.composed import compose_once

    compose_once()
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(Turns(Path(config.option.basetemp).parent))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the serial tests of a file together, so that other workers wait once."""
    files = {path: number for number, path in enumerate(dict.fromkeys(item.path for item in items))}
    items.sort(key=lambda item: (files[item.path], is_serial(item)))


def pytest_collection_finish() -> None:
    """Resume garbage collection, without the imported objects."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def folders(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Set the log folder of Stable-Baselines3, by default the temporary folder, and that of robots' meshes."""
    os.environ["GPUSIM_RL_LOOKS"] = str(tmp_path_factory.mktemp("looks"))
    os.environ["SB3_LOGDIR"] = str(tmp_path_factory.mktemp("sb3"))


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
def train_here(tmp_path: Path):
    """Run `train.py` in an empty folder and in this process, for arguments that it rejects."""

    def train(*arguments: str, cwd: Path = tmp_path) -> Finished:
        return run_here(ROOT / "train.py", *arguments, cwd=cwd)

    return train


@pytest.fixture
def command(tmp_path: Path):
    """Run any command in an empty folder: `command(sys.executable, "-c", "...")`."""

    def run(*parts: str | Path, cwd: Path = tmp_path, **options) -> Finished:
        return run_command(*parts, cwd=cwd, **options)

    return run
