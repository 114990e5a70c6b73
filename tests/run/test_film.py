"""Tests of the video at the end of a training."""

from __future__ import annotations

import shutil

import pytest

from gpusim_rl.errors import ConfigError
from gpusim_rl.run.film import film
from helpers.raised import raises

pytest_plugins = ["helpers.tool_runs"]

TINY = ("--num-envs", "1", "--width", "64", "--height", "48", "--steps", "24")


@pytest.fixture
def run(runs_folder, tmp_path, monkeypatch):
    shutil.copytree(runs_folder / "runs", tmp_path / "runs", symlinks=True)  # other tests make videos there too
    monkeypatch.chdir(tmp_path)
    return next((tmp_path / "runs" / "Cartpole").glob("2*"))


@pytest.mark.slow
def test_invalid_video_size_is_reported(run):
    with raises(ConfigError, key="video width and height", got=(65, 48)):
        film(run, (*TINY, "--width", "65"))


@pytest.mark.slow
def test_training_ends_with_a_video(train_cli, tmp_path):
    small = ("device=cpu", "num_envs=16", "ppo.precision=fp32", "max_iterations=2", "log.console=plain")
    logs = ("log.video=true", "log.tensorboard=true", "wandb_activate=true")
    done = train_cli(*small, *logs, timeout_s=600)
    assert "video: runs/Cartpole/" in done.stdout and "no video" not in done.stdout + done.stderr
    [video] = tmp_path.glob("runs/Cartpole/2*/videos/000002.mp4")
    [sent] = tmp_path.glob("runs/Cartpole/2*/wandb/offline-run-*/files/media/videos/video_2_*.mp4")
    assert sent.read_bytes() == video.read_bytes()
