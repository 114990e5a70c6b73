"""Ctrl-C in commands: one line and exit code 130."""

from __future__ import annotations

# `signal` imports enum, which takes longer than this whole module
import _signal as signal  # pyright: ignore[reportMissingImports]
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import Any, NoReturn

EXIT_INTERRUPTED = 130


def install() -> None:
    """Install the Ctrl-C handlers; commands call this before slow imports."""
    sys.excepthook = _hook
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored: nohup, a shell's `&`
        signal.signal(signal.SIGINT, _interrupt)


def set_working(working: bool) -> None:
    """Raise KeyboardInterrupt on Ctrl-C while `working`; otherwise end the process: nothing is left to clean up."""
    old, new = (_end, _interrupt) if working else (_interrupt, _end)
    if signal.getsignal(signal.SIGINT) is old:
        try:
            signal.signal(signal.SIGINT, new)
        except ValueError:  # another thread
            return


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt; inside an import exit at once, since half-imported libraries raise other errors."""
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
