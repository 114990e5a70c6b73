"""H.264 in an mp4, through imageio-ffmpeg's own ffmpeg: nothing to install on the system."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from gpusim_rl.errors import ConfigError, import_extra

QUALITY = 7  # 0 to 10


@contextmanager
def video_writer(
    path: Path, size: tuple[int, int], fps: float, needed_by: str
) -> Iterator[Callable[[np.ndarray], None]]:
    """Writes an mp4, which takes its name only when it is complete; gives a function that appends a frame.

    A frame is uint8, shape [height, width, 3].

    Args:
        path: File to write; its folder is made.
        size: Width and height [pixels], even numbers.
        fps: Frames per second [Hz].
        needed_by: Command or setting of the user's, named if the extra is missing.

    Raises:
        ConfigError: The extra is missing, the name does not end in .mp4 or the size is odd.
    """
    ffmpeg = import_extra("imageio_ffmpeg", "video", needed_by)
    if path.suffix != ".mp4":
        raise ConfigError(f"a video's name must end in .mp4, got {path.name!r}")
    if size[0] % 2 or size[1] % 2 or min(size) < 2:
        raise ConfigError(f"width and height of a video must be even, got {size[0]}x{size[1]}")
    partial = path.with_name(f".{path.stem}.partial.mp4")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.touch()
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    frames = ffmpeg.write_frames(str(partial), size, fps=fps, codec="libx264", quality=QUALITY, macro_block_size=2)
    frames.send(None)
    try:
        yield lambda picture: frames.send(np.ascontiguousarray(picture))
        frames.close()
        partial.replace(path)
    finally:
        frames.close()
        partial.unlink(missing_ok=True)
