"""Replayed runs of a task with cameras."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.fake_cuda_graph import differences_of_replays
from helpers.training import make_trainer
from helpers.watched import watched  # noqa: F401


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("mode", ["rollout", "step", "split"])
def test_replaying_draws_what_running_draws(mode: str, tmp_path: Path) -> None:
    warp: dict = {"sim": {"name": "mjwarp", "num_threads": 1}, "device": "cpu", "max_iterations": 6}
    warp["task"] = {"episode_length": 9}
    assert differences_of_replays(lambda folder: make_trainer("Cartpole", folder, **warp), mode, tmp_path) == []
