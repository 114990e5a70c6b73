"""Source locations, as `file:line`."""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from types import FrameType

from gpusim_rl.errors import first_line

LIBRARY = re.compile(r"(^|(site|dist)-packages[/\\])(torch|warp|mujoco_warp|newton|jaxtyping|beartype)[/\\]|^<")
"""Library files to skip when looking for the responsible line."""


def short(file: str) -> str:
    """Return a path relative to `site-packages` or the working directory if inside one of them, else unchanged."""
    _, installed, rest = file.rpartition("site-packages/")
    if installed:
        return rest
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file


def describe(error: BaseException) -> str:
    """Return the first line of an error and its innermost location outside of libraries."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not LIBRARY.search(frame.filename)]
    return f"{first_line(error)} at {short(frames[-1].filename)}:{frames[-1].lineno}" if frames else first_line(error)


def locate(frame: FrameType | None, library: str | None = None) -> str:
    """Return `file:line` of the innermost frame in `library`, else outside all libraries and `frame`'s file, or ""."""
    location = ""
    skipped = frame and frame.f_code.co_filename
    while frame is not None:
        file = frame.f_code.co_filename
        if file != skipped and not LIBRARY.search(file):
            location = location or f"{short(file)}:{frame.f_lineno}"
            if library is None:
                break
            if re.search(rf"[/\\]{library}[/\\]", file):
                return f"{short(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return location
