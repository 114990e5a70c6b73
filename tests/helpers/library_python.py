"""Python environments of Isaac Lab and mjlab with this checkout: separate Python 3.12, minutes to install."""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.commands import ROOT, Finished, run_command

VERSIONS = {"isaaclab": "isaaclab==3.0.0", "mjlab": "mjlab==1.6.0"}


def python_3_12() -> Path:
    """Return a Python 3.12, required by Isaac Lab 3.0; skip the test without one."""
    in_path = [shutil.which(name) for name in ("python3.12", "python3", sys.executable)]
    pyenv = (Path.home() / ".pyenv" / "versions").glob("3.12.*/bin/python")
    for found in filter(None, (*in_path, *pyenv)):
        code = "import sys; assert sys.version_info[:2] == (3, 12); print(sys.executable)"
        done = subprocess.run([found, "-c", code], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return Path(done.stdout.strip())
    pytest.skip("no python3.12")


def pip(python: Path, *arguments: str) -> None:
    """Run pip for another Python; skip the test if the index lacks the library."""
    command = [sys.executable, "-m", "pip", "--python", python, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    missing = r"[Cc]onnection|No matching distribution found for (isaaclab|mjlab)="
    if done.returncode and re.search(missing, done.stderr):
        pytest.skip(f"pip finds no packages: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr


def bare_environment(folder: Path) -> Path:
    subprocess.run([python_3_12(), "-m", "venv", "--without-pip", folder], check=True)
    return folder / "bin" / "python"


def environment_of(library: str, folder: Path) -> Path:
    """Return the Python of ISAACLAB_PYTHON or MJLAB_PYTHON, or of a new environment in `folder` (minutes, 8 GB)."""
    named = os.environ.get(f"{library.upper()}_PYTHON")
    if named:
        return Path(named)
    python = bare_environment(folder)
    pip(python, "install", "--quiet", VERSIONS[library], "imageio-ffmpeg", "pillow", "-e", f"{ROOT}[export]")
    return python


class Library:
    def __init__(self, python: Path, folder: Path) -> None:
        self.python, self.folder = python, folder

    def run(self, script: str, *arguments: str | Path, check: bool = True, **variables: str) -> Finished:
        paths = {
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "tests", ROOT / "tests/helpers", ROOT / "docs/examples")))
        }
        return run_command(
            *(self.python, ROOT / script, *arguments),
            cwd=self.folder,
            env=paths | variables,
            timeout_s=600,
            check=check,
        )

    def error(self, *arguments: str) -> str:
        """Return the last line of a training that rejects its settings."""
        done = self.run("train.py", *arguments, check=False)
        assert done.returncode == 2, done.stderr[-2000:]
        return done.stderr.splitlines()[-1]

    def last_row(self, run_dir: Path) -> dict[str, str]:
        with (run_dir / "metrics.csv").open() as file:
            return list(csv.DictReader(file))[-1]


def documented_commands(heading: str) -> list[list[str]]:
    """Return the Python commands of a section of docs/connect.md."""
    section = (ROOT / "docs/connect.md").read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = re.findall(r"^(?:MUJOCO_GL=egl )?python (.*)$", section, re.MULTILINE)
    assert lines
    return [line.partition("#")[0].split() for line in lines]
