"""`task=MjLab` in a Python environment with mjlab; see tests/helpers/mjlab_checks.py and beside.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.library_python import Library, documented_commands, environment_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
TASK = ("task=MjLab", "env.id=Mjlab-Velocity-Flat-Unitree-Go1", "device=cpu")


@pytest.fixture(scope="module")
def mjlab(tmp_path_factory) -> Library:
    folder = tmp_path_factory.mktemp("mjlab")
    return Library(environment_of("mjlab", folder / "venv"), folder)


@pytest.fixture(scope="module")
def run_dir(mjlab: Library) -> Path:
    small = ("num_envs=4", "ppo.horizon=8", "ppo.minibatch_size=16")
    mjlab.run("train.py", *TASK, *small, "max_iterations=5", "env.cfg.episode_length_s=0.4")
    return mjlab.folder / "runs/Mjlab-Velocity-Flat-Unitree-Go1/latest"


@pytest.mark.parametrize("check", ["steps", "value", "progress", "live", "words"])
def test_envs_behave_as_in_mjlab(mjlab, check):
    assert f"{check} holds" in mjlab.run("tests/helpers/mjlab_checks.py", check).stdout


def test_training_logs_mjlab_metrics(mjlab, run_dir):
    row = mjlab.last_row(run_dir)
    assert row["iteration"] == "5"
    assert float(row["episode/length"]) == 20.0
    assert len([name for name in row if name.startswith("reward/")]) == 13
    assert float(row["task/Metrics/twist/error_vel_xy"]) > 0.0
    assert float(row["sim/diverged"]) == 0.0


def test_run_is_resumed_evaluated_exported_and_recorded(mjlab, run_dir):
    resumed = mjlab.run("train.py", f"checkpoint={run_dir}", "max_iterations=8")
    assert "starting new episodes" in resumed.stdout + resumed.stderr
    assert mjlab.last_row(run_dir)["iteration"] == "8"
    mjlab.run("train.py", f"checkpoint={run_dir}", "test=true")
    assert json.loads((run_dir / "evaluation.json").read_text())["length_mean"] == 20.0
    mjlab.run("tools/export.py", run_dir)
    assert list(run_dir.rglob("*.onnx"))
    mjlab.run("tools/record.py", run_dir, "--steps", "20", MUJOCO_GL="egl")
    assert list(run_dir.rglob("*.mp4"))


def test_documented_commands_run(mjlab, tmp_path):
    here = Library(mjlab.python, tmp_path)
    fewer = {"max_iterations=200": "max_iterations=2", "max_iterations=300": "max_iterations=4"}
    for script, *words in documented_commands("mjlab"):
        if "test=true" in words:  # an episode has 1000 steps
            words.append("num_envs=1")
        if script == "tools/record.py":
            words += ["--steps", "20"]
        here.run(script, *(fewer.get(word, word) for word in words), MUJOCO_GL="egl")
    assert here.last_row(tmp_path / "runs/Mjlab-Velocity-Flat-Unitree-Go1/latest")["iteration"] == "4"
