"""Tests of phase durations: sums per interval, late reads of CUDA events."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from gpusim_rl.run.timing import PhaseTimer


def test_phases_are_summed_per_interval_and_restart_at_zero():
    timer = PhaseTimer(torch.device("cpu"))
    with timer("simulate"):
        time.sleep(0.01)
    timer.start()  # earlier phases do not count
    for _ in range(2):
        with timer("simulate"):
            time.sleep(0.02)
    with timer("update"):
        time.sleep(0.01)
    first = timer.flush()
    with timer("log"):
        time.sleep(0.01)
    second = timer.flush()

    assert list(first.phases()) == ["simulate", "update"]
    assert 0.04 <= first.phases()["simulate"] <= first.wall_s
    assert 0.01 <= first.phases()["update"] <= first.wall_s - 0.04
    assert second.phases().keys() == {"log"} and second.phases()["log"] >= 0.01


def test_nested_phase_counts_to_the_outer_phase():
    timer = PhaseTimer(torch.device("cpu"))
    entered: list[str] = []

    @contextmanager
    def around(phase: str) -> Iterator[None]:
        entered.append(phase)
        yield

    timer.observe(around)
    with timer("rollout"), timer("policy"):
        time.sleep(0.01)
    durations = timer.flush()
    assert durations.phases().keys() == {"rollout"} and entered == ["rollout"]


def test_pause_counts_to_no_phase_and_no_interval():
    began = time.perf_counter()
    timer = PhaseTimer(torch.device("cpu"))
    with timer("log"):
        time.sleep(0.01)
        with timer.paused():
            time.sleep(0.2)
        time.sleep(0.01)
        durations = timer.flush()
    assert 0.02 <= durations.phases()["log"] <= durations.wall_s <= time.perf_counter() - began - 0.2


def test_phase_and_interval_restart_at_the_same_time(monkeypatch):
    timer = PhaseTimer(torch.device("cpu"))
    with timer("log"):
        now = itertools.accumulate(
            itertools.chain([1e6], (0.5**n for n in itertools.count()))
        )  # each read faster than the last
        monkeypatch.setattr(time, "perf_counter", lambda: next(now))
        timer.flush()
        second = timer.flush()
    assert second.phases()["log"] <= second.wall_s


def test_waiting_for_the_device_is_excluded_from_log_phase():
    timer = PhaseTimer(torch.device("cpu"))
    with timer("log"):
        time.sleep(0.02)
        first = timer.flush()
        with timer.waiting():
            time.sleep(0.2)
        time.sleep(0.01)
    with timer.waiting():  # outside of all phases
        time.sleep(0.01)
    second = timer.flush()
    assert 0.02 <= first.phases()["log"] <= first.wall_s
    assert 0.01 <= second.phases()["log"] <= second.wall_s - 0.2 and second.phases().keys() == {"log"}


class Stream:
    """CUDA stream whose work is done up to `done_ms`; events have no time before that."""

    def __init__(self) -> None:
        self.enqueued_ms = 0.0
        self.done_ms = 0.0

    def event(self, enable_timing: bool) -> Event:
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.at_ms = float("inf")

    def record(self, stream: Stream) -> None:
        assert stream is self.stream, "stream of the timer's device, not of torch's current one"
        self.at_ms = self.stream.enqueued_ms

    def elapsed_time(self, end: Event) -> float:
        assert end.at_ms <= self.stream.done_ms, "event read before the device has reached it"
        return end.at_ms - self.at_ms


def test_cuda_events_are_read_late_for_the_right_interval(monkeypatch):
    stream = Stream()
    monkeypatch.setattr(torch.cuda, "Event", stream.event)
    monkeypatch.setattr(torch.cuda, "current_stream", {torch.device("cuda:1"): stream}.__getitem__)
    timer = PhaseTimer(torch.device("cuda:1"))
    laps = []
    for interval in (1, 2):
        for _ in range(3):
            with timer("simulate"):
                stream.enqueued_ms += 1000.0 * interval
            with timer("policy"):
                stream.enqueued_ms += 10.0
        laps.append(timer.flush())  # the device has not started yet
    stream.done_ms = 3030.0
    assert laps[0].phases()["simulate"] == pytest.approx(3.0)
    assert laps[0].phases()["policy"] == pytest.approx(0.03)
    stream.done_ms = stream.enqueued_ms
    assert laps[1].phases()["simulate"] == pytest.approx(6.0)
