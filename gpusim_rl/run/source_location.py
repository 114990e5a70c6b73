"""Where in the code something happened, as `file:line`."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

LIBRARY = re.compile(r"(^|(site|dist)-packages[/\\])(torch|warp|mujoco_warp|newton|jaxtyping|beartype)[/\\]|^<")
"""Files of libraries that stand between what happened and the line that asked for it."""


def short(file: str) -> str:
    """A path as one would type it here; of installed packages, from the package on."""
    _, installed, rest = file.rpartition("site-packages/")
    if installed:
        return rest
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file


def describe(error: BaseException) -> str:
    """The first line of an error, and the innermost line that is no library's."""
    message = str(error).strip().partition("\n")[0] or type(error).__name__
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not LIBRARY.search(frame.filename)]
    return f"{message} at {short(frames[-1].filename)}:{frames[-1].lineno}" if frames else message
