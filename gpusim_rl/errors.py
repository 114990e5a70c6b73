"""Errors that are the user's to fix: one line saying what, where, expected, got, and what to try.

Everything here is light: the command line answers a typo without importing torch.
"""

from __future__ import annotations

import difflib
import importlib
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType, TracebackType

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


class ConfigError(ValueError):
    """A setting, file or installation is wrong. The message is one line; the exit code is 2."""


class TaskError(ValueError):
    """Task code broke its contract (shape, dtype, NaN). The message names task and method."""


def closest(name: str, options: Iterable[str]) -> str | None:
    """Return the option that `name` was probably meant to be; capitals do not matter."""
    by_lower = {option.lower(): option for option in options}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[close[0]] if close else None


def did_you_mean(name: str, options: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the option closest to `name`, or "" when none is close."""
    close = closest(name, options)
    return f" Did you mean {close!r}?" if close else ""


def import_extra(module: str, extra: str, needed_by: str) -> ModuleType:
    """Import an optional dependency, or raise the one line that says how to install it.

    Args:
        module: Module to import, for example `imageio_ffmpeg`.
        extra: Our extra that brings it, for example `video`.
        needed_by: What the user asked for, for example `tools/record.py` or `log.tensorboard=true`.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # A module that is there but breaks inside is a bug to see, not a missing extra.
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise
        raise ConfigError(f"{needed_by} needs {module}: pip install 'gpusim-rl[{extra}]'") from None


@contextmanager
def friendly_errors() -> Iterator[None]:
    """Turn user errors into one line and exit code 2; other errors are a short traceback."""
    try:
        yield
    except (ConfigError, TaskError) as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(EXIT_USER_ERROR) from None
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        raise SystemExit(EXIT_INTERRUPTED) from None
    except Exception as error:
        trace = _without_hydra(error.__traceback__)
        sys.stderr.write("".join(traceback.format_exception(type(error), error, trace)))
        raise SystemExit(1) from None


def _without_hydra(trace: TracebackType | None) -> TracebackType | None:
    """Copy a traceback, leaving out the frames of Hydra's own files."""
    frames = []
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__", "").split(".")[0] != "hydra":
            frames.append(trace)
        trace = trace.tb_next
    kept = None
    for frame in reversed(frames):
        kept = TracebackType(kept, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return kept
