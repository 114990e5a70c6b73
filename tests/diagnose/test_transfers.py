"""The audit: what it counts, how it names it, and what it lets pass."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from gpusim_rl.diagnose import transfers
from gpusim_rl.diagnose.transfers import CHECKPOINT, COUNTED, PHYSICS, TRACED, Audit, Loop
from gpusim_rl.errors import ConfigError
from gpusim_rl.run.phases import OUTSIDE
from gpusim_rl.testing.sync_counter import CopyTotals
from helpers.trace_events import DTOH, HTOD, call, copy, event, kernel, phase
from helpers.training import Faulty, make_trainer

CPU = torch.device("cpu")


# Our training


class Reads(Faulty):
    def rewards(self) -> Any:
        self.last_steps = self.steps.item()  # the line that is to be found
        return super().rewards()


READS_AT = next(n for n, line in enumerate(Path(__file__).read_text().splitlines(), 1) if "to be found" in line)


@pytest.fixture
def audited(tmp_path):
    """Audit a training in which everything is small: `audited("Ant", sim="mujoco")`."""
    with ExitStack() as stack:

        def run(task: Any, **overrides: Any) -> tuple[Any, Audit]:
            trainer = make_trainer(task, tmp_path, max_iterations=100, **overrides)
            log = stack.enter_context(trainer.logging())
            return trainer, transfers.audit(transfers.our_loop(trainer, log), warm_up=1, iterations=2)

        yield run


@pytest.mark.parametrize("sim", ["mujoco", pytest.param("mjwarp", marks=pytest.mark.slow)])
def test_our_training_waits_for_nothing(audited, sim):
    trainer, result = audited("Ant", sim=sim, device="cpu")
    assert trainer.iteration == 3 and result.method == COUNTED
    work = result.work
    assert set(work) == {"rollout", "update", "log", OUTSIDE} | ({PHYSICS} if sim == "mujoco" else set())
    for name in work.keys() - {"log"}:
        assert not work[name].syncs and work[name].to_device == work[name].to_host == CopyTotals()
    assert work["log"].syncs == {"tolist": 2} and work["log"].to_host.count == 2
    assert work["rollout"].operators > 100 and work["update"].operators > 100
    assert transfers.violations(result, rows=2) == []
    first, *rest = transfers.violations(result, rows=1)
    assert first.startswith("log: 2 copies to the host (") and first.endswith("in 2 iterations, 1 allowed")
    assert rest[-1].startswith("log: 2 x tolist at ") and "metrics.py:" in rest[-1]


def test_a_read_in_a_task_is_found_and_named(audited):
    trainer, result = audited(Reads)
    steps = 2 * trainer.algorithm.horizon
    assert transfers.violations(result, rows=2) == [
        f"rollout: {steps} copies to the host ({8 * steps} bytes) in 2 iterations",
        f"rollout: {steps} waits of the host in 2 iterations",
        f"rollout: {steps} x item at tests/diagnose/test_transfers.py:{READS_AT}",
    ]


def test_saving_is_a_phase_of_its_own(tmp_path):
    trainer = make_trainer("Cartpole", tmp_path, max_iterations=100, log={"checkpoint_interval": 1})
    with trainer.logging() as log:
        result = transfers.audit(transfers.our_loop(trainer, log), warm_up=1, iterations=1)
    assert result.work[CHECKPOINT].syncs and transfers.violations(result, rows=1) == []


# CUDA: everything but the device


def trace(*, row: bool = True, warned: bool = False) -> list[dict[str, Any]]:
    """An iteration replayed from graphs, with the row of metrics, or with a read in the rollout."""
    events = [
        phase("iteration", 0, 100),
        phase("rollout", 0, 40),
        phase("update", 40, 80),
        phase("log", 80, 100),
        call("cudaGraphLaunch", 1, 1),
        call("cudaGraphLaunch", 41, 2),
        kernel(5, 40, 1),
        kernel(45, 80, 2),
    ]
    if row:
        events += [call("cudaMemcpyAsync", 81, 3), copy(DTOH, 82, 83, 3, 104), call("cudaEventSynchronize", 90, 4)]
    if warned:
        events += [call("cudaMemcpyAsync", 10, 5), copy(HTOD, 11, 12, 5, 8), call("cudaStreamSynchronize", 12, 6)]
        events += [event("python_function", "tasks/ant.py(80): rewards", 9, 20)]
    return events


class FakeDevice:
    """A loop whose traces are given, and whose iterations warn as torch does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, events: list[dict[str, Any]], *, warned: bool = False) -> None:
        self.around: list[Callable[[str], AbstractContextManager[Any]]] = []
        self.modes: list[str] = []
        self.warns = warned
        monkeypatch.setattr(transfers, "_trace", lambda loop, iterations, stacks=False: events)
        monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", self.modes.append)
        self.loop = Loop(torch.device("cuda"), self.iterate, self.around.append)

    def iterate(self) -> None:
        with ExitStack() as stack:
            for around in self.around:
                stack.enter_context(around("policy"))
            if self.warns and self.modes[-1:] == ["warn"]:
                warnings.warn("called a synchronizing CUDA operation (Triggered internally at ...)", stacklevel=1)


