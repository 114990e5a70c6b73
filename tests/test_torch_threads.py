"""Threads of torch for small work: fewer in the block, as before after it."""

from __future__ import annotations

import pytest
import torch

import gpusim_rl
from gpusim_rl.torch_threads import SMALL_ROWS, limit_torch_threads

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def four_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("rows", "threads"), [(1, 1), (SMALL_ROWS, 1), (2 * SMALL_ROWS, 2), (99 * SMALL_ROWS, 4)])
def test_as_many_as_the_rows_keep_busy(rows, threads):
    with limit_torch_threads(rows, CPU):
        assert torch.get_num_threads() == threads
    assert torch.get_num_threads() == 4


def test_an_error_leaves_them_as_they_were():
    with pytest.raises(KeyError), limit_torch_threads(1, CPU):
        raise KeyError
    assert torch.get_num_threads() == 4


def test_inside_of_few_there_are_no_more():
    with limit_torch_threads(2 * SMALL_ROWS, CPU), limit_torch_threads(3 * SMALL_ROWS, CPU):
        assert torch.get_num_threads() == 2


def test_on_another_device_nothing_changes():
    with limit_torch_threads(1, torch.device("meta")):
        assert torch.get_num_threads() == 4


def test_a_step_of_few_worlds_takes_one(monkeypatch):
    env = gpusim_rl.make_env("Cartpole", num_envs=8, device="cpu", seed=0)
    torch.set_num_threads(4)  # make_env takes what the machine has
    env.reset()
    seen = []
    observe = env.task.observe
    monkeypatch.setattr(env.task, "observe", lambda: seen.append(torch.get_num_threads()) or observe())
    env.step(torch.zeros(8, 1))
    assert set(seen) == {1} and torch.get_num_threads() == 4
