"""What is recommended from a table of measurements: knees, plateaus, limits of memory, a GPU or none, and why."""

from __future__ import annotations

from typing import Any

import pytest

from gpusim_rl.diagnose.scaling import (
    Points,
    Recommendation,
    efficiency,
    gain_per_doubling,
    knee,
    reasons,
    recommend,
    useful,
)
from gpusim_rl.diagnose.short_training import Measurement


def table(speeds: dict[int, float], **common: Any) -> dict[int, Measurement]:
    """Measurements by number."""
    return {
        num_envs: Measurement(env_steps_per_s=speed, step_ms=1000 * num_envs / speed, **common)
        for num_envs, speed in speeds.items()
    }


def too_much(num_envs: int) -> dict[int, Measurement]:
    return {num_envs: Measurement(error=f"num_envs={num_envs} does not fit")}


def advise(tuned_envs: int = 4096, **devices: Points) -> Recommendation:
    return recommend(devices, task="Ant", tuned_envs=tuned_envs)


PLATEAU = {64: 10e3, 256: 30e3, 1024: 46e3, 4096: 49e3, 16384: 50e3}


def test_gain_per_doubling():
    points = table({64: 100.0, 128: 110.0, 256: 400.0})
    assert gain_per_doubling(points, 64, 256) == pytest.approx(1.0)  # twice as fast with each of two doublings
    assert gain_per_doubling(points, 64, 128) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("speeds", "num_envs"),
    [
        (PLATEAU, 1024),
        ({64: 100.0}, 64),
        ({64: 100.0, 128: 190.0, 256: 360.0}, 256),  # still growing
        ({64: 100.0, 128: 99.0, 256: 101.0}, 64),  # flat from the start
        ({64: 100.0, 128: 95.0, 256: 300.0, 512: 310.0}, 256),  # noise does not end the search
        ({64: 100.0, 128: 180.0, 256: 150.0}, 128),  # slower beyond a point
    ],
)
def test_the_knee(speeds, num_envs):
    points = table(speeds)
    assert knee(points) == knee(dict(reversed(points.items()))) == num_envs


def test_what_fills_the_memory_is_not_recommended():
    fits = table({1024: 100e3, 4096: 300e3}, memory_gb=10.0, memory_limit_gb=80.0)
    full = table({16384: 900e3}, memory_gb=75.0, memory_limit_gb=80.0)
    advice = advise(cuda=fits | full)
    assert (advice.device, advice.num_envs) == ("cuda", 4096)
    assert "more do not fit: 16384 use 75.0 of 80.0 GB" in advice.reasons[0]
    advice = advise(cuda=fits | too_much(16384))
    assert advice.num_envs == 4096 and "more do not fit: num_envs=16384 does not fit" in advice.reasons[0]


def test_a_plateau_is_reported_with_the_gain_of_more_envs():
    advice = advise(cpu=table(PLATEAU), tuned_envs=1024)
    assert advice.num_envs == 1024
    assert "46,000 env steps/s" in advice.reasons[0] and "3 % per doubling" in advice.reasons[0]
    assert not any("tuned" in reason for reason in advice.reasons)


def test_a_table_that_ends_too_early_says_so():
    [first, *_] = advise(cpu=table({64: 100.0, 128: 190.0, 256: 360.0})).reasons
    assert first.endswith("89 % more per doubling since 128; measure more with --num-envs")


@pytest.mark.parametrize(
    ("cpu", "gpu", "device", "speedup", "words"),
    [
        ({1024: 46e3}, {4096: 300e3, 16384: 812e3}, "cuda", 17.65, "a GPU is worth it for Ant: 17.7 times"),
        ({64: 60e3, 512: 200e3}, {64: 4e3, 512: 30e3}, "cpu", 0.15, "not worth it for Ant: the CPU is 6.7 times"),
        ({512: 100e3}, {512: 120e3}, "cuda", 1.2, "hardly worth it for Ant: 1.20 times"),
    ],
)
def test_a_gpu_is_worth_it_or_not(cpu, gpu, device, speedup, words):
    advice = advise(cpu=table(cpu), cuda=table(gpu))
    assert advice.device == device and advice.num_envs == max(gpu if device == "cuda" else cpu)
    assert advice.gpu_speedup == pytest.approx(speedup, rel=1e-3)
    assert any(words in reason for reason in advice.reasons)


def test_without_a_gpu_there_is_no_speedup():
    phases = {"simulate": 0.7, "policy": 0.06, "update": 0.2, "log": 0.04}
    advice = advise(cpu=table(PLATEAU, phases=phases), tuned_envs=1024)
    assert advice.gpu_speedup is None
    [about] = [reason for reason in advice.reasons if "GPU" in reason]
    assert about.startswith("no GPU was measured") and "96 % of the time at 1024 envs" in about


