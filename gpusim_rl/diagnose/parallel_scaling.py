"""How many processes or actors are useful, concluded from measurements. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from gpusim_rl.diagnose.short_training import Measurement

ENOUGH = 0.95
"""A number with this share of the best speed is as good as the best one."""

BUSY = 90.0
"""CPUs that are busier than this have no time for more [%]."""

Points = Mapping[int, Measurement]
"""Measurements by number of processes or actors."""


def efficiency(points: Points) -> dict[int, float]:
    """Returns the speed for each process or actor, over that of the fewest; by number, of those that were measured."""
    each = {count: point.env_steps_per_s / count for count, point in _measured(points).items()}
    return {count: speed / next(iter(each.values())) for count, speed in each.items()}


def useful(points: Points) -> int | None:
    """Returns the fewest that are as fast as the fastest, but for 5 %; None where nothing could be measured."""
    speeds = {count: point.env_steps_per_s for count, point in _measured(points).items()}
    return next((count for count, speed in speeds.items() if speed >= ENOUGH * max(speeds.values())), None)


def reasons(points: Points, unit: str) -> list[str]:
    """Tells in sentences why that number is useful, and why not more.

    Args:
        points: All measurements.
        unit: Name of what is counted, `processes` or `actors`.
    """
    at, measured = useful(points), _measured(points)
    failed = {count: point.error for count, point in sorted(points.items()) if point.error}
    if at is None:
        return ["nothing could be measured" + "".join(f": {error}" for error in [*failed.values()][:1])]
    sentences = [_about(at, measured, unit)]
    more = next((count for count in measured if count > at), None)
    if more is not None and (why := _why_not(measured[more], unit)):
        sentences.append(f"why not {more}: {why}")
    sentences += [f"{count} could not be measured: {error}" for count, error in failed.items()]
    if age := _age(measured[at]):
        sentences.append(f"with {at} {age}: fewer may learn better, though they make fewer samples")
    crowded = ", ".join(str(count) for count, point in measured.items() if point.crowded)
    if crowded:
        sentences.append(f"other programs took CPU time from {crowded}: measure again when the machine is quiet")
    return sentences


def _measured(points: Points) -> dict[int, Measurement]:
    return {count: points[count] for count in sorted(points) if points[count].error is None}


def _about(at: int, measured: Points, unit: str) -> str:
    make = f"{unit} make" if at > 1 else {"processes": "process makes", "actors": "actor makes"}[unit]
    speeds = {count: point.env_steps_per_s for count, point in measured.items()}
    fewest = min(speeds)
    sentence = f"{at} {make} {speeds[at]:,.0f} env steps/s"
    if at > fewest:
        sentence += f", {speeds[at] / speeds[fewest]:.2f} times those of {fewest}"
    if at == max(speeds):
        return f"{sentence}; it is the most that was measured" + ("" if len(speeds) == 1 else ", more may be faster")
    change = max(speed for count, speed in speeds.items() if count > at) / speeds[at] - 1
    gains = f"are {100 * change:.0f} % faster at best" if change > 0 else "are not faster"
    return f"{sentence}; more (up to {max(speeds)}) {gains}"


def _why_not(point: Measurement, unit: str) -> str:
    """Tells what limits a larger number, where its measurement shows it."""
    wait, causes = point.learner_wait, []
    if unit == "processes" and wait is not None and wait >= 0.2:
        causes.append(f"{100 * wait:.0f} % of the time is in sums over the processes, and in waiting for the slowest")
    if unit == "actors" and wait is not None and wait < 0.1:
        causes.append(f"the learner is at work all the time, it waits {100 * wait:.0f} % for rollouts")
    if point.actor_wait is not None and point.actor_wait >= 0.3:
        causes.append(f"actors wait {100 * point.actor_wait:.0f} % of the time for the learner")
    if point.cpu_percent is not None and point.cpu_percent > BUSY:
        causes.append(f"the CPUs are busy {point.cpu_percent:.0f} %")
    return "; ".join(filter(None, (*causes, _age(point))))


def _age(point: Measurement) -> str:
    """Tells how old samples are, where they are older than half of what is allowed."""
    if point.lag is None or point.lag_limit is None or point.lag <= 0.5 * point.lag_limit:
        return ""
    return f"samples are {point.lag:.1f} updates old on average, of {point.lag_limit} at most"
