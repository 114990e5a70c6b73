"""Recommendations from measurements: knees, plateaus, memory limits, devices, and their reasons."""

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
    """Build measurements by number of envs, processes or actors."""
    return {
        num_envs: Measurement(env_steps_per_s=speed, step_ms=1000 * num_envs / speed, **common)
        for num_envs, speed in speeds.items()
    }


def out_of_memory(num_envs: int) -> dict[int, Measurement]:
    return {num_envs: Measurement(error=f"num_envs={num_envs} does not fit")}


def advise(tuned_envs: int = 4096, **devices: Points) -> Recommendation:
    return recommend(devices, task="Ant", tuned_envs=tuned_envs)


PLATEAU = {64: 10e3, 256: 30e3, 1024: 46e3, 4096: 49e3, 16384: 50e3}


def test_gain_per_doubling():
    points = table({64: 100.0, 128: 110.0, 256: 400.0})
    assert gain_per_doubling(points, 64, 256) == pytest.approx(1.0)  # twice as fast per doubling
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
def test_knee_of_throughput_curve(speeds, num_envs):
    points = table(speeds)
    assert knee(points) == knee(dict(reversed(points.items()))) == num_envs


def test_num_envs_that_fills_memory_is_not_recommended():
    fits = table({1024: 100e3, 4096: 300e3}, memory_gb=10.0, memory_limit_gb=80.0)
    full = table({16384: 900e3}, memory_gb=75.0, memory_limit_gb=80.0)
    advice = advise(cuda=fits | full)
    assert (advice.device, advice.num_envs) == ("cuda", 4096) and "75.0 of 80.0 GB" in advice.reasons[0]
    advice = advise(cuda=fits | out_of_memory(16384))
    assert advice.num_envs == 4096 and "num_envs=16384" in advice.reasons[0]


def test_plateau_is_reported_with_gain_of_more_envs():
    advice = advise(cpu=table(PLATEAU), tuned_envs=1024)
    assert advice.num_envs == 1024
    assert "46,000 env steps/s" in advice.reasons[0] and "3 % per doubling" in advice.reasons[0]
    assert not any("tuned" in reason for reason in advice.reasons)


def test_growth_at_end_of_table_suggests_more_measurements():
    [first, *_] = advise(cpu=table({64: 100.0, 128: 190.0, 256: 360.0})).reasons
    assert "89 % more per doubling" in first and "--num-envs" in first


@pytest.mark.parametrize(
    ("cpu", "gpu", "device", "speedup", "words"),
    [
        ({1024: 46e3}, {4096: 300e3, 16384: 812e3}, "cuda", 17.65, "17.7 times"),
        ({64: 60e3, 512: 200e3}, {64: 4e3, 512: 30e3}, "cpu", 0.15, "6.7 times"),
        ({512: 100e3}, {512: 120e3}, "cuda", 1.2, "1.20 times"),
    ],
)
def test_gpu_speedup_decides_recommended_device(cpu, gpu, device, speedup, words):
    advice = advise(cpu=table(cpu), cuda=table(gpu))
    assert advice.device == device and advice.num_envs == max(gpu if device == "cuda" else cpu)
    assert advice.gpu_speedup == pytest.approx(speedup, rel=1e-3)
    assert any(words in reason for reason in advice.reasons)


def test_no_speedup_without_gpu():
    phases = {"simulate": 0.7, "policy": 0.06, "update": 0.2, "log": 0.04}
    advice = advise(cpu=table(PLATEAU, phases=phases), tuned_envs=1024)
    assert advice.gpu_speedup is None
    [about] = [reason for reason in advice.reasons if "GPU" in reason]
    assert "96 % " in about and "1024 envs" in about


def test_unmeasured_devices_are_reported():
    advice = advise(cpu=table({512: 100e3}), cuda=out_of_memory(512))
    assert advice.device == "cpu" and advice.gpu_speedup is None
    assert any("could not be measured: num_envs=512" in reason for reason in advice.reasons)
    advice = advise(cpu=out_of_memory(512))
    assert (advice.device, advice.num_envs) == (None, None)
    assert len(advice.reasons) == 1 and "num_envs=512" in advice.reasons[0]