def test_on_cuda_the_row_of_metrics_may_leave(monkeypatch):
    fake = FakeDevice(monkeypatch, trace())
    result = transfers.audit(fake.loop, warm_up=1, iterations=1)
    assert result.method == TRACED and fake.modes == ["warn", "default"]
    assert transfers.violations(result, rows=1) == []
    assert transfers.violations(result, rows=0)[0] == "log: 1 copies to the host (104 bytes) in 1 iterations"
    phases = result.as_dict()["phases"]
    assert phases["rollout"]["busy"] == pytest.approx(35 / 40) == phases["rollout"]["occupied"]
    assert phases["rollout"]["launches"] == 1
    assert "operators" not in phases["rollout"]


def test_on_cuda_violations_are_named_by_line_and_by_function(monkeypatch):
    fake = FakeDevice(monkeypatch, trace(warned=True), warned=True)
    lines = transfers.violations(transfers.audit(fake.loop, warm_up=0, iterations=1), rows=1)
    assert lines[:2] == [
        "rollout: 1 copies to the device (8 bytes) in 1 iterations",
        "rollout: 1 waits of the host in 1 iterations",
    ]
    assert any("rollout: 1 x sync at tests/diagnose/test_transfers.py:" in line for line in lines)
    assert f"rollout: 1 x {HTOD} at tasks/ant.py:80 (in rewards)" in lines


def test_a_wait_that_only_torch_tells_of_is_a_violation(monkeypatch):
    fake = FakeDevice(monkeypatch, trace(), warned=True)
    [line, place] = transfers.violations(transfers.audit(fake.loop, warm_up=0, iterations=1), rows=1)
    assert (
        line == "rollout: 1 waits of the host in 1 iterations" and "sync at tests/diagnose/test_transfers.py:" in place
    )


def test_a_profiler_without_kernels_is_an_error(monkeypatch):
    fake = FakeDevice(monkeypatch, [phase("iteration", 0, 1)])
    with pytest.raises(ConfigError, match="the profiler saw no kernel"):
        transfers.audit(fake.loop, warm_up=0, iterations=1)


def test_real_traces_have_our_phases(tmp_path):
    """The profiler itself, on the CPU: our ranges come back as phases."""
    trainer = make_trainer("Cartpole", tmp_path, max_iterations=100)
    with trainer.logging() as log:
        loop = transfers.our_loop(trainer, log)
        loop.observe(transfers.phase_range)
        events = transfers._trace(loop, 1, stacks=True)
    work = transfers.read_events(events).work
    assert {"rollout", "update", "log", OUTSIDE, PHYSICS} == set(work)
    names = [found["name"] for found in events if found.get("cat") == "python_function"]
    assert any("gpusim_rl/learn/ppo.py(" in name and name.endswith(": update") for name in names)
