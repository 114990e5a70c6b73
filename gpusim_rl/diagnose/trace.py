"""Profiler traces: host and device work by phase, and all transfers and waits."""

from __future__ import annotations

import gzip
import json
import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from gpusim_rl.run.phases import ITERATION, OUTSIDE, reported_phase
from gpusim_rl.run.profiler import PREFIX
from gpusim_rl.testing.sync_counter import Work

_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_RUNTIME = ("cuda_runtime", "cuda_driver")
_LAUNCHES = re.compile(r"cu(da)?(Launch|GraphLaunch)")
_WAITS = re.compile(
    r"cu(da)?(Stream|Event|Device|Ctx|Thread)Synchronize"
    r"|cudaMemcpy(?!.*(Async|Peer))|cuMemcpy(HtoD|DtoH)(?!.*Async)"
    r"|cuda(Free|FreeHost)$"  # wait for all device work
)
_QUERIES = re.compile(r"cu(da)?(Event(Query|ElapsedTime)|StreamQuery)")
_RANGE = re.compile(rf"{PREFIX}|ProfilerStep#")  # our ranges, and iterations (profiler steps)
_Event = Mapping[str, Any]
_FUNCTION = re.compile(r"(?P<file>.+)\((?P<line>\d+)\): (?P<function>.+)")


@dataclass(frozen=True, slots=True)
class Transfer:
    """Copy or wait, and where the host requested it."""

    phase: str  # of the host's call
    kind: str  # kind of copy, or name of the waiting call
    ts: float  # time of the call [us]
    tid: Any  # thread of the call, if known


@dataclass(frozen=True, slots=True)
class Trace:
    """Work by phase, and all transfers and waits."""

    work: dict[str, Work]
    transfers: list[Transfer]


@dataclass(slots=True)
class _Segment:
    begin: float
    end: float
    phase: str


