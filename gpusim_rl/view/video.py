"""H.264 in an mp4, through imageio-ffmpeg's own ffmpeg: nothing to install on the system."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import numpy as np

from gpusim_rl.errors import ConfigError, import_extra

QUALITY = 7  # of 10


class VideoWriter:
    """Writes frames to an mp4, which takes its name only when it is complete.

    Args:
        path: File to write; its folder is made.
        size: Width and height [pixels], even numbers.
        fps: Frames per second [Hz].
        needed_by: Command or setting of the user's, named if the extra is missing.

    Raises:
        ConfigError: The extra is missing, the name does not end in .mp4 or the size is odd.
    """

    def __init__(self, path: Path, size: tuple[int, int], fps: float, needed_by: str) -> None:
        ffmpeg = import_extra("imageio_ffmpeg", "video", needed_by)
        if path.suffix != ".mp4":
            raise ConfigError(f"a video's name must end in .mp4, got {path.name!r}")
        if size[0] % 2 or size[1] % 2 or min(size) < 2:
            raise ConfigError(f"width and height of a video must be even, got {size[0]}x{size[1]}")
        self.path = path
        self._partial = path.with_name(f".{path.stem}.partial.mp4")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._partial.touch()
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from None
        self._frames = ffmpeg.write_frames(
            str(self._partial), size, fps=fps, codec="libx264", quality=QUALITY, macro_block_size=2
        )
        self._frames.send(None)

    def write(self, picture: np.ndarray) -> None:
        """Appends a frame, uint8, shape [height, width, 3]."""
        self._frames.send(np.ascontiguousarray(picture))

    def __enter__(self) -> VideoWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._frames.close()
        if kind is None:
            self._partial.replace(self.path)
        else:
            self._partial.unlink(missing_ok=True)
