"""What is concluded from a table over processes or actors: how many are useful, and why not more."""

from __future__ import annotations

from typing import Any

import pytest

from gpusim_rl.diagnose.parallel_scaling import efficiency, reasons, useful
from gpusim_rl.diagnose.short_training import Measurement


def table(speeds: dict[int, float], **common: Any) -> dict[int, Measurement]:
    return {count: Measurement(env_steps_per_s=speed, **common) for count, speed in speeds.items()}


def failed(count: int) -> dict[int, Measurement]:
    return {count: Measurement(error="out of memory")}


@pytest.mark.parametrize(
    ("speeds", "count"),
    [
        ({1: 100.0}, 1),
        ({1: 100.0, 2: 195.0, 4: 380.0}, 4),  # still growing
        ({1: 100.0, 2: 190.0, 4: 199.0, 8: 195.0}, 2),  # 5 % below the best is as good
        ({1: 100.0, 2: 188.0, 4: 199.0}, 4),
        ({1: 100.0, 2: 90.0}, 1),
    ],
)
def test_the_fewest_that_are_about_as_fast_as_the_best_are_useful(speeds, count):
    for points in (table(speeds), dict(reversed(table(speeds).items()))):
        assert useful(points | failed(16)) == count


def test_efficiency_is_that_of_each_over_each_of_the_fewest():
    assert efficiency(table({1: 100.0, 2: 190.0, 4: 200.0})) == pytest.approx({1: 1.0, 2: 0.95, 4: 0.5})
    assert efficiency(failed(1) | table({2: 200.0, 4: 300.0})) == pytest.approx({2: 1.0, 4: 0.75})
    assert efficiency(failed(1)) == {}


def test_more_processes_that_wait_in_sums():
    points = table({1: 10e3, 2: 19e3}) | table({4: 19.2e3}, learner_wait=0.45)
    assert reasons(points, "processes") == [
        "2 processes make 19,000 env steps/s, 1.90 times those of 1; more (up to 4) are 1 % faster at best",
        "why not 4: 45 % of the time is in sums over the processes, and in waiting for the slowest",
    ]


def test_more_actors_than_the_learner_can_use():
    few = table({1: 10e3}, learner_wait=0.7, actor_wait=0.02, lag=0.5, lag_limit=8)
    enough = table({4: 30e3}, learner_wait=0.08, actor_wait=0.1, lag=2.0, lag_limit=8)
    many = table({8: 28e3}, learner_wait=0.01, actor_wait=0.5, lag=5.0, lag_limit=8, cpu_percent=98.0)
    about, why = reasons(few | enough | many, "actors")
    assert about == "4 actors make 30,000 env steps/s, 3.00 times those of 1; more (up to 8) are not faster"
    assert why == (
        "why not 8: the learner is at work all the time, it waits 1 % for rollouts; actors wait 50 % of the time for"
        " the learner; the CPUs are busy 98 %; samples are 5.0 updates old on average, of 8 at most"
    )


def test_a_reason_that_no_number_tells_is_not_invented():
    [about] = reasons(table({1: 10e3, 2: 9e3}), "actors")
    assert about == "1 actor make 10,000 env steps/s; more (up to 2) are not faster".replace("make", "makes")


def test_a_table_that_ends_too_early_says_so():
    [about] = reasons(table({1: 10e3, 2: 20e3}), "processes")
    assert about.endswith("it is the most that was measured, more may be faster")


def test_old_samples_of_the_useful_number_are_told():
    found = reasons(table({1: 10e3}) | table({4: 40e3}, lag=6.0, lag_limit=8), "actors")
    assert "with 4 samples are 6.0 updates old on average, of 8 at most" in found[1]


def test_what_could_not_be_measured_is_told():
    assert reasons(failed(1), "actors") == ["nothing could be measured: out of memory"]
    assert "2 could not be measured: out of memory" in reasons(table({1: 1e3}) | failed(2), "actors")
    assert "from 1: measure again" in reasons(table({1: 1e3}, crowded=True), "actors")[-1]
