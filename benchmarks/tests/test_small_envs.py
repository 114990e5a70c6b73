"""The measurement of small envs beside Stable-Baselines3: the cases, ratios of known times, and one real case."""

from __future__ import annotations

import io
import json

import pytest

import small_envs
from small_envs import Case

CASE = Case("dqn", "CartPole-v1", 8, 64)


class FakeProcess:
    """A training that takes known CPU seconds: 1 until it is steady, then those of its library, one after the other."""

    def __init__(self, command, **_):
        self.answers = iter([1.0, 1.0, 1.0, 2.0, 3.0] if command[3] == "gpusim_rl" else [1.0, 2.0, 2.0, 2.0, 2.0])
        self.stdin, self.stdout = io.StringIO(), self

    def readline(self):
        return json.dumps(next(self.answers))

    def wait(self, timeout):
        pass


def test_a_ratio_is_the_median_of_those_within_the_rounds(monkeypatch):
    monkeypatch.setattr(small_envs.subprocess, "Popen", FakeProcess)
    found = small_envs.measure(CASE, 3, seconds=1.0, core=0)
    assert found["ratio"] == {"median": 1.0, "min": 0.5, "max": 1.5}
    assert found["env_steps_of_a_round"] == 8 * 8 * 32
    assert found["cpu_us_per_env_step"] == {"gpusim_rl": 976.56, "stable_baselines3": 976.56}
    assert found["cpu_s_until_steady"] == {"gpusim_rl": 1.0, "stable_baselines3": 1.0}


def test_rollouts_have_the_same_samples_at_any_number_of_envs():
    assert {case.horizon * case.num_envs for case in small_envs.CASES if case.algo == "ppo"} == {2048}
    assert {(case.algo, case.num_envs) for case in small_envs.CASES} == {
        (algo, envs) for algo in ("ppo", "sac", "dqn") for envs in (1, 8, 16)
    }


@pytest.mark.slow
def test_both_libraries_train():
    pytest.importorskip("stable_baselines3")
    found = small_envs.measure(CASE, 1, seconds=0.1, core=min(small_envs.os.sched_getaffinity(0)))
    assert found["ratio"]["median"] > 0.0 and min(found["cpu_us_per_env_step"].values()) > 0.0
