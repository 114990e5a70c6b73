"""What to conclude from measurements with several numbers of processes, or of actors. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ENOUGH = 0.95
"""A number with this part of the best speed is as good as the best one."""

BUSY = 90.0
"""CPUs that are busier than this have no time for more [%]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelPoint:
    """One measurement, in processes of its own.

    Attributes:
        count: Processes or actors.
        error: Why there are no numbers; the rest is then empty.
        env_steps_per_s: Median over the measured iterations, all envs together.
        slowest: Slowest iteration [env steps/s].
        fastest: Fastest iteration [env steps/s].
        iterations: Measured ones.
        learner_wait: Share of the time in which the learner waits for rollouts, or processes are in sums over all.
        actor_wait: Share of the time in which actors wait for the learner.
        lag: Age of samples, on average [updates].
        lag_limit: Age at which they are dropped [updates].
        cpu_percent: Of the CPUs of the learner's process, and of its children's.
        crowded: Other programs took CPU time from it.
    """

    count: int
    error: str | None = None
    env_steps_per_s: float = 0.0
    slowest: float = 0.0
    fastest: float = 0.0
    iterations: int = 0
    learner_wait: float | None = None
    actor_wait: float | None = None
    lag: float | None = None
    lag_limit: int | None = None
    cpu_percent: float | None = None
    crowded: bool = False


def efficiency(points: Sequence[ParallelPoint]) -> dict[int, float]:
    """Speed for each process or actor, over that of the fewest; by number, of those that were measured."""
    measured = _measured(points)
    each = {point.count: point.env_steps_per_s / point.count for point in measured}
    return {count: speed / each[measured[0].count] for count, speed in each.items()}


def useful(points: Sequence[ParallelPoint]) -> ParallelPoint | None:
    """The fewest that are as fast as the fastest, but for 5 %; None where nothing could be measured."""
    measured = _measured(points)
    best = max((point.env_steps_per_s for point in measured), default=0.0)
    return next((point for point in measured if point.env_steps_per_s >= ENOUGH * best), None)


def reasons(points: Sequence[ParallelPoint], what: str) -> list[str]:
    """Why that number is useful, and why not more: sentences.

    Args:
        points: All measurements.
        what: `processes` or `actors`.
    """
    at, measured = useful(points), _measured(points)
    if at is None:
        first = next((f": {point.error}" for point in points if point.error), "")
        return [f"nothing could be measured{first}"]
    found = [_about(at, measured, what)]
    more = [point for point in measured if point.count > at.count]
    if more and (why := _why_not(more[0], what)):
        found.append(f"why not {more[0].count}: {why}")
    found += [f"{point.count} could not be measured: {point.error}" for point in points if point.error]
    if at.lag is not None and at.lag_limit is not None and at.lag > 0.5 * at.lag_limit:
        found.append(
            f"with {at.count} samples are {at.lag:.1f} updates old on average, of {at.lag_limit} at most: fewer may"
            " learn better, though they make fewer samples"
        )
    crowded = [str(point.count) for point in measured if point.crowded]
    if crowded:
        found.append(f"other programs took CPU time from {', '.join(crowded)}: measure again when the machine is quiet")
    return found


def _measured(points: Sequence[ParallelPoint]) -> list[ParallelPoint]:
    return sorted((point for point in points if point.error is None), key=lambda point: point.count)


def _about(at: ParallelPoint, measured: Sequence[ParallelPoint], what: str) -> str:
    make = f"{what} make" if at.count > 1 else {"processes": "process makes", "actors": "actor makes"}[what]
    speed = f"{at.count} {make} {at.env_steps_per_s:,.0f} env steps/s"
    if at is not measured[0]:
        speed += f", {at.env_steps_per_s / measured[0].env_steps_per_s:.2f} times those of {measured[0].count}"
    more = [point for point in measured if point.count > at.count]
    if not more:
        return f"{speed}; it is the most that was measured" + ("" if len(measured) == 1 else ", more may be faster")
    best = max(more, key=lambda point: point.env_steps_per_s)
    change = best.env_steps_per_s / at.env_steps_per_s - 1
    gains = f"are {100 * change:.0f} % faster at best" if change > 0 else "are not faster"
    return f"{speed}; more (up to {more[-1].count}) {gains}"


def _why_not(point: ParallelPoint, what: str) -> str:
    """What limits a larger number, where its numbers tell."""
    wait, causes = point.learner_wait, []
    if what == "processes" and wait is not None and wait >= 0.2:
        causes.append(f"{100 * wait:.0f} % of the time is in sums over the processes, and in waiting for the slowest")
    if what == "actors" and wait is not None and wait < 0.1:
        causes.append(f"the learner is at work all the time, it waits {100 * wait:.0f} % for rollouts")
    if point.actor_wait is not None and point.actor_wait >= 0.3:
        causes.append(f"actors wait {100 * point.actor_wait:.0f} % of the time for the learner")
    if point.cpu_percent is not None and point.cpu_percent > BUSY:
        causes.append(f"the CPUs are busy {point.cpu_percent:.0f} %")
    if point.lag is not None and point.lag_limit is not None and point.lag > 0.5 * point.lag_limit:
        causes.append(f"samples are {point.lag:.1f} updates old on average, of {point.lag_limit} at most")
    return "; ".join(causes)
