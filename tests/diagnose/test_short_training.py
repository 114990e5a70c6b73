"""Measurement of short trainings, which leave no files or processes."""

from __future__ import annotations

import sys

import psutil
import pytest

from gpusim_rl.diagnose.short_training import _failure, measure_training
from gpusim_rl.machine.child import Child

SMALL = ("task=Cartpole", "device=cpu", "num_envs=16", "ppo.horizon=8")


@pytest.fixture(autouse=True)
def no_leftovers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield
    left = [path.name for path in tmp_path.iterdir() if not path.name.startswith("torchinductor_")]  # torch's cache
    assert left == []
    assert not [child for child in psutil.Process().children() if "train.py" in " ".join(child.cmdline())]


@pytest.mark.slow
def test_training_is_stopped_after_enough_rows():
    result = measure_training(SMALL, warm_up=2, iterations=3)
    assert result.error is None
    assert result.iterations >= 3 and 0 < result.slowest <= result.env_steps_per_s <= result.fastest
    assert result.lag is None and result.learner_wait is None


def test_training_errors_are_passed_on():
    error = measure_training([*SMALL, "num_envs=-1"], warm_up=1, iterations=1).error
    assert error is not None and "num_envs" in error and "\n" not in error and not error.startswith("error")


def test_training_is_ended_after_timeout():
    assert str(measure_training(SMALL, warm_up=1, iterations=10**9, timeout_s=1.0).error).endswith(" 1 s")


@pytest.mark.slow
def test_processes_of_torchrun_are_measured_together():
    result = measure_training([*SMALL, "multi_gpu=true"], processes=2, warm_up=2, iterations=3)
    assert result.error is None and result.learner_wait is not None and 0 < result.learner_wait < 1
    error = measure_training([*SMALL, "multi_gpu=true", "algo=dqn"], processes=2, warm_up=1, iterations=1).error
    assert error is not None and "\n" not in error


def test_crash_is_reported_in_one_line():
    def failure(code: str) -> str:
        with Child([sys.executable, "-c", code]) as training:
            training.process.wait()
            return _failure(training)

    assert failure("import os; os.kill(os.getpid(), 9)").startswith("SIGKILL: ")
    assert failure("import sys; sys.exit('Traceback\\n\\nOSError: gone')") == "OSError: gone"
    assert failure("print('error: first'); print('torchrun: failed'); 1 / 0") == "first"
    assert failure("import sys; sys.exit(3)") == "exit status 3"
