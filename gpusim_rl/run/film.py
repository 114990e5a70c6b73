"""Video of the policy at the end of a training (`log.video=true`)."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from gpusim_rl.errors import ConfigError, import_extra
from gpusim_rl.files import paths

TIMEOUT_S = 600.0
SMALL = ("--num-envs", "4", "--width", "640", "--height", "480")
GIF_WIDTH = 480  # pixels
GIF_EVERY = 3  # frames of the video per picture of the GIF: 10 per second


def film(run_dir: Path, flags: Sequence[str]) -> Path:
    """Record a run's last checkpoint with `tools/record.py` in another process; return the video.

    Raises:
        ConfigError: Recording failed; the message is the process's last line.
    """
    command = [sys.executable, str(paths.tools_dir() / "record.py"), str(run_dir), *SMALL, *flags]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(str(error).partition("\n")[0]) from None
    if done.returncode != 0:
        said = done.stderr.strip().rpartition("\n")[2].removeprefix("error: ")
        raise ConfigError(said or f"exit code {done.returncode}")
    return Path(done.stdout.strip().rpartition("\n")[2])


def as_gif(video: Path) -> bytes:
    """Convert a video to a small GIF for TensorBoard."""
    images = import_extra("PIL.Image", "view", "log.video=true")
    frames = import_extra("imageio_ffmpeg", "view", "log.video=true").read_frames(str(video))
    meta = next(frames)
    size, pictures = meta["size"], []
    for number, frame in enumerate(frames):
        if number % GIF_EVERY == 0:
            picture = images.frombytes("RGB", size, frame)
            pictures.append(picture.resize((GIF_WIDTH, GIF_WIDTH * size[1] // size[0])).quantize(64))
    file = io.BytesIO()
    duration_ms = round(1000 * GIF_EVERY / meta["fps"])
    pictures[0].save(file, "GIF", save_all=True, append_images=pictures[1:], duration=duration_ms, loop=0)
    return file.getvalue()
