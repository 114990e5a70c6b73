"""Searches with `tools/tune.py` in a folder of a test."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from helpers.commands import ROOT, Finished, run_command

SPACE = "ppo.learning_rate: {low: 1.0e-6, high: 1.0e-2, log: true}\nppo.epochs: {choices: [1, 4]}\n"
SMALL = ("task=Cartpole", "device=cpu", "num_envs=32", "space=space.yaml", "study=poles")
TUNE = str(ROOT / "tools" / "tune.py")


def tune(folder: Path, *words: str) -> Finished:
    """Run a search to its end."""
    (folder / "space.yaml").write_text(SPACE)
    return run_command(sys.executable, TUNE, *SMALL, *words, cwd=folder, check=False, timeout_s=280)


def start(folder: Path, *words: str, space: str = SPACE, **options: Any) -> subprocess.Popen[str]:
    """Start a search in the background."""
    (folder / "space.yaml").write_text(space)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return subprocess.Popen([sys.executable, TUNE, *SMALL, *words], cwd=folder, env=env, text=True, **pipes)


def wait_for(process: subprocess.Popen[str], condition: Callable[[], Any]) -> None:
    """Wait until a condition holds while the search runs."""
    end = time.monotonic() + 200.0
    while not condition():
        assert process.poll() is None and time.monotonic() < end, process.communicate()
        time.sleep(0.05)


def table_of(folder: Path, name: str = "trials.csv") -> list[dict[str, str]]:
    """Read a table of the study, if there is one."""
    if not (file := folder / "runs" / "poles" / name).exists():
        return []
    with file.open(newline="") as table:
        return list(csv.DictReader(table))