def load_trace(path: Path) -> list[dict[str, Any]]:
    """Read the events of a Chrome trace, `.json` or `.json.gz`."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        return json.load(file)["traceEvents"]


def read_events(events: Sequence[_Event]) -> Trace:
    """Sum the work and transfers of a profiler trace over its iterations.

    Device work belongs to the phase in which the host launched it, matched by correlation id (for a graph, its launch's
    id), or to `OUTSIDE` without a recorded launch. A device phase ends when its last device work is done and the host
    has left it; it begins when the previous one ended or the host entered it, whichever is later.
    """
    complete = [event for event in events if event.get("ph") == "X"]
    segments = _segments(complete)
    trace = Trace({segment.phase: Work() for segment in segments}, [])
    calls = _add_calls(trace, segments, complete)
    ends, busy, occupied = _add_device_work(trace, segments, complete, calls)
    boundary = -math.inf
    for segment, end in zip(segments, ends, strict=True):
        begin, boundary = max(boundary, segment.begin), max(boundary, end)
        work = trace.work[segment.phase]
        work.wall_s += max(0.0, boundary - begin) * 1e-6
        work.busy_s += busy.within(begin, boundary) * 1e-6
        work.occupied_s += occupied.within(begin, boundary) * 1e-6
    return trace


def _add_calls(trace: Trace, segments: list[_Segment], complete: list[_Event]) -> dict[Any, _Event]:
    """Add launches and waits to the phases of the host; return calls by correlation id."""
    calls: dict[Any, _Event] = {}
    waits: list[tuple[str, _Event]] = []
    for event in filter(lambda event: event.get("cat") in _RUNTIME, complete):
        calls[_argument(event, "correlation")] = event
        if _WAITS.match(event["name"]):
            waits.append((event["name"], event))
        elif _LAUNCHES.match(event["name"]) and (index := _index_at(segments, event["ts"])) is not None:
            trace.work[segments[index].phase].launches += 1
    # The device's records include waits without a recorded call, and event queries.
    recorded = {_argument(event, "correlation") for _, event in waits}
    for event in complete:
        kind, correlation = _argument(event, "cuda_sync_kind"), _argument(event, "correlation")
        call = calls.get(correlation, event)
        if kind is None or kind == "Stream Wait Event" or correlation in recorded or _QUERIES.match(call["name"]):
            continue
        waits.append((kind, call))
    for name, event in waits:
        if (index := _index_at(segments, event["ts"])) is not None:
            phase = segments[index].phase
            trace.work[phase].syncs[name] += 1
            trace.transfers.append(Transfer(phase, name, event["ts"], event.get("tid")))
    return calls


def _add_device_work(
    trace: Trace, segments: list[_Segment], complete: list[_Event], calls: Mapping[Any, _Event]
) -> tuple[list[float], _Union, _Union]:
    """Add device work to its phases; return segment ends, busy spans, and busy spans with the gaps inside graphs."""
    ends = [segment.end for segment in segments]  # on the host; device work extends them below
    busy_spans: list[tuple[float, float]] = []
    graph_spans: dict[Any, tuple[float, float]] = {}
    unlaunched: list[_Event] = []
    for event in filter(lambda event: event.get("cat") in _DEVICE, complete):
        begin, end = event["ts"], event["ts"] + event.get("dur", 0.0)
        busy_spans.append((begin, end))
        correlation = _argument(event, "correlation")
        call = calls.get(correlation)
        if _argument(event, "graph id") or (call is not None and "GraphLaunch" in call["name"]):
            first, final = graph_spans.get(correlation, (begin, end))
            graph_spans[correlation] = min(first, begin), max(final, end)
        if call is None:
            unlaunched.append(event)
        elif (index := _index_at(segments, call["ts"])) is not None:
            ends[index] = max(ends[index], end)
            _add_event(trace, segments[index].phase, event, call)
    for event in unlaunched:
        if segments and segments[0].begin <= event["ts"] < max(ends):
            _add_event(trace, OUTSIDE, event, event)
    return ends, _Union(busy_spans), _Union([*busy_spans, *graph_spans.values()])


def _add_event(trace: Trace, phase: str, event: _Event, call: _Event) -> None:
    work, name = trace.work.setdefault(phase, Work()), event["name"]
    work.kernels += event["cat"] == "kernel"
    for direction, copies in (("HtoD", work.to_device), ("DtoH", work.to_host)):
        if event["cat"] == "gpu_memcpy" and direction in name:
            copies.add(int(_argument(event, "bytes") or 0))
            trace.transfers.append(Transfer(phase, name, call["ts"], call.get("tid")))


def _index_at(segments: list[_Segment], ts: float) -> int | None:
    index = bisect_right(segments, ts, key=lambda segment: segment.begin) - 1
    return index if index >= 0 and ts < segments[index].end else None


def name_function(events: Iterable[_Event], transfer: Transfer, library: re.Pattern[str]) -> str | None:
    """Return the innermost non-library Python function during a transfer; needs a trace with stacks."""
    innermost: tuple[float, str] | None = None
    for event in events:
        function = _FUNCTION.fullmatch(event["name"]) if event.get("cat") == "python_function" else None
        if function is None or library.search(function["file"]):
            continue
        begin = event["ts"]
        inside = begin <= transfer.ts < begin + event.get("dur", 0.0) and event.get("tid") == transfer.tid
        if inside and (innermost is None or begin >= innermost[0]):
            innermost = begin, f"{function['file']}:{function['line']} (in {function['function']})"
    return innermost and innermost[1]


def _argument(event: _Event, name: str) -> Any:
    return event.get("args", {}).get(name)


def _segments(events: Iterable[_Event]) -> list[_Segment]:
    """Flatten our nested ranges into ordered segments, each assigned to the innermost range."""
    ranges = [
        (event["ts"], event["ts"] + event["dur"], name.removeprefix(PREFIX) if name.startswith(PREFIX) else ITERATION)
        for event in events
        if event.get("cat") == "user_annotation" and _RANGE.match(name := event["name"])
    ]
    segments: list[_Segment] = []
    stack: list[tuple[float, str]] = []  # end and phase
    now = 0.0

    def until(ts: float) -> None:
        nonlocal now
        if stack and ts > now:
            segments.append(_Segment(now, ts, reported_phase(stack[-1][1])))
        now = max(now, ts)

    ranges.append((math.inf, math.inf, ""))  # ends all others
    for begin, end, phase in sorted(ranges, key=lambda span: (span[0], -span[1])):
        while stack and stack[-1][0] <= begin:
            until(stack[-1][0])
            stack.pop()
        until(begin)
        stack.append((end, phase))
    return segments


class _Union:
    """Union of intervals, which may overlap."""

    def __init__(self, intervals: Iterable[tuple[float, float]]) -> None:
        self._spans: list[tuple[float, float]] = []
        for begin, end in sorted(intervals):
            if self._spans and begin <= self._spans[-1][1]:
                self._spans[-1] = self._spans[-1][0], max(self._spans[-1][1], end)
            else:
                self._spans.append((begin, end))

    def within(self, low: float, high: float) -> float:
        """Return the covered length of [low, high]."""
        later = self._spans[bisect_right(self._spans, low, key=lambda span: span[1]) :]
        return sum(min(high, end) - max(low, begin) for begin, end in takewhile(lambda span: span[0] < high, later))