def test_gpu_within_measurement_noise_is_not_recommended():
    cpu = table({512: 100e3}, slowest=80e3, fastest=115e3)
    advice = advise(cpu=cpu, cuda=table({512: 110e3}, slowest=105e3, fastest=112e3))
    assert advice.device == "cpu" and advice.gpu_speedup == pytest.approx(1.1)
    assert any("not worth it" in reason for reason in advice.reasons)


def test_implausible_measurements_are_reported():
    """Much slower with more envs means that other programs ran."""
    advice = advise(cpu=table({64: 50e3, 128: 90e3, 256: 80e3, 512: 95e3, 1024: 45e3}), tuned_envs=128)
    assert advice.num_envs == 128
    assert advice.reasons[1].startswith("1024 envs ") and "53 %" in advice.reasons[1]
    assert len([reason for reason in advice.reasons if "measure again" in reason]) == 1


def test_measurements_on_shared_cpus_are_reported():
    quiet, shared = table({64: 50e3}), table({128: 60e3, 256: 55e3}, contended=True)
    advice = advise(cpu=quiet | shared, tuned_envs=64)
    assert any("128, 256 envs on cpu" in reason for reason in advice.reasons)


def test_device_with_full_memory_is_not_recommended():
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
        ({1: 100.0, 2: 190.0, 4: 199.0, 8: 195.0}, 2),  # within 5 % of the best
        ({1: 100.0, 2: 188.0, 4: 199.0}, 4),
        ({1: 100.0, 2: 90.0}, 1),
    ],
)
def test_useful_count_is_smallest_within_noise_of_best(speeds, count):
    for points in (table(speeds), dict(reversed(table(speeds).items()))):
        assert useful(points | failed(16)) == count


def test_efficiency_is_relative_to_smallest_count():
    assert efficiency(table({1: 100.0, 2: 190.0, 4: 200.0})) == pytest.approx({1: 1.0, 2: 0.95, 4: 0.5})
    assert efficiency(failed(1) | table({2: 200.0, 4: 300.0})) == pytest.approx({2: 1.0, 4: 0.75})
    assert efficiency(failed(1)) == {}


def test_time_in_sums_limits_processes():
    points = table({1: 10e3, 2: 19e3}) | table({4: 19.2e3}, learner_wait=0.45)
    about, why = reasons(points, "processes")
    assert about.startswith("processes=2: 19,000 env steps/s, 1.90 times")
    assert why.startswith("why not 4: 45 %")


def test_learner_limits_number_of_actors():
    few = table({1: 10e3}, learner_wait=0.7, actor_wait=0.02, lag=0.5, lag_limit=8)
    enough = table({4: 30e3}, learner_wait=0.08, actor_wait=0.1, lag=2.0, lag_limit=8)
    many = table({8: 28e3}, learner_wait=0.01, actor_wait=0.5, lag=5.0, lag_limit=8, cpu_percent=98.0)
    about, why = reasons(few | enough | many, "actors")
    assert about.startswith("actors=4: 30,000 env steps/s") and "(up to 8) gain at most 0 %" in about
    for cause in ("it waits 1 % for rollouts", "actors wait 50 %", "CPUs are 98 % busy", "5.0 updates old"):
        assert cause in why


def test_reasons_cover_only_measured_causes():
    [about] = reasons(table({1: 10e3, 2: 9e3}), "actors")
    assert about.startswith("actors=1: 10,000") and "(up to 2) gain at most 0 %" in about
    [about] = reasons(table({1: 10e3, 2: 20e3}), "processes")
    assert about.endswith("may be faster")
    found = reasons(table({1: 10e3}) | table({4: 40e3}, lag=6.0, lag_limit=8), "actors")
    assert "6.0 updates old" in found[1]


def test_failed_measurements_are_reported():
    assert [reason.endswith(": out of memory") for reason in reasons(failed(1), "actors")] == [True]
    assert any(reason.startswith("2 could not") for reason in reasons(table({1: 1e3}) | failed(2), "actors"))
    assert "slowed down 1;" in reasons(table({1: 1e3}, contended=True), "actors")[-1]
