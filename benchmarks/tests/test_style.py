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


def test_a_run_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(style, "__file__", str(tmp_path / "style.py"))
    amp = {"horizon": 8, "minibatch_size": 64, "epochs": 1, "discriminator": {"batch_size": 8}}
    task = {"episode_length": 6, "termination_height": 0.1}
    settings = {"num_envs": 8, "max_iterations": 2, "log": {"dir": str(tmp_path), "console": "quiet"}}
    gpusim_rl.train("HumanoidAMP", algo="amp", device="cpu", amp=amp, task=task, **settings)
    monkeypatch.setattr("sys.argv", ["style.py", str(tmp_path / "HumanoidAMP" / "latest"), "--num-envs", "2"])
    style.main()
    style.main()
    (row,) = json.loads((tmp_path / "style.json").read_text())["rows"]
    assert 0.0 < row["joint_error"] < row["joint_error_unaligned"]
    assert 0.0 < row["hand_and_foot_error"] < row["hand_and_foot_error_unaligned"]
    assert row["falls"] == 0.0 and row["seed"] == 42
