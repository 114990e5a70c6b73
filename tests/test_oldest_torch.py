"""Oldest supported torch, on the Python of CUDA images: 2.11 on 3.12, in a separate venv."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from helpers.commands import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

TORCH, PYTHON = "2.11.0", "3.12"


def run(command: Sequence[str | Path], folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(part) for part in command], cwd=folder, capture_output=True, text=True)


def interpreter() -> Path:
    found = [shutil.which(f"python{PYTHON}"), *(Path.home() / ".pyenv" / "versions").glob(f"{PYTHON}.*/bin/python")]
    for path in filter(None, found):
        if run([path, "-c", "import venv"]).returncode == 0:
            return Path(path)
    pytest.skip(f"no Python {PYTHON}")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Interpreter of a venv with this package and the oldest torch."""
    folder = tmp_path_factory.mktemp("oldest") / "venv"
    created = run([interpreter(), "-m", "venv", folder])
    assert created.returncode == 0, created.stderr
    python = folder / "bin" / "python"
    torch = run([python, "-m", "pip", "install", "-q", f"torch=={TORCH}"])
    if torch.returncode:
        pytest.skip(f"torch {TORCH} is not available for Python {PYTHON}: {torch.stderr.strip().splitlines()[-1]}")
    ours = run(
        [python, "-m", "pip", "install", "-q", f"torch=={TORCH}", "pytest", "pytest-xdist", "beartype", "-e", ROOT]
    )
    assert ours.returncode == 0, ours.stderr
    return python


def test_package_imports_with_oldest_torch(python):
    code = "import sys, torch, gpusim_rl.api, gpusim_rl.sim.mjwarp; print(torch.__version__, sys.version)"
    done = run([python, "-c", code])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(TORCH) and f" {PYTHON}." in done.stdout


def test_cartpole_trains(python, tmp_path):
    settings = ["task=Cartpole", "num_envs=16", "max_iterations=2", "device=cpu"]
    done = run([python, ROOT / "train.py", *settings], tmp_path)
    assert done.returncode == 0, done.stderr
    metrics = tmp_path / "runs" / "Cartpole" / "latest" / "metrics.csv"
    assert len(metrics.read_text().splitlines()) >= 2


def test_decisive_gpu_tests_are_collected(python):
    done = run(
        [python, "-m", "pytest", "-o", "addopts=", "--collect-only", "-q", "-m", "decisive", ROOT / "tests" / "gpu"]
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_every_replay_draws_new_noise[rollout]" in done.stdout