def test_unmeasured_devices_are_reported():
    advice = advise(cpu=table({512: 100e3}), cuda=too_much(512))
    assert advice.device == "cpu" and advice.gpu_speedup is None
    assert "the other device could not be measured: num_envs=512 does not fit" in advice.reasons
    advice = advise(cpu=too_much(512))
    assert (advice.device, advice.num_envs) == (None, None)
    assert advice.reasons == ["nothing could be measured: num_envs=512 does not fit"]


def test_a_gpu_that_is_as_fast_within_the_scatter_is_not_recommended():
    cpu = table({512: 100e3}, slowest=80e3, fastest=115e3)
    advice = advise(cpu=cpu, cuda=table({512: 110e3}, slowest=105e3, fastest=112e3))
    assert advice.device == "cpu" and advice.gpu_speedup == pytest.approx(1.1)
    assert any("a GPU is not worth it for Ant: as fast as the CPU" in reason for reason in advice.reasons)


def test_implausible_measurements_are_reported():
    """More envs are not much slower: something else ran."""
    advice = advise(cpu=table({64: 50e3, 128: 90e3, 256: 80e3, 512: 95e3, 1024: 45e3}), tuned_envs=128)
    assert advice.num_envs == 128
    assert advice.reasons[1].startswith("1024 envs on cpu were 53 % slower than 512")
    assert len([reason for reason in advice.reasons if "measure again" in reason]) == 1


def test_measurements_on_shared_cpus_are_reported():
    quiet, shared = table({64: 50e3}), table({128: 60e3, 256: 55e3}, contended=True)
    advice = advise(cpu=quiet | shared, tuned_envs=64)
    assert any("other programs slowed down 128, 256 envs on cpu" in reason for reason in advice.reasons)


def test_a_device_on_which_nothing_leaves_memory_free_is_not_recommended():
    full = table({512: 900e3}, memory_gb=79.0, memory_limit_gb=80.0)
    assert advise(cpu=table({512: 100e3}), cuda=full).device == "cpu"


# Processes and actors


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


def test_efficiency_is_relative_to_the_fewest():
    assert efficiency(table({1: 100.0, 2: 190.0, 4: 200.0})) == pytest.approx({1: 1.0, 2: 0.95, 4: 0.5})
    assert efficiency(failed(1) | table({2: 200.0, 4: 300.0})) == pytest.approx({2: 1.0, 4: 0.75})
    assert efficiency(failed(1)) == {}


def test_more_processes_that_wait_in_sums():
    points = table({1: 10e3, 2: 19e3}) | table({4: 19.2e3}, learner_wait=0.45)
    about, why = reasons(points, "processes")
    assert about.startswith("processes=2: 19,000 env steps/s, 1.90 times as many as 1")
    assert why.startswith("why not 4: 45 % of the time")


def test_more_actors_than_the_learner_can_use():
    few = table({1: 10e3}, learner_wait=0.7, actor_wait=0.02, lag=0.5, lag_limit=8)
    enough = table({4: 30e3}, learner_wait=0.08, actor_wait=0.1, lag=2.0, lag_limit=8)
    many = table({8: 28e3}, learner_wait=0.01, actor_wait=0.5, lag=5.0, lag_limit=8, cpu_percent=98.0)
    about, why = reasons(few | enough | many, "actors")
    assert about.startswith("actors=4: 30,000 env steps/s") and about.endswith("more (up to 8) gain 0 % at most")
    for cause in ("it waits 1 % for rollouts", "actors wait 50 %", "CPUs are busy 98 %", "5.0 updates old"):
        assert cause in why


def test_reasons_say_what_the_numbers_tell_and_no_more():
    [about] = reasons(table({1: 10e3, 2: 9e3}), "actors")
    assert about.startswith("actors=1: 10,000") and about.endswith("more (up to 2) gain 0 % at most")
    [about] = reasons(table({1: 10e3, 2: 20e3}), "processes")
    assert about.endswith("more may be faster")
    found = reasons(table({1: 10e3}) | table({4: 40e3}, lag=6.0, lag_limit=8), "actors")
    assert "with 4 samples are 6.0 updates old on average, of 8 at most" in found[1]


def test_failed_measurements_are_reported():
    assert reasons(failed(1), "actors") == ["nothing could be measured: out of memory"]
    assert "2 could not be measured: out of memory" in reasons(table({1: 1e3}) | failed(2), "actors")
    assert "slowed down 1;" in reasons(table({1: 1e3}, contended=True), "actors")[-1]
