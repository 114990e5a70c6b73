"""What to conclude from measurements at several numbers of envs and on several devices. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

GAIN = 0.10
"""A doubling of the envs that brings less speed than this is not worth its memory and its fewer updates."""

CLEARLY = 1.5
"""A device that is faster by this factor is worth a change."""

SLOWER = 0.25
"""Of two numbers of envs the larger one is not slower by more than this, unless something else runs meanwhile."""

MEMORY = 0.85
"""Of the memory that there is, a recommended setting takes no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One measurement, in a process of its own.

    Attributes:
        device: `cpu` or `cuda`.
        num_envs: N.
        error: Why there are no numbers; the rest is then empty.
        sim: Simulator.
        precision: Of the networks.
        env_steps_per_s: Median over the measured iterations, all envs together.
        slowest: Slowest iteration [env steps/s].
        fastest: Fastest iteration [env steps/s].
        phases: Share of the time.
        step_ms: Duration of a control step of all envs, policy included, learning not [ms].
        memory_gb: RAM of the process at most; on `cuda` memory in use on the GPU.
        memory_limit_gb: What there is of it.
        iterations: Measured ones.
        crowded: Other programs took CPU time from it.
    """

    device: str
    num_envs: int
    error: str | None = None
    sim: str = ""
    precision: str = ""
    env_steps_per_s: float = 0.0
    slowest: float = 0.0
    fastest: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    step_ms: float = 0.0
    memory_gb: float | None = None
    memory_limit_gb: float | None = None
    iterations: int = 0
    crowded: bool = False

    @property
    def per_env(self) -> float:
        """Control steps per second of each env."""
        return self.env_steps_per_s / self.num_envs

    @property
    def fits(self) -> bool:
        """It leaves some memory free."""
        return self.memory_gb is None or self.memory_limit_gb is None or self.memory_gb < MEMORY * self.memory_limit_gb


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A setting, and why.

    Attributes:
        device: None where nothing could be measured.
        num_envs: None where nothing could be measured.
        gpu_speedup: Speed on the GPU over that on the CPU, each at its own best setting; None without both.
        reasons: Sentences.
    """

    device: str | None
    num_envs: int | None
    gpu_speedup: float | None
    reasons: list[str]

    def as_dict(self) -> dict[str, Any]:
        """For json."""
        return {name: getattr(self, name) for name in ("device", "num_envs", "gpu_speedup", "reasons")}


def knee(points: Sequence[Point]) -> Point | None:
    """The fewest envs beyond which no measured number brings GAIN per doubling.

    Args:
        points: Of one device. Those that failed or leave no memory free do not count.
    """
    usable = sorted((point for point in points if point.error is None and point.fits), key=lambda p: p.num_envs)
    for i, point in enumerate(usable):
        if all(gain_per_doubling(point, more) < GAIN for more in usable[i + 1 :]):
            return point
    return None


def gain_per_doubling(few: Point, many: Point) -> float:
    """How much more speed each doubling of the envs has brought from one measurement to another."""
    doublings = math.log2(many.num_envs / few.num_envs)
    return (many.env_steps_per_s / few.env_steps_per_s) ** (1 / doublings) - 1


def recommend(points: Sequence[Point], *, task: str, tuned_envs: int) -> Recommendation:
    """Choose a device and a number of envs.

    Args:
        points: All measurements.
        task: Name of the task.
        tuned_envs: Envs for which the task's yaml is tuned.
    """
    devices = list(dict.fromkeys(point.device for point in points))
    knees = {device: found for device in devices if (found := knee(_of(points, device))) is not None}
    if not knees:
        first = next((f": {point.error}" for point in points if point.error), "")
        return Recommendation(None, None, None, [f"nothing could be measured{first}"])
    reasons = [_about_knee(_of(points, device), at) for device, at in knees.items()]
    reasons += [doubt for device in knees for doubt in _doubts(_of(points, device))]
    cpu, gpu = knees.get("cpu"), knees.get("cuda")
    speedup = gpu.env_steps_per_s / cpu.env_steps_per_s if cpu and gpu else None
    if cpu and gpu and speedup is not None:
        best = gpu if speedup > 1 and not _as_fast(cpu, gpu) else cpu
        reasons.append(_about_both(_of(points, "cpu"), _of(points, "cuda"), cpu, gpu, speedup, task))
    else:
        best = max(knees.values(), key=lambda point: point.env_steps_per_s)
        failed = next((point.error for point in points if point.device not in knees), None)
        if failed is not None:
            reasons.append(f"the other device could not be measured: {failed}")
        if cpu and not gpu:
            reasons.append(_without_gpu(_of(points, "cpu"), cpu))
    if best.num_envs != tuned_envs:
        reasons.append(
            f"{task}'s PPO settings are tuned for {tuned_envs} envs: with {best.num_envs} it learns differently from"
            " the same number of samples"
        )
    return Recommendation(best.device, best.num_envs, speedup, reasons)


