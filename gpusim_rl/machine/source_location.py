"""Places in the code, as `file:line`."""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from types import FrameType

from gpusim_rl.errors import first_line

LIBRARY = re.compile(r"(^|(site|dist)-packages[/\\])(torch|warp|mujoco_warp|newton|jaxtyping|beartype)[/\\]|^<")
"""Files of libraries that stand between what happened and the line that asked for it."""


def short(file: str) -> str:
    """Returns a path as one would type it here; of an installed package, from the package on."""
    _, installed, rest = file.rpartition("site-packages/")
    if installed:
        return rest
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file


def describe(error: BaseException) -> str:
    """Returns the first line of an error, and the innermost line of code that is no library's."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not LIBRARY.search(frame.filename)]
    return f"{first_line(error)} at {short(frames[-1].filename)}:{frames[-1].lineno}" if frames else first_line(error)


def locate(frame: FrameType | None, library: str | None = None) -> str:
    """Returns `file:line` of the innermost frame of a package; without one, of the innermost that is no library's.

    The search begins at `frame`, outwards, and skips frames of its file.
    """
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
