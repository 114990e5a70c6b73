"""A short training is measured as a user would start it, and leaves nothing."""

from __future__ import annotations

import psutil
import pytest

from gpusim_rl.diagnose.short_training import _failure, measure_training

SMALL = ("task=Cartpole", "device=cpu", "num_envs=16", "ppo.horizon=8")


@pytest.fixture(autouse=True)
def an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield
    left = [path.name for path in tmp_path.iterdir() if not path.name.startswith("torchinductor_")]
    assert left == []  # but for torch's cache
    assert not [child for child in psutil.Process().children() if "train.py" in " ".join(child.cmdline())]


@pytest.mark.slow
def test_a_training_is_stopped_when_it_has_rows_enough():
    result = measure_training(SMALL, warm_up=2, iterations=3)
    assert result.error is None
    assert result.iterations >= 3 and 0 < result.slowest <= result.env_steps_per_s <= result.fastest
    assert result.lag is None and result.learner_wait is None


def test_what_train_says_is_why_nothing_was_measured():
    error = measure_training([*SMALL, "num_envs=-1"], warm_up=1, iterations=1).error
    assert error is not None and "num_envs" in error and "\n" not in error and not error.startswith("error")


def test_a_training_that_takes_too_long_is_ended():
    assert measure_training(SMALL, warm_up=1, iterations=10**9, timeout_s=1.0).error == "took longer than 1 s"


@pytest.mark.slow
def test_processes_of_torchrun_are_measured_together():
    result = measure_training([*SMALL, "multi_gpu=true"], processes=2, warm_up=2, iterations=3)
    assert result.error is None and result.learner_wait is not None and 0 < result.learner_wait < 1
    error = measure_training([*SMALL, "multi_gpu=true", "algo=dqn"], processes=2, warm_up=1, iterations=1).error
    assert error is not None and "\n" not in error


def test_a_training_that_dies_is_one_line():
    assert _failure(-9, "") == "ended by signal 9: out of memory?"
    assert _failure(1, "Traceback\n\nOSError: gone\n") == "OSError: gone"
    assert _failure(3, "") == "ended with exit code 3"
