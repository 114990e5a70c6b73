"""Where the time goes: durations of the phases of an iteration, without waiting for the device."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

PHASES = ("simulate", "policy", "update", "log")


class PhaseTimer:
    """Sums the time spent in each phase of a log interval.

    On CUDA a phase is measured between two events on the stream, read when they have long passed; on the CPU by the clock.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._waiting: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._began = time.perf_counter()
        self._previous_wall = 0.0

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Measures the block as part of a phase; `log` is always host time."""
        if self._cuda and phase != "log":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._events.append((phase, begin, end))
            return
        started = time.perf_counter()
        yield
        self._seconds[phase] += time.perf_counter() - started

    def flush(self) -> tuple[float, dict[str, float]]:
        """Ends an interval: its wall-clock time [s] and the seconds of each phase.

        On CUDA the phases are those of the interval before, whose events have passed.
        """
        now = time.perf_counter()
        wall, self._began = now - self._began, now
        seconds, self._seconds = self._seconds, dict.fromkeys(PHASES, 0.0)
        if self._cuda:
            for phase, begin, end in self._waiting:
                if end.query():
                    seconds[phase] += begin.elapsed_time(end) / 1000.0
            self._waiting, self._events = self._events, []
        return wall, seconds
