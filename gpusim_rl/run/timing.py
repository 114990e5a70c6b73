"""Durations of the phases of an iteration, without waiting for the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from gpusim_rl.run.phases import PHASES


@dataclass(frozen=True, slots=True)
class Durations:
    """Durations of one log interval of `wall_s` seconds."""

    wall_s: float
    _host_s: dict[str, float]
    _events: list[tuple[str, Any, Any]]  # phase, begin, end

    def phases(self) -> dict[str, float]:
        """Return seconds per phase; on CUDA the device must have finished the interval."""
        seconds = dict(self._host_s)
        for phase, begin, end in self._events:
            seconds[phase] = seconds.get(phase, 0.0) + begin.elapsed_time(end) / 1000.0
        return {phase: seconds[phase] for phase in PHASES if phase in seconds}


class PhaseTimer:
    """Timer of the phases of a log interval; nested phases count toward the outer phase.

    CUDA phases are timed by events on the stream, read later. `log` is host time and overlaps with them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._inside: str | None = None  # current phase of the host
        self._entered = 0.0  # when that phase began
        self._around: list[Callable[[str], AbstractContextManager[Any]]] = []
        self.start()

    def observe(self, around: Callable[[str], AbstractContextManager[Any]]) -> None:
        """Enter `around(phase)`, such as a profiler range, around every phase from now on."""
        self._around.append(around)

    def start(self) -> None:
        """Begin an interval, discarding earlier measurements."""
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, Any, Any]] = []  # phase, begin, end: torch.cuda.Event
        self._began = time.perf_counter()

    def __call__(self, phase: str) -> AbstractContextManager[None]:
        """Measure a `with` block as part of a phase."""
        if self._inside is not None:
            return nullcontext()
        on_device = self._device.type == "cuda" and phase != "log"
        block = self._on_device(phase) if on_device else _OnHost(self, phase)
        return self._observed(phase, block) if self._around else block

    @contextmanager
    def _observed(self, phase: str, block: AbstractContextManager[None]) -> Iterator[None]:
        with ExitStack() as stack:
            for around in self._around:
                stack.enter_context(around(phase))
            stack.enter_context(block)
            yield

    @contextmanager
    def _on_device(self, phase: str) -> Iterator[None]:
        self._inside = phase
        try:
            stream = torch.cuda.current_stream(self._device)  # not torch's current device
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record(stream)
            yield
            end.record(stream)
            self._events.append((phase, begin, end))
        finally:
            self._inside = None

    def _add_host_time(self, now: float) -> None:
        phase = self._inside or ""
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._entered
        self._entered = now

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Exclude the block, which waits for the device, from host time."""
        if self._inside is not None:
            self._add_host_time(time.perf_counter())
        yield
        self._entered = time.perf_counter()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the block from phase and interval."""
        with self.waiting():
            left = time.perf_counter()
            yield
        self._began += self._entered - left

    def flush(self) -> Durations:
        """End the interval, return its durations, and begin the next; a running phase is split between the two."""
        now = time.perf_counter()  # one reading for both, or the phase might exceed its interval
        if self._inside is not None:
            self._add_host_time(now)
        durations = Durations(now - self._began, self._seconds, self._events)
        self.start()
        self._began = now
        return durations


class _OnHost(AbstractContextManager[None]):
    """Block timed by the host clock; a generator-based context manager would cost as much as a torch operation."""

    def __init__(self, timer: PhaseTimer, phase: str) -> None:
        self._timer, self._phase = timer, phase

    def __enter__(self) -> None:
        self._timer._inside, self._timer._entered = self._phase, time.perf_counter()

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is None:
            self._timer._add_host_time(time.perf_counter())
        self._timer._inside = None
