"""Events of a torch profiler trace."""

from __future__ import annotations

from typing import Any

MAIN, BACKWARD = 1, 2  # threads
HTOD, DTOH, DTOD = (
    "Memcpy HtoD (Pageable -> Device)",
    "Memcpy DtoH (Device -> Pinned)",
    "Memcpy DtoD (Device -> Device)",
)


def event(cat: str, name: str, ts: float, dur: float, *, tid: int = MAIN, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


def phase(name: str, ts: float, end: float) -> dict[str, Any]:
    return event("user_annotation", f"phase/{name}", ts, end - ts)


def call(name: str, ts: float, correlation: int, *, cat: str = "cuda_runtime", tid: int = MAIN) -> dict[str, Any]:
    return event(cat, name, ts, 1.0, tid=tid, correlation=correlation)


def kernel(ts: float, end: float, correlation: int, stream: int = 7) -> dict[str, Any]:
    return event("kernel", "a_kernel", ts, end - ts, tid=stream, correlation=correlation, stream=stream)


def copy(name: str, ts: float, end: float, correlation: int, size: int) -> dict[str, Any]:
    return event("gpu_memcpy", name, ts, end - ts, tid=7, correlation=correlation, bytes=size)
