"""Which device and how many envs to train with, concluded from measurements. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from gpusim_rl.diagnose.short_training import Measurement

GAIN = 0.10
"""A doubling of the envs that brings less speed than this is not worth its memory and its fewer updates."""

CLEARLY = 1.5
"""A device that is faster by this factor is worth a change."""

SLOWER = 0.25
"""Of two numbers of envs the larger one is not slower by more than this, unless something else runs meanwhile."""

MEMORY = 0.85
"""Of the memory that there is, a recommended setting takes no more."""

Points = Mapping[int, Measurement]
"""Measurements on one device by number of envs."""


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A setting, and why.

    Attributes:
        device: `cpu` or `cuda`; None where nothing could be measured.
        num_envs: Number of envs; None where nothing could be measured.
        gpu_speedup: Speed on the GPU over that on the CPU, each at its own best setting; None without both.
        reasons: Sentences.
    """

    device: str | None
    num_envs: int | None
    gpu_speedup: float | None
    reasons: list[str]


def fits(point: Measurement) -> bool:
    """Returns whether a training leaves some memory free."""
    return point.memory_gb is None or point.memory_limit_gb is None or point.memory_gb < MEMORY * point.memory_limit_gb


def knee(points: Points) -> int | None:
    """Returns the fewest envs beyond which no measured number brings GAIN per doubling.

    What failed or leaves no memory free does not count.
    """
    usable = [num_envs for num_envs, point in _measured(points).items() if fits(point)]
    for i, few in enumerate(usable):
        if all(gain_per_doubling(points, few, many) < GAIN for many in usable[i + 1 :]):
            return few
    return None


def gain_per_doubling(points: Points, few: int, many: int) -> float:
    """Returns the gain in speed of each doubling of the envs from one number to another."""
    return (points[many].env_steps_per_s / points[few].env_steps_per_s) ** (1 / math.log2(many / few)) - 1


def recommend(measured: Mapping[str, Points], *, task: str, tuned_envs: int) -> Recommendation:
    """Chooses a device and a number of envs.

    Args:
        measured: All measurements by device, `cpu` or `cuda`.
        task: Name of the task.
        tuned_envs: Number of envs for which the task's yaml is tuned.
    """
    knees = {device: num_envs for device, points in measured.items() if (num_envs := knee(points)) is not None}
    failed = {device: [p.error for p in points.values() if p.error] for device, points in measured.items()}
    if not knees:
        first = next((f": {error}" for errors in failed.values() for error in errors), "")
        return Recommendation(None, None, None, [f"nothing could be measured{first}"])
    reasons = [_about_knee(device, measured[device], num_envs) for device, num_envs in knees.items()]
    reasons += [doubt for device in knees for doubt in _doubts(device, measured[device])]
    speedup = None
    if len(knees) == 2:
        cpu, gpu = measured["cpu"][knees["cpu"]], measured["cuda"][knees["cuda"]]
        speedup = gpu.env_steps_per_s / cpu.env_steps_per_s
        best = "cuda" if speedup > 1 and not _as_fast(cpu, gpu) else "cpu"
        reasons.append(_about_both(cpu, gpu, task) + _where_cpu_is_faster(measured["cpu"], measured["cuda"]))
    else:
        (best,) = knees
        others = [errors[0] for device, errors in failed.items() if device != best and errors]
        reasons += [f"the other device could not be measured: {error}" for error in others]
        if best == "cpu":
            reasons.append(_without_gpu(measured["cpu"], knees["cpu"]))
    if knees[best] != tuned_envs:
        reasons.append(
            f"{task}'s PPO settings are tuned for {tuned_envs} envs: with {knees[best]} it learns differently from the"
            " same number of samples"
        )
    return Recommendation(best, knees[best], speedup, reasons)


def _measured(points: Points) -> dict[int, Measurement]:
    return {num_envs: points[num_envs] for num_envs in sorted(points) if points[num_envs].error is None}


