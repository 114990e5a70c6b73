"""Ctrl-C and SIGTERM end a training after the iteration under way, with a checkpoint."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any


class StopSignal:
    """Catches the first signal in its block and remembers it; a second one ends the process at once.

    Attributes:
        number: The signal; None while there was none.
    """

    def __init__(self) -> None:
        self.number: int | None = None
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
        with suppress(OSError):  # not print: the signal may have come in the middle of one
            os.write(2, b"\nstopping after this iteration, with a checkpoint; once more stops at once\n")
