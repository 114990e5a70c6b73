"""Environments of Isaac Lab and mjlab with this checkout beside them. Both need a Python of their own, and minutes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

VERSIONS = {"isaaclab": "isaaclab==3.0.0", "mjlab": "mjlab==1.6.0"}


def python_3_12() -> Path:
    """Returns a Python 3.12, the one that Isaac Lab 3.0 is for; skips the test where there is none."""
    for name in ("python3.12", "python3", sys.executable):
        found = shutil.which(name)
        code = "import sys; assert sys.version_info[:2] == (3, 12); print(sys.executable)"
        done = found and subprocess.run([found, "-c", code], capture_output=True, text=True, check=False)
        if done and done.returncode == 0:
            return Path(done.stdout.strip())
    pytest.skip("there is no python3.12")


def pip(python: Path, *arguments: str) -> None:
    """Runs the pip of this environment for another Python; skips the test where the package index is out of reach."""
    command = [sys.executable, "-m", "pip", "--python", python, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and "conflict" not in done.stderr:
        pytest.skip(f"pip finds no packages: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr


def bare_environment(folder: Path) -> Path:
    """Makes a virtual environment with nothing in it; returns its Python."""
    subprocess.run([python_3_12(), "-m", "venv", "--without-pip", folder], check=True)
    return folder / "bin" / "python"