def _of(points: Sequence[Point], device: str) -> list[Point]:
    return sorted((point for point in points if point.device == device), key=lambda point: point.num_envs)


def _about_knee(points: Sequence[Point], at: Point) -> str:
    """Why to stop there."""
    speed = f"{at.device}: {at.num_envs} envs make {at.env_steps_per_s:,.0f} env steps/s"
    more = [point for point in points if point.num_envs > at.num_envs]
    measured = [point for point in more if point.error is None and point.fits]
    if measured:
        best = max(gain_per_doubling(at, point) for point in measured)
        gains = f"brings {100 * best:.0f} % per doubling at most" if best > 0 else "brings nothing"
        return f"{speed}; more (up to {measured[-1].num_envs}) {gains}"
    less = [point for point in points if point.num_envs < at.num_envs and point.error is None]
    last = (
        f", {100 * gain_per_doubling(less[-1], at):.0f} % more per doubling since {less[-1].num_envs}" if less else ""
    )
    if not more:
        return f"{speed}, the most that was measured{last}" + ("; measure more with --num-envs" if less else "")
    reason = more[0].error or f"{more[0].num_envs} take {more[0].memory_gb:.1f} of {more[0].memory_limit_gb:.1f} GB"
    return f"{speed}{last}; more do not fit: {reason}"


def _doubts(points: Sequence[Point]) -> list[str]:
    """What of the measurements of one device may not be trusted."""
    doubts, measured = [], [point for point in points if point.error is None]
    for few, many in itertools.pairwise(measured):
        less = 1.0 - many.env_steps_per_s / few.env_steps_per_s
        if less > SLOWER:
            doubts.append(
                f"{many.num_envs} envs on {many.device} were {_percent(less)} slower than {few.num_envs}, which more"
                " envs do not explain: something else ran, or the machine was hot; measure again"
            )
    crowded = [str(point.num_envs) for point in measured if point.crowded]
    if crowded:
        doubts.append(
            f"other programs took CPU time from {', '.join(crowded)} envs on {measured[0].device}: these numbers are"
            " too low; measure again when the machine is quiet"
        )
    return doubts


def _as_fast(one: Point, other: Point) -> bool:
    """Their iterations overlap in speed."""
    return one.slowest <= other.fastest and other.slowest <= one.fastest and min(one.slowest, other.slowest) > 0


def _about_both(
    on_cpu: Sequence[Point], on_gpu: Sequence[Point], cpu: Point, gpu: Point, speedup: float, task: str
) -> str:
    """Is a GPU worth it?"""
    numbers = f"{gpu.env_steps_per_s:,.0f} against {cpu.env_steps_per_s:,.0f} env steps/s"
    if _as_fast(cpu, gpu):
        answer = f"a GPU is not worth it for {task}: as fast as the CPU within what single iterations differ, {numbers}"
    elif speedup >= CLEARLY:
        answer = f"a GPU is worth it for {task}: {speedup:.1f} times as fast, {numbers}"
    elif speedup > 1 / CLEARLY:
        answer = f"a GPU is hardly worth it for {task}: {speedup:.2f} times as fast, {numbers}"
    else:
        answer = f"a GPU is not worth it for {task}: the CPU is {1 / speedup:.1f} times as fast ({numbers} on the GPU)"
    speeds = {point.num_envs: point.env_steps_per_s for point in on_cpu if point.error is None}
    ahead = {p.num_envs: p.env_steps_per_s > speeds[p.num_envs] for p in on_gpu if p.num_envs in speeds and not p.error}
    if len(set(ahead.values())) == 2:
        behind = sorted(num_envs for num_envs, faster in ahead.items() if not faster)
        answer += f"; at {', '.join(map(str, behind))} envs the CPU is faster"
    return answer


def _without_gpu(points: Sequence[Point], at: Point) -> str:
    """What can be said of a GPU where none was measured."""
    host = at.phases.get("log", 0.0)
    text = (
        "no GPU was measured, so whether one is worth it is not known. What these numbers say:"
        f" {_percent(1 - host)} of the time at {at.num_envs} envs is physics, policy and learning, which a GPU would do"
    )
    smallest = next(point for point in points if point.error is None)
    if smallest.num_envs < at.num_envs and at.step_ms > 0:
        # The part of a control step that does not depend on the number of envs is at most a whole step of the fewest.
        fixed = smallest.step_ms / at.step_ms
        text += (
            f"; a control step takes {smallest.step_ms:.1f} ms for {smallest.num_envs} envs and {at.step_ms:.1f} ms for"
            f" {at.num_envs}, so at least {_percent(max(0.0, 1 - fixed))} of it is work that grows with the envs"
        )
    return text


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
