"""Audit of host-device transfers and waits by source location: torch operators on the CPU, profiler traces on CUDA."""

from __future__ import annotations

import dataclasses
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpusim_rl.diagnose.trace import load_trace, name_function, read_events
from gpusim_rl.env import VecEnv
from gpusim_rl.errors import ConfigError
from gpusim_rl.machine.source_location import LIBRARY, locate
from gpusim_rl.run.logger import Logger
from gpusim_rl.run.phases import ITERATION, OUTSIDE, reported_phase
from gpusim_rl.run.profiler import make_profiler, phase_range
from gpusim_rl.run.trainer import Trainer
from gpusim_rl.settings.simulators import SIMULATORS
from gpusim_rl.testing.sync_counter import SourceLocation, SyncCounter, Work

PHYSICS = "physics (host)"  # sim=mujoco works in host memory, without transfers
CHECKPOINT = "checkpoint"  # saving reads the policy, but not in every iteration


@dataclass(frozen=True, slots=True)
class Loop:
    """Training loop whose iterations can be run one at a time."""

    device: torch.device  # of the learner
    iterate: Callable[[], None]  # runs one iteration: rollout, update and logging
    observe: Callable[[Callable[[str], AbstractContextManager[Any]]], None]  # like `PhaseTimer.observe`
    library: str | None = None  # package to which source locations must belong; None = first line outside torch


@dataclass(frozen=True, slots=True)
class Audit:
    """Work in a loop's steady-state iterations."""

    method: str  # `COUNTED` or `TRACED`
    iterations: int  # number of audited iterations
    work: dict[str, Work]  # by phase, summed over the iterations
    locations: Counter[SourceLocation]  # number of copies and waits per location

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for json."""
        counted, phases = ("to_device", "to_host", "syncs", "operators"), {}
        for phase, work in self.work.items():
            numbers = dataclasses.asdict(work) | {"syncs": dict(work.syncs)}
            if self.method == COUNTED:
                phases[phase] = {name: numbers[name] for name in counted}
                continue
            del numbers["operators"]
            for share, seconds in (("busy", work.busy_s), ("occupied", work.occupied_s)):
                numbers[share] = seconds / work.wall_s if work.wall_s else None
            phases[phase] = numbers
        locations = [dataclasses.asdict(at) | {"count": count} for at, count in self.locations.most_common()]
        return {"method": self.method, "iterations": self.iterations, "phases": phases, "locations": locations}


COUNTED = "torch operators, counted on the CPU"
TRACED = "profiler trace and sync warnings on CUDA"


def audit(loop: Loop, *, warm_up: int, iterations: int) -> Audit:
    """Audit a loop's iterations after the warm-up; raise ConfigError if the profiler cannot see the device."""
    for _ in range(warm_up):
        loop.iterate()
    return _audit_cuda(loop, iterations) if loop.device.type == "cuda" else _audit_cpu(loop, iterations)


def our_loop(trainer: Trainer, log: Logger) -> Loop:
    """Return our trainer's loop, with host physics and saving as separate phases."""

    def observe(around: Callable[[str], Any]) -> None:  # context managers that also work as decorators
        trainer.collector.timer.observe(around)
        calls: list[tuple[Any, str, str]] = [(trainer, "save", CHECKPOINT)]
        if isinstance(trainer.env, VecEnv) and SIMULATORS[trainer.start.sim.name].cpu_threads:
            calls += [(trainer.env.sim, name, PHYSICS) for name in ("step", "reset", "refresh", "draw")]
        for owner, name, phase in calls:
            setattr(owner, name, around(phase)(getattr(owner, name)))

    return Loop(trainer.start.device, lambda: trainer.iterate(log), observe)


def _audit_cpu(loop: Loop, iterations: int) -> Audit:
    counter = SyncCounter(loop.library)
    loop.observe(counter.around)
    with counter:
        for _ in range(iterations):
            with counter.around(ITERATION):
                loop.iterate()
    return Audit(COUNTED, iterations, counter.work, Counter(counter.found))


def _audit_cuda(loop: Loop, iterations: int) -> Audit:
    phases = [OUTSIDE]  # of the host, innermost last

    @contextmanager
    def around(phase: str) -> Iterator[None]:
        phases.append(reported_phase(phase))
        try:
            yield
        finally:
            phases.pop()

    loop.observe(phase_range)
    loop.observe(around)
    events = _trace(loop, iterations)
    if not any(event.get("cat") == "kernel" for event in events):
        hint = "Try stopping other profilers, or the driver option NVreg_RestrictProfilingToAdminUsers=0"
        raise ConfigError("the profiler recorded no kernels on this GPU", hint=hint)
    reading = read_events(events)
    locations = _sync_warnings(loop, iterations, phases)
    for location, count in locations.items():
        work = reading.work.setdefault(location.phase, Work())
        if not work.syncs:  # torch warned about a wait that the trace lacks
            work.syncs[location.what] += count
    # Torch does not warn about Warp's calls and asynchronous copies; a trace with stacks has their functions.
    if reading.transfers and (loop.library is None or not locations):
        locations += _stack_locations(loop)
    return Audit(TRACED, iterations, reading.work, locations)


def _trace(loop: Loop, iterations: int, *, stacks: bool = False) -> list[dict[str, Any]]:
    with make_profiler(loop.device, with_stack=stacks) as profiler:
        for _ in range(iterations):
            with phase_range(ITERATION):
                loop.iterate()
        if loop.device.type == "cuda":
            torch.cuda.synchronize(loop.device)  # the trace includes all launched work
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return load_trace(path)


def _stack_locations(loop: Loop) -> Counter[SourceLocation]:
    events = _trace(loop, 1, stacks=True)
    return Counter(
        SourceLocation(transfer.phase, transfer.kind, name_function(events, transfer, LIBRARY) or "")
        for transfer in read_events(events).transfers
    )


def _sync_warnings(loop: Loop, iterations: int, phases: list[str]) -> Counter[SourceLocation]:
    """Run iterations with torch's sync warnings; return how often each location caused one."""
    locations: Counter[SourceLocation] = Counter()

    def warned(message: Warning | str, *args: Any, **kwargs: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            where = locate(sys._getframe(1), loop.library)
            locations[SourceLocation(phases[-1], "sync", where)] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = warned  # type: ignore[assignment]
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(iterations):
                loop.iterate()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return locations


def violations(result: Audit, rows: int) -> list[str]:
    """Describe transfers and waits that steady training must not have; phase `log` may copy `rows` rows of metrics."""
    lines = []
    for phase, work in result.work.items():
        if phase in (PHYSICS, CHECKPOINT):
            continue
        allowed = rows if phase == "log" else 0
        too_many = [
            f"{phase}: {count} {kind} in {result.iterations} iterations{f', {limit} allowed' if limit else ''}"
            for count, limit, kind in (
                (work.to_device.count, 0, f"copies to the device ({work.to_device.bytes} bytes)"),
                (work.to_host.count, allowed, f"copies to the host ({work.to_host.bytes} bytes)"),
                (sum(work.syncs.values()), allowed, "host syncs"),
            )
            if count > limit
        ]
        if too_many:
            named = [f"{phase}: {n} x {at}" for at, n in result.locations.most_common() if at.phase == phase]
            lines += too_many + named
    return lines
