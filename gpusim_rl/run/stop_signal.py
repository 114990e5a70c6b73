"""Ctrl-C and SIGTERM end a training after the iteration under way, with a checkpoint."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class StopSignal:
    """Catches the first signal in its block and remembers it; a second one ends the process at once.

    Attributes:
        number: The signal; None while there was none.
        tell: Shows the user a line; called by a signal handler.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self.tell: Callable[[str], None] = lambda text: print(text, file=sys.stderr)  # noqa: T201
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        # Python hands signals to the main thread; in another one they are not ours to direct.
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
        self.number = number
        self.tell("stopping after this iteration, with a checkpoint; once more stops at once")
