"""Recommended device and number of envs, processes or actors, from measurements."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from gpusim_rl.diagnose.short_training import Measurement

GAIN = 0.10  # minimum speed gain from doubling the envs that is worth the memory and fewer updates
CLEARLY = 1.5  # minimum speedup that is worth another device
SLOWER = 0.25  # slowdown with more envs that only other programs can explain
MEMORY = 0.85  # maximum share of the memory for a recommended setting
ENOUGH = 0.95  # share of the maximum speed that is as good as the maximum
BUSY = 90.0  # load of saturated CPUs [%]

Points = Mapping[int, Measurement]  # keyed by number of envs (on one device), of processes or of actors


@dataclass(frozen=True, slots=True)
class Recommendation:
    """Recommended setting; None = nothing could be measured."""

    device: str | None
    num_envs: int | None
    gpu_speedup: float | None  # GPU speed / CPU speed, each at its best setting
    reasons: list[str]  # sentences


def fits(point: Measurement) -> bool:
    """Return whether a training run leaves some memory free."""
    return point.memory_gb is None or point.memory_limit_gb is None or point.memory_gb < MEMORY * point.memory_limit_gb


def knee(points: Points) -> int | None:
    """Return the smallest number of envs beyond which a doubling gains less than `GAIN`; None if nothing is usable."""
    usable = [num_envs for num_envs, point in _measured(points).items() if fits(point)]
    for i, few in enumerate(usable):
        if all(gain_per_doubling(points, few, many) < GAIN for many in usable[i + 1 :]):
            return few
    return None


def gain_per_doubling(points: Points, few: int, many: int) -> float:
    """Return the relative gain in speed per doubling of the number of envs."""
    return (points[many].env_steps_per_s / points[few].env_steps_per_s) ** (1 / math.log2(many / few)) - 1


def recommend(measured: Mapping[str, Points], *, task: str, tuned_envs: int) -> Recommendation:
    """Choose device and number of envs; the task's yaml is tuned for `tuned_envs`."""
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
        reasons.append(_about_both(cpu, gpu, task))
    else:
        (best,) = knees
        others = [errors[0] for device, errors in failed.items() if device != best and errors]
        reasons += [f"the other device could not be measured: {error}" for error in others]
        if best == "cpu":
            share = percent(1 - measured["cpu"][knees["cpu"]].phases.get("log", 0.0))
            work = f"{share} of the time at {knees['cpu']} envs is physics, policy and learning"
            reasons.append(f"no GPU was measured; {work}, which would run on it")
    if knees[best] != tuned_envs:
        reasons.append(f"{task} is tuned for {tuned_envs} envs; with {knees[best]}, learning per sample differs")
    return Recommendation(best, knees[best], speedup, reasons)


def _measured(points: Points) -> dict[int, Measurement]:
    return {num_envs: points[num_envs] for num_envs in sorted(points) if points[num_envs].error is None}


def _about_knee(device: str, points: Points, at: int) -> str:
    speed = f"{device}: {at} envs reach {points[at].env_steps_per_s:,.0f} env steps/s"
    measured, more = _measured(points), sorted(num_envs for num_envs in points if num_envs > at)
    usable = [num_envs for num_envs in more if num_envs in measured and fits(points[num_envs])]
    if usable:
        best = max(gain_per_doubling(points, at, num_envs) for num_envs in usable)
        return f"{speed}; more (up to {usable[-1]}) gain at most {percent(max(best, 0.0))} per doubling"
    fewer = [num_envs for num_envs in measured if num_envs < at]
    gain = ""
    if fewer:
        gain = f", {percent(gain_per_doubling(points, fewer[-1], at))} more per doubling since {fewer[-1]}"
    if not more:
        return f"{speed}, the maximum measured{gain}" + ("; measure more with --num-envs" if fewer else "")
    point = points[more[0]]
    reason = point.error or f"{more[0]} use {point.memory_gb:.1f} of {point.memory_limit_gb:.1f} GB"
    return f"{speed}{gain}; more do not fit: {reason}"


def _doubts(device: str, points: Points) -> list[str]:
    measured = _measured(points)
    doubts = []
    for few, many in itertools.pairwise(measured):
        slower = 1.0 - measured[many].env_steps_per_s / measured[few].env_steps_per_s
        if slower > SLOWER:
            compared = f"{many} envs on {device} were {percent(slower)} slower than {few}"
            doubts.append(f"{compared}: other programs were running, or the machine was too hot; measure again")
    return doubts + _crowded(measured, f" envs on {device}")


def _crowded(measured: Points, unit: str) -> list[str]:
    contended = ", ".join(str(number) for number, point in measured.items() if point.contended)
    return [f"other programs slowed down {contended}{unit}; measure again on an idle machine"] if contended else []


