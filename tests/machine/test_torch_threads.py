"""Tests of the limit on torch's threads for small batches."""

from __future__ import annotations

import pytest
import torch

import gpusim_rl
from gpusim_rl.machine.torch_threads import SMALL_ROWS, limit_torch_threads

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def four_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("rows", "threads"), [(1, 1), (SMALL_ROWS, 1), (2 * SMALL_ROWS, 2), (99 * SMALL_ROWS, 4)])
def test_thread_count_follows_the_number_of_rows(rows, threads):
    with limit_torch_threads(rows, CPU):
        assert torch.get_num_threads() == threads
    assert torch.get_num_threads() == 4


def test_error_restores_the_thread_count():
    with pytest.raises(KeyError), limit_torch_threads(1, CPU):
        raise KeyError
    assert torch.get_num_threads() == 4


def test_nested_block_never_raises_the_thread_count():
    with limit_torch_threads(2 * SMALL_ROWS, CPU), limit_torch_threads(3 * SMALL_ROWS, CPU):
        assert torch.get_num_threads() == 2


def test_thread_count_is_unchanged_on_other_devices():
    with limit_torch_threads(1, torch.device("meta")):
        assert torch.get_num_threads() == 4


def test_step_of_few_envs_uses_one_thread(monkeypatch):
    env = gpusim_rl.make_env("Cartpole", num_envs=8, device="cpu", seed=0)
    torch.set_num_threads(4)  # make_env sets the number of CPUs
    env.reset()
    seen = []
    observe = env.task.observe
    monkeypatch.setattr(env.task, "observe", lambda: seen.append(torch.get_num_threads()) or observe())
    env.step(torch.zeros(8, 1))
    assert set(seen) == {1} and torch.get_num_threads() == 4
