"""The video at the end of a training, and where it goes."""

from __future__ import annotations

import io
import shutil

import imageio_ffmpeg
import pytest

from gpusim_rl.errors import ConfigError
from gpusim_rl.run.film import as_gif, film
from gpusim_rl.run.writers import TensorboardWriter

pytest_plugins = ["helpers.tool_runs"]

TINY = ("--num-envs", "1", "--width", "64", "--height", "48", "--steps", "24")


@pytest.fixture
def run(runs_folder, tmp_path, monkeypatch):
    shutil.copytree(runs_folder / "runs", tmp_path / "runs", symlinks=True)  # other tests make videos there, too
    monkeypatch.chdir(tmp_path)
    return next((tmp_path / "runs" / "Cartpole").glob("2*"))


def test_tensorboard_shows_a_video(tmp_path):
    from PIL import Image
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    frames = imageio_ffmpeg.write_frames(str(video := tmp_path / "000006.mp4"), (64, 48), fps=30)
    frames.send(None)
    for brightness in range(0, 240, 20):
        frames.send(bytes([brightness]) * (3 * 64 * 48))
    frames.close()
    picture = Image.open(io.BytesIO(as_gif(video)))
    assert (picture.format, picture.size, picture.n_frames) == ("GIF", (480, 360), 4)
    writer = TensorboardWriter(tmp_path)
    writer.start({})
    writer.show(6, video)
    writer.close(0)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    [image] = events.Images("video")
    assert image.step == 6 and image.encoded_image_string.startswith(b"GIF8")


@pytest.mark.slow
def test_what_went_wrong_is_told(run):
    with pytest.raises(ConfigError, match=r"^width and height of a video must be even, got 65x48$"):
        film(run, (*TINY, "--width", "65"))


@pytest.mark.slow
def test_a_training_ends_with_a_video(train_cli, tmp_path):
    small = ("device=cpu", "num_envs=16", "ppo.precision=fp32", "max_iterations=2", "log.console=plain")
    logs = ("log.video=true", "log.tensorboard=true", "wandb_activate=true")
    done = train_cli(*small, *logs, timeout_s=600)
    assert "video: runs/Cartpole/" in done.stdout and "no video" not in done.stdout + done.stderr
    [video] = tmp_path.glob("runs/Cartpole/2*/videos/000002.mp4")
    [sent] = tmp_path.glob("runs/Cartpole/2*/wandb/offline-run-*/files/media/videos/video_2_*.mp4")
    assert sent.read_bytes() == video.read_bytes()