def _about_knee(device: str, points: Points, at: int) -> str:
    """Tells why to stop at a number of envs."""
    speed = f"{device}: {at} envs make {points[at].env_steps_per_s:,.0f} env steps/s"
    measured, more = _measured(points), sorted(num_envs for num_envs in points if num_envs > at)
    usable = [num_envs for num_envs in more if num_envs in measured and fits(points[num_envs])]
    if usable:
        best = max(gain_per_doubling(points, at, num_envs) for num_envs in usable)
        gains = f"brings {100 * best:.0f} % per doubling at most" if best > 0 else "brings nothing"
        return f"{speed}; more (up to {usable[-1]}) {gains}"
    fewer = [num_envs for num_envs in measured if num_envs < at]
    gain = ""
    if fewer:
        gain = f", {100 * gain_per_doubling(points, fewer[-1], at):.0f} % more per doubling since {fewer[-1]}"
    if not more:
        return f"{speed}, the most that was measured{gain}" + ("; measure more with --num-envs" if fewer else "")
    point = points[more[0]]
    reason = point.error or f"{more[0]} take {point.memory_gb:.1f} of {point.memory_limit_gb:.1f} GB"
    return f"{speed}{gain}; more do not fit: {reason}"


def _doubts(device: str, points: Points) -> list[str]:
    """Tells which measurements on one device may not be trusted."""
    measured = _measured(points)
    doubts = []
    for few, many in itertools.pairwise(measured):
        slower = 1.0 - measured[many].env_steps_per_s / measured[few].env_steps_per_s
        if slower > SLOWER:
            doubts.append(
                f"{many} envs on {device} were {_percent(slower)} slower than {few}, which more envs do not explain:"
                " something else ran, or the machine was hot; measure again"
            )
    crowded = ", ".join(str(num_envs) for num_envs, point in measured.items() if point.crowded)
    if crowded:
        doubts.append(
            f"other programs took CPU time from {crowded} envs on {device}: these numbers are too low; measure again"
            " when the machine is quiet"
        )
    return doubts


def _as_fast(one: Measurement, other: Measurement) -> bool:
    """Returns whether the iterations of two trainings overlap in speed."""
    return one.slowest <= other.fastest and other.slowest <= one.fastest and min(one.slowest, other.slowest) > 0


def _about_both(cpu: Measurement, gpu: Measurement, task: str) -> str:
    """Tells whether a GPU is worth it, each device at its best number of envs."""
    speedup = gpu.env_steps_per_s / cpu.env_steps_per_s
    numbers = f"{gpu.env_steps_per_s:,.0f} against {cpu.env_steps_per_s:,.0f} env steps/s"
    if _as_fast(cpu, gpu):
        return f"a GPU is not worth it for {task}: as fast as the CPU within what single iterations differ, {numbers}"
    if speedup >= CLEARLY:
        return f"a GPU is worth it for {task}: {speedup:.1f} times as fast, {numbers}"
    if speedup > 1 / CLEARLY:
        return f"a GPU is hardly worth it for {task}: {speedup:.2f} times as fast, {numbers}"
    return f"a GPU is not worth it for {task}: the CPU is {1 / speedup:.1f} times as fast ({numbers} on the GPU)"


def _where_cpu_is_faster(on_cpu: Points, on_gpu: Points) -> str:
    """Names the numbers of envs at which the CPU is ahead, where it is not so at all."""
    cpu, gpu = _measured(on_cpu), _measured(on_gpu)
    both = [num_envs for num_envs in gpu if num_envs in cpu]
    ahead = [str(num_envs) for num_envs in both if cpu[num_envs].env_steps_per_s >= gpu[num_envs].env_steps_per_s]
    return f"; at {', '.join(ahead)} envs the CPU is faster" if 0 < len(ahead) < len(both) else ""


def _without_gpu(points: Points, at: int) -> str:
    """Tells what the CPU's numbers say of a GPU where none was measured."""
    point = points[at]
    text = (
        "no GPU was measured, so whether one is worth it is not known. What these numbers say:"
        f" {_percent(1 - point.phases.get('log', 0.0))} of the time at {at} envs is physics, policy and learning, which"
        " a GPU would do"
    )
    fewest = next(iter(_measured(points)))
    if fewest < at and point.step_ms > 0:
        # The part of a control step that does not depend on the number of envs is at most a whole step of the fewest.
        fixed = points[fewest].step_ms / point.step_ms
        text += (
            f"; a control step takes {points[fewest].step_ms:.1f} ms for {fewest} envs and {point.step_ms:.1f} ms for"
            f" {at}, so at least {_percent(max(0.0, 1 - fixed))} of it is work that grows with the envs"
        )
    return text


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
