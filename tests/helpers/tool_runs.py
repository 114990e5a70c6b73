"""Runs for tests of tools and docs: trained once, copied for each worker."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

from helpers.commands import ROOT, Finished, load_file, run_command, run_here

SMALL = ("device=cpu", "ppo.horizon=32", "ppo.minibatch_size=256", "ppo.precision=fp32")


@pytest.fixture(scope="session")
def runs_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with `runs/`: two seeds of Cartpole, a third with another learning rate, and an Ant."""
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    with (shared / "trained.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the first worker trains, the others wait for it
        if not (shared / "trained").exists():
            train_all(shared / "training")
            (shared / "training").rename(shared / "trained")
    return shutil.copytree(shared / "trained", own / "runs_folder", symlinks=True)


def train_all(folder: Path) -> None:
    folder.mkdir()
    log, threads = logging.getLogger("gpusim_rl"), torch.get_num_threads()
    level = log.level
    cartpole = (*SMALL, "num_envs=16", "max_iterations=6")
    for words in (
        (*cartpole, "-m", "seed=1,2"),
        (*cartpole, "seed=3", "ppo.learning_rate=1e-3"),
        ("task=Ant", *SMALL, "num_envs=8", "max_iterations=1"),
    ):
        done = run_here(ROOT / "train.py", *words, cwd=folder, env={"WANDB_MODE": "offline"})
        assert done.returncode == 0, done.stderr
    log.setLevel(level)
    torch.set_num_threads(threads)


@pytest.fixture
def tool(runs_folder: Path):
    """Run a tool like a user: `tool("record", "Cartpole", "--steps", "10")`."""

    def run(name: str, *arguments: str | Path, cwd: Path = runs_folder, **options) -> Finished:
        return run_command(sys.executable, ROOT / "tools" / f"{name}.py", *arguments, cwd=cwd, **options)

    return run


@pytest.fixture
def tool_here(runs_folder: Path):
    """Run a tool in this process, for arguments that it rejects."""

    def run(name: str, *arguments: str | Path, cwd: Path = runs_folder, **options) -> Finished:
        return run_here(ROOT / "tools" / f"{name}.py", *arguments, cwd=cwd, **options)

    return run


@pytest.fixture
def run(runs_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy a Cartpole run."""
    source = sorted(path for path in (runs_folder / "runs" / "Cartpole").glob("2*") if path.is_dir())[0]
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(source, tmp_path / "runs" / "Cartpole" / source.name))


@pytest.fixture(scope="session")
def load_tool():
    """Import a tool as a module: `load_tool("record")`."""
    return lambda name: load_file(ROOT / "tools" / f"{name}.py", f"tool_{name}")