def _as_fast(one: Measurement, other: Measurement) -> bool:
    """Return whether the ranges of two runs' per-iteration speeds overlap."""
    return one.slowest <= other.fastest and other.slowest <= one.fastest and min(one.slowest, other.slowest) > 0


def _about_both(cpu: Measurement, gpu: Measurement, task: str) -> str:
    speedup = gpu.env_steps_per_s / cpu.env_steps_per_s
    numbers = f"{gpu.env_steps_per_s:,.0f} env steps/s against {cpu.env_steps_per_s:,.0f} on the CPU"
    if _as_fast(cpu, gpu):
        return f"a GPU is not worth it for {task}: as fast as the CPU, within iteration noise, {numbers}"
    if speedup >= CLEARLY:
        return f"a GPU is worth it for {task}: {speedup:.1f} times as fast, {numbers}"
    if speedup > 1 / CLEARLY:
        return f"a GPU is hardly worth it for {task}: {speedup:.2f} times as fast, {numbers}"
    return f"a GPU is not worth it for {task}: the CPU is {1 / speedup:.1f} times as fast ({numbers})"


def efficiency(points: Points) -> dict[int, float]:
    """Return, by number of processes or actors, the speed per process or actor relative to the smallest number."""
    each = {count: point.env_steps_per_s / count for count, point in _measured(points).items()}
    return {count: speed / next(iter(each.values())) for count, speed in each.items()}


def useful(points: Points) -> int | None:
    """Return the smallest number of processes or actors that reaches 95 % of the maximum speed; None if unmeasured."""
    speeds = {count: point.env_steps_per_s for count, point in _measured(points).items()}
    return next((count for count, speed in speeds.items() if speed >= ENOUGH * max(speeds.values())), None)


def reasons(points: Points, unit: str) -> list[str]:
    """Return sentences that explain the `useful` number; `unit` is processes or actors."""
    at, measured = useful(points), _measured(points)
    failed = {count: point.error for count, point in sorted(points.items()) if point.error}
    if at is None:
        return ["nothing could be measured" + "".join(f": {error}" for error in [*failed.values()][:1])]
    sentences = [_about_number(at, measured, unit)]
    more = next((count for count in measured if count > at), None)
    if more is not None and (why := _why_not(measured[more], unit)):
        sentences.append(f"why not {more}: {why}")
    sentences += [f"{count} could not be measured: {error}" for count, error in failed.items()]
    if age := _age(measured[at]):
        sentences.append(f"with {at}, {age}: fewer {unit} may need fewer samples")
    return sentences + _crowded(measured, "")


def _about_number(at: int, measured: Points, unit: str) -> str:
    speeds = {count: point.env_steps_per_s for count, point in measured.items()}
    fewest = min(speeds)
    sentence = f"{unit}={at}: {speeds[at]:,.0f} env steps/s"
    if at > fewest:
        sentence += f", {speeds[at] / speeds[fewest]:.2f} times as many as with {fewest}"
    if at == max(speeds):
        return f"{sentence}, the maximum measured" + ("" if len(speeds) == 1 else "; more may be faster")
    change = max(speed for count, speed in speeds.items() if count > at) / speeds[at] - 1
    return f"{sentence}; more (up to {max(speeds)}) gain at most {percent(max(change, 0.0))}"


def _why_not(point: Measurement, unit: str) -> str:
    wait, causes = point.learner_wait, []
    if unit == "processes" and wait is not None and wait >= 0.2:
        causes.append(f"{percent(wait)} of the time is spent in sums over processes, waiting for the slowest one")
    if unit == "actors" and wait is not None and wait < 0.1:
        causes.append(f"the learner is saturated: it waits {percent(wait)} for rollouts")
    if point.actor_wait is not None and point.actor_wait >= 0.3:
        causes.append(f"actors wait {percent(point.actor_wait)} of the time for the learner")
    if point.cpu_percent is not None and point.cpu_percent > BUSY:
        causes.append(f"the CPUs are {point.cpu_percent:.0f} % busy")
    return "; ".join(filter(None, (*causes, _age(point))))


def _age(point: Measurement) -> str:
    if point.lag is None or point.lag_limit is None or point.lag <= 0.5 * point.lag_limit:
        return ""
    return f"samples are {point.lag:.1f} updates old on average, at most {point.lag_limit}"


def speeds(point: Measurement) -> dict[str, str]:
    """Return the speed columns of a table row, by heading."""
    if point.error is not None:
        return {"env steps/s": "–"}
    numbers = {"env steps/s": point.env_steps_per_s, "slowest": point.slowest, "fastest": point.fastest}
    return {name: f"{number:,.0f}" for name, number in numbers.items()}


def percent(share: float | None) -> str:
    """Format a share in percent; empty if unknown."""
    return "" if share is None else f"{100 * share:.0f} %"
