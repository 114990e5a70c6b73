"""How far a motion is from a clip: the alignment, and a run that is measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import gpusim_rl
import style


def distances(agent: list[float], clip: list[float]) -> torch.Tensor:
    return (torch.tensor(agent)[:, None, None] - torch.tensor(clip)).abs()


@pytest.mark.parametrize(
    ("agent", "error"),
    [
        ([2.0, 3.0, 4.0, 1.0, 2.0], 0.0),  # begins anywhere, and goes on with the first frame
        ([2.0, 2.0, 2.0, 3.0, 3.0], 0.0),  # slowly
        ([1.0, 3.0, 1.0, 3.0, 1.0], 0.0),  # fast
        ([1.5, 2.5, 3.5, 4.5, 1.5], 0.5),
        ([4.0, 3.0, 2.0, 1.0, 4.0], 0.4),  # not backwards: it is held against 4, 2, 2, 2, 4
    ],
)
def test_an_agent_may_be_ahead_or_behind(agent: list[float], error: float) -> None:
    assert float(style.aligned(distances(agent, [1.0, 2.0, 3.0, 4.0]))) == pytest.approx(error)


def test_errors_are_those_of_joints_and_of_points() -> None:
    sizes = {"joint_pos": 2, "joint_vel": 1, "ends": 6}
    clip = torch.randn(7, 9, generator=torch.Generator().manual_seed(1))
    same = style.errors(clip[:, None], clip, sizes)
    assert same["joint_error"] == same["hand_and_foot_error"] == 0.0 < same["joint_error_unaligned"]
    off = torch.tensor([0.1, -0.3, 9.0, 0.0, 0.3, 0.4, 0.0, 0.0, -0.1])  # rad, rad, rad/s; two points [m]
    moved = style.errors((clip + off)[:1, None], clip[:1], sizes)
    assert moved["joint_error"] == pytest.approx(0.2) == moved["joint_error_unaligned"]
    assert moved["hand_and_foot_error"] == pytest.approx(0.3)


def test_a_run_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(style, "__file__", str(tmp_path / "style.py"))
    amp = {"horizon": 8, "minibatch_size": 64, "epochs": 1, "discriminator": {"batch_size": 8}}
    task = {"episode_length": 6, "termination_height": 0.1}
    settings = {"num_envs": 8, "max_iterations": 2, "log": {"dir": str(tmp_path), "console": "quiet"}}
    gpusim_rl.train("HumanoidAMP", algo="amp", device="cpu", amp=amp, task=task, **settings)
    monkeypatch.setattr("sys.argv", ["style.py", str(tmp_path / "HumanoidAMP" / "latest"), "--num-envs", "2"])
    style.main()
    style.main()
    assert "seed 42, env_steps " in capsys.readouterr().out
    (row,) = json.loads((tmp_path / "style.json").read_text())["rows"]
    assert 0.0 < row["joint_error"] < 0.3 and row["falls"] == 0.0
    gpusim_rl.train("HumanoidAMP", device="cpu", experiment="ppo", task=task, **{**settings, "max_iterations": 1})
    without_style = str(tmp_path / "ppo" / "latest")
    for run, line in (("nowhere", ""), (without_style, f"{without_style} was trained by algo=ppo, which has no style")):
        monkeypatch.setattr("sys.argv", ["style.py", run])
        with pytest.raises(SystemExit):
            style.main()
        error = capsys.readouterr().err
        assert error.startswith(f"error: {line}") and error.count("\n") == 1
