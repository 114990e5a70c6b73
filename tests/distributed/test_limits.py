"""Numbers of actors and sizes of batches that are tried while a run goes on."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpusim_rl.distributed.limits import INTERVAL_S, Limits, Tuner


def run(tuner: Tuner, speed: Callable[[Limits], float], intervals: int) -> list[Limits]:
    """The limits in each interval of a machine with this speed [steps/s]."""
    seen, now = [], 0.0
    for _ in range(intervals):
        seen.append(tuner.limits)
        tuner.observe(0, now)  # the first count after a change begins an interval
        now += INTERVAL_S
        tuner.observe(round(speed(tuner.limits) * INTERVAL_S), now)
    return seen


@pytest.mark.parametrize("start", [Limits(1, 1), Limits(16, 16), Limits(2, 2)])
def test_it_climbs_to_the_best_number_of_actors_and_batch(start: Limits) -> None:
    def speed(limits: Limits) -> float:
        # Each actor adds as much until there are 8, then they are in each other's way; so are batches of more than 4.
        actors = min(limits.actors, 8) / (1.0 + 0.05 * max(0, limits.actors - 8))
        return 100.0 * actors / (1.0 + 0.1 * abs(limits.batch - 4))

    tuner = Tuner(start, 16)
    seen = run(tuner, speed, 80)
    kept = max(set(seen[-20:]), key=seen[-20:].count)
    assert speed(kept) > 0.9 * speed(Limits(8, 4)), seen


def test_what_is_slower_is_taken_back_and_the_kept_setting_is_measured_again() -> None:
    tuner = Tuner(Limits(4, 4), 8)
    seen = run(tuner, lambda limits: 100.0 if limits == Limits(4, 4) else 50.0, 12)
    assert seen[::2] == [Limits(4, 4)] * 6
    assert Limits(4, 4) not in seen[1::2] and len(set(seen[1::2])) >= 3


def test_limits_stay_within_what_there_is() -> None:
    tuner = Tuner(Limits(3, 2), 4)
    for limits in run(tuner, lambda limits: 1.0 + limits.actors + limits.batch, 60):
        assert 1 <= limits.batch <= limits.actors <= 4


def test_one_actor_has_nothing_to_tune() -> None:
    assert set(run(Tuner(Limits(1, 1), 1), lambda _: 1.0, 10)) == {Limits(1, 1)}
