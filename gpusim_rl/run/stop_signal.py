"""Stop by Ctrl-C, SIGTERM or SIGHUP: after the current iteration, or earlier if it is long."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from gpusim_rl.errors import say

HANGUP: signal.Signals | None = getattr(signal, "SIGHUP", None)  # not every system has it
LONG_S = 10.0  # longer iterations are aborted: schedulers kill soon after SIGTERM


class IterationLeftError(Exception):
    """Iteration aborted midway; the state is inconsistent."""


class StopSignal:
    """Handler for the first signal in a block; a second signal ends the process immediately."""

    def __init__(self) -> None:
        self.number: int | None = None  # number of the received signal
        self.notify: Callable[[str], None] = lambda text: say(text, file=sys.stderr)  # called by the handler
        self._previous: dict[int, Any] = {}
        self._began: float | None = None  # start of the current iteration
        self._aside_since: float | None = None
        self._last_s = 0.0  # duration of the previous iteration

    def __enter__(self) -> StopSignal:
        self._began, self._last_s = None, 0.0
        # Python delivers signals to the main thread only.
        if threading.current_thread() is threading.main_thread():
            numbers = [signal.SIGINT, signal.SIGTERM]
            if HANGUP is not None and signal.getsignal(HANGUP) is not signal.SIG_IGN:  # nohup
                numbers.append(HANGUP)
            self._previous = {number: signal.signal(number, self._stop) for number in numbers}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def begin_iteration(self) -> None:
        """Start timing an iteration."""
        self._last_s = self._elapsed_s
        self._began = time.perf_counter()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Exclude the block, such as writing a checkpoint, from the iteration's time."""
        self._aside_since = began = time.perf_counter()
        try:
            yield
        finally:
            self._aside_since = None
            if self._began is not None:
                self._began += time.perf_counter() - began

    @property
    def _elapsed_s(self) -> float:
        now = time.perf_counter() if self._aside_since is None else self._aside_since
        return 0.0 if self._began is None else now - self._began

    @property
    def long(self) -> bool:
        """True if the current or previous iteration exceeds `LONG_S`."""
        return max(self._last_s, self._elapsed_s) > LONG_S

    def check(self) -> None:
        """Raise IterationLeftError if a signal has arrived and the iteration is long."""
        if self.number is not None and self.long:
            raise IterationLeftError

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None:
            if number == HANGUP:  # sent by a closing terminal, and again by its shell
                return
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
        self.number = number
        during = "in the middle of this iteration, because it is long; the last checkpoint is kept"
        moment = during if self.long else "after this iteration, with a checkpoint"
        self.notify(f"stopping {moment}; a second signal stops immediately")
