"""Chunked minibatches: same gradient, bit-identical for any thread timing."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from gpusim_rl.learn import gradient_steps as chunks
from gpusim_rl.learn.gradient_steps import Chunks
from gpusim_rl.testing.sync_counter import SyncCounter
from test_ppo import learner, run_alone

CPU = torch.device("cpu")


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_chunk_sum_covers_all_indices_in_order(two_threads: None) -> None:
    seen: dict[int, str] = {}
    both = threading.Barrier(2)

    def function(index: Tensor) -> list[Tensor]:
        seen[int(index[0])] = threading.current_thread().name
        if int(index[0]) < 4:
            both.wait(timeout=30)  # passes only if two chunks run at the same time
        return [index.sum(), index.float().square().sum()]

    total = Chunks(CPU, 2).sum(function, torch.arange(9))
    assert [float(x) for x in total] == [36.0, 204.0]
    assert torch.get_num_threads() == 2
    assert sorted(seen) == [0, 2, 4, 6, 8]
    assert len(set(seen.values())) == 2


@pytest.mark.parametrize(("device", "size"), [("cpu", 9), ("meta", 2)])
def test_single_chunk_runs_in_calling_thread(two_threads: None, device: str, size: int) -> None:
    """Devices other than the CPU always use one chunk."""
    names = []
    chunks = Chunks(torch.device(device), size)
    chunks.sum(lambda index: (names.append(threading.current_thread().name), [index])[1], torch.arange(9))
    assert names == [threading.main_thread().name]


def test_sync_counter_counts_operations_of_worker_threads(two_threads: None) -> None:
    with SyncCounter() as syncs:
        Chunks(CPU, 2).sum(lambda index: [index.nonzero().sum()], torch.arange(6))
    assert syncs.total == 3


def test_error_in_a_chunk_is_raised(two_threads: None) -> None:
    def function(index: Tensor) -> list[Tensor]:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        Chunks(CPU, 2).sum(function, torch.arange(6))


def test_first_chunks_of_compiled_function_share_a_thread(two_threads: None) -> None:
    seen: list[str] = []
    both = threading.Barrier(2)

    def function(index: Tensor) -> list[Tensor]:
        seen.append(threading.current_thread().name)
        if len(seen) > 3:
            both.wait(timeout=30)
        return [index.sum()]

    compiled = Chunks(CPU, 2, compiled=True)
    for length in (6, 4):
        assert compiled.sum(function, torch.arange(length)) == [length * (length - 1) // 2]
    assert [len(set(names)) for names in (seen[:3], seen[3:])] == [1, 2]
    assert threading.main_thread().name not in seen


@pytest.mark.slow
def test_compiled_chunks_run_in_parallel_and_compile_once() -> None:
    script = """
import threading
import torch
from torch._dynamo.utils import counters
from gpusim_rl.learn import gradient_steps as chunks
from test_ppo import learner

torch.set_num_threads(2)
chunks.CPU_CHUNK = 8
trained = []
for workers in (1, 2):
    chunks.most_workers = lambda: workers
    it = learner("feed-forward", compile=True)
    it.train(1)
    compiled, loss, together = counters["frames"].copy(), it.ppo._loss, threading.Barrier(workers)
    names = set()

    def meeting(*args):
        names.add(threading.current_thread().name)
        together.wait(timeout=30)  # passes only if all workers run a chunk at the same time
        return loss(*args)

    it.ppo._loss = meeting
    it.train(2)
    assert counters["frames"] == compiled and compiled["ok"] > 0, counters["frames"]
    assert len(names) == workers and threading.main_thread().name not in names
    trained.append([*it.policy.parameters()])
assert all(map(torch.equal, *trained))
"""
    run_alone(script)


@pytest.mark.parametrize("kind", ["feed-forward", pytest.param("lstm", marks=pytest.mark.slow)])
def test_chunked_gradient_equals_full_gradient(kind: str, monkeypatch: Any, two_threads: None) -> None:
    def trained(chunk: int, workers: int) -> Any:
        monkeypatch.setattr(chunks, "CPU_CHUNK", chunk)
        monkeypatch.setattr(chunks, "most_workers", lambda: workers)
        it = learner(kind)
        it.train(2)
        return it

    whole, shared, alone = trained(10_000, 2), trained(8, 2), trained(8, 1)
    for name, value in whole.policy.state_dict().items():
        other = shared.policy.state_dict()[name]
        torch.testing.assert_close(other, value, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
        assert torch.equal(other, alone.policy.state_dict()[name]), "result depends on the number of workers"
