"""`task=IsaacLab` in a Python environment with Isaac Lab; see tests/helpers/isaaclab_checks.py and beside.py."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from helpers.commands import ROOT
from helpers.library_python import Library, documented_commands, environment_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
TASK = ("task=IsaacLab", "env.id=offline_cartpole:Offline-Cartpole", "env.physics=newton_mjwarp", "device=cpu")
SMALL = ("num_envs=8", "ppo.horizon=16", "ppo.minibatch_size=64")


@pytest.fixture(scope="module")
def isaaclab(tmp_path_factory) -> Library:
    folder = tmp_path_factory.mktemp("isaaclab")
    shutil.copy(ROOT / "docs/examples/offline_cartpole.py", folder)
    return Library(environment_of("isaaclab", folder / "venv"), folder)


@pytest.fixture(scope="module")
def run_dir(isaaclab: Library) -> Path:
    isaaclab.run("train.py", *TASK, *SMALL, "max_iterations=8", "env.cfg.episode_length_s=0.5")
    return isaaclab.folder / "runs/Offline-Cartpole/latest"


@pytest.mark.parametrize("check", ["steps", "value", "managed", "live", "pictures", "words"])
def test_envs_behave_as_in_isaac_lab(isaaclab, check):
    assert f"{check} holds" in isaaclab.run("tests/helpers/isaaclab_checks.py", check).stdout


def test_training_logs_isaac_lab_metrics(isaaclab, run_dir):
    row = isaaclab.last_row(run_dir)
    assert row["iteration"] == "8"
    assert 0.0 < float(row["episode/length"]) <= 30.0
    assert 0.0 <= float(row["task/Metrics/success_rate"]) <= 1.0
    assert float(row["sim/diverged"]) == 0.0


def test_run_is_resumed_evaluated_exported_and_recorded(isaaclab, run_dir):
    resumed = isaaclab.run("train.py", f"checkpoint={run_dir}", "max_iterations=10", "trust=true")
    assert "starting new episodes" in resumed.stdout + resumed.stderr
    assert isaaclab.last_row(run_dir)["iteration"] == "10"
    isaaclab.run("train.py", f"checkpoint={run_dir}", "test=true", "trust=true")
    result = json.loads((run_dir / "evaluation.json").read_text())
    assert result["episodes"] == 8
    assert result["length_mean"] <= 30.0
    isaaclab.run("tools/export.py", run_dir, "--trust")
    assert list(run_dir.rglob("*.onnx"))
    played = isaaclab.run("tools/play.py", run_dir, "--trust", "--viewer", "none")
    assert "mean reward" in played.stdout
    isaaclab.run("tools/record.py", run_dir, "--trust", "--num-envs", "2", "--steps", "20")
    assert list(run_dir.rglob("*.mp4"))


def test_settings_without_effect_are_reported_in_one_line(isaaclab):
    assert "sim and sim_device" in isaaclab.error(*TASK, "sim=mujoco")
    assert "task.randomize" in isaaclab.error(*TASK, "task.randomize=true")
    assert "env.vectorization" in isaaclab.error(*TASK, "env.vectorization=async")


def test_missing_simulator_version_is_reported(isaaclab):
    line = isaaclab.error("task=Cartpole", "num_envs=4", "device=cpu")
    assert line.startswith("error: sim=mujoco") and "mujoco>=3.17,<5" in line and "3.12.0" in line


def test_documented_commands_run(isaaclab, tmp_path):
    shutil.copy(isaaclab.folder / "offline_cartpole.py", tmp_path)
    here = Library(isaaclab.python, tmp_path)
    fewer = {"max_iterations=150": "max_iterations=2", "max_iterations=200": "max_iterations=4"}
    for script, *words in documented_commands("Isaac Lab"):
        more = ["--steps", "20"] if script == "tools/record.py" else []
        here.run(script, *(fewer.get(word, word) for word in words), *more)
    assert here.last_row(tmp_path / "runs/Offline-Cartpole/latest")["iteration"] == "4"
