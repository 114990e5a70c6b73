"""The table of commands: what a policy that only stands loses under each of them."""

from __future__ import annotations

import json

import pytest

import gpusim_rl
import walking


def test_each_command_is_held_for_a_whole_episode(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(
        walking, "COMMANDS", {name: walking.COMMANDS[name] for name in ("stand", "forward", "left", "turn left")}
    )
    monkeypatch.setattr(walking, "__file__", str(tmp_path / "walking.py"))
    stages = [{"steps": 4, "y": [-1.0, 1.0]}, {"steps": 500, "x": [-1.0, 1.0]}]  # it makes some
    command = {"x": [-0.5, 0.5], "stages": stages, "stage_error": None}
    settings = {"episode_length": 50, "encoder_bias": 0.0, "randomize_episode_start": False, "command": command}
    small = {"horizon": 4, "minibatch_size": 8, "network": {"hidden": [8]}}
    gpusim_rl.train(
        "Go1Velocity", num_envs=2, max_iterations=1, device="cpu", task=settings, ppo=small, log={"dir": str(tmp_path)}
    )
    monkeypatch.setattr("sys.argv", ["walking.py", str(tmp_path / "Go1Velocity" / "latest"), "--num-envs", "2"])
    walking.main()
    walking.main()
    (row,) = json.loads((tmp_path / "walking.json").read_text())["rows"]
    errors = {name: (found["lin_vel_error"], found["ang_vel_error"]) for name, found in row["commands"].items()}
    assert row["task"] == "Go1Velocity" and row["env_steps"] == 8 and errors.keys() == {"stand", "left", "turn left"}
    assert errors["stand"][0] < 0.3 and errors["left"][0] == pytest.approx(1.0, abs=0.3)
    assert errors["turn left"][1] > errors["stand"][1] + 0.2
    assert "left " in capsys.readouterr().out
