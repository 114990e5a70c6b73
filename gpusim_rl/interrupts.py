"""Ctrl-C for commands: one line and exit code 130, from the first import to the end of the process."""

from __future__ import annotations

# `signal` imports enum, which takes longer than all of this
import _signal as signal  # pyright: ignore[reportMissingImports]
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import Any, NoReturn

EXIT_INTERRUPTED = 130


def install() -> None:
    """Direct Ctrl-C of this process; called by commands before they import anything that takes time."""
    sys.excepthook = _hook
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored: nohup, a shell's `&`
        signal.signal(signal.SIGINT, _interrupt)


def begin_work() -> None:
    """Raise KeyboardInterrupt at Ctrl-C from now on."""
    _replace(_end, _interrupt)


def end_work() -> None:
    """End the process at Ctrl-C from now on: there is nothing left to clean up."""
    _replace(_interrupt, _end)


def _replace(old: Any, new: Any) -> None:
    """Replace a handler of this module, where it is in place and this is the main thread."""
    if signal.getsignal(signal.SIGINT) is old:
        try:
            signal.signal(signal.SIGINT, new)
        except ValueError:  # another thread
            return


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt; within an import end at once: half-imported libraries make other errors of it."""
    caller = frame
    while caller is not None:
        if caller.f_code.co_filename.startswith("<frozen importlib"):
            _end(number, frame)
        caller = caller.f_back
    raise KeyboardInterrupt


def _end(number: int, frame: FrameType | None) -> NoReturn:
    os.write(2, b"interrupted\n")
    os._exit(EXIT_INTERRUPTED)


def _hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    if issubclass(kind, KeyboardInterrupt):
        _end(signal.SIGINT, None)
    sys.__excepthook__(kind, error, trace)
