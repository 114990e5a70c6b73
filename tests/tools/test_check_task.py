"""Tests of the command `check-task` with third-party tasks."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from gpusim_rl.testing.conformance import TaskConformance
from helpers.commands import ROOT, Finished, run_command, run_here

pytest_plugins = ["helpers.tool_runs"]

BROKEN = '''
from gpusim_rl.tasks.cartpole import Cartpole


class Wobbly(Cartpole):
    """Wobbly: a cartpole that observes the other envs."""

    def observe(self):
        mean = 0.1 * self.robot.joint_vel.clamp(-9, 9).mean()
        return {"policy": {name: part - mean for name, part in super().observe()["policy"].items()}}
'''


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "my_tasks").mkdir()
    (tmp_path / "my_tasks" / "wobbly.py").write_text(BROKEN)
    original = (ROOT / "cfg" / "task" / "Cartpole.yaml").read_text()
    (tmp_path / "my_cfg" / "task").mkdir(parents=True)
    yaml = re.sub(r"_target_: .*", "_target_: my_tasks.wobbly.Wobbly", original)
    (tmp_path / "my_cfg" / "task" / "Wobbly.yaml").write_text(yaml)
    return tmp_path


def check_task(folder: Path, *arguments: str) -> Finished:
    return run_command(sys.executable, ROOT / "tools" / "check_task.py", *arguments, cwd=folder, check=False)


def test_failed_checks_are_listed_with_advice(folder):
    done = check_task(folder, "Wobbly", "-cd", "my_cfg", "--sim", "mujoco")
    lines = done.stdout.splitlines()
    assert done.returncode == 1 and done.stderr == ""
    failed = [line for line in lines if line.startswith("FAILED")]
    assert failed == [
        "FAILED   class docstring matches observations and actions",
        "FAILED   final obs equals run without resets",
        "FAILED   diverged env is reset without affecting others",
    ]
    assert any("'Action space:'" in line for line in lines[lines.index(failed[0]) :])
    [advice] = [line for line in lines[lines.index(failed[2]) :] if "try:" in line]
    assert "no mean" in advice
    assert "ok       task trains on every simulator: mujoco" in lines
    assert lines[-1] == f"Wobbly: {len([line for line in lines if line.startswith('ok')])} of 21 checks passed"
    assert sorted(path.name for path in folder.iterdir()) == ["my_cfg", "my_tasks"]


def test_every_check_has_advice(load_tool):
    checks = {name.removeprefix("test_") for name in vars(TaskConformance) if name.startswith("test_")}
    assert load_tool("check_task").MEND.keys() == checks


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["Wobly", "-cd", "my_cfg"], "Did you mean 'Wobbly'?"),
        (["Wobbly"], "unknown task 'Wobbly'"),
        (["Wobbly", "-cd", "nowhere"], "nowhere"),
        (["Cartpole", "--sim", "mujuco"], "--sim: expected any of mujoco, mjwarp, newton, got mujuco"),
    ],
)
def test_bad_input_is_rejected_in_one_line(folder, arguments, words):
    done = run_here(ROOT / "tools" / "check_task.py", *arguments, cwd=folder)
    assert done.refuses(words), done.stderr
