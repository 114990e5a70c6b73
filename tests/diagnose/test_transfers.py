"""Transfer audit: counts, locations and allowed transfers."""

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


# Training


class Reads(Faulty):
    def rewards(self) -> Any:
        self.last_steps = self.steps.item()  # expected location
        return super().rewards()


READS_AT = next(n for n, line in enumerate(Path(__file__).read_text().splitlines(), 1) if "# expected location" in line)


@pytest.fixture
def audited(tmp_path):
    """Audit a small training: `audited("Ant", sim="mujoco")`."""
    with ExitStack() as stack:

        def run(task: Any, **overrides: Any) -> tuple[Any, Audit]:
            trainer = make_trainer(task, tmp_path, max_iterations=100, **overrides)
            log = stack.enter_context(trainer.logging())
            return trainer, transfers.audit(transfers.our_loop(trainer, log), warm_up=1, iterations=2)

        yield run


@pytest.mark.parametrize("sim", ["mujoco", pytest.param("mjwarp", marks=pytest.mark.slow)])
def test_training_has_no_syncs_outside_logging(audited, sim):
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
    assert first.startswith("log: 2 copies ") and first.endswith(", 1 allowed")
    assert rest[-1].startswith("log: 2 x tolist ") and "metrics.py:" in rest[-1]


def test_sync_in_task_is_found_by_line(audited):
    trainer, result = audited(Reads)
    steps = 2 * trainer.algorithm.horizon
    copies, syncs, place = transfers.violations(result, rows=2)
    assert copies.startswith(f"rollout: {steps} copies ") and f"({8 * steps} bytes)" in copies
    assert syncs.startswith(f"rollout: {steps} host syncs ")
    assert place == f"rollout: {steps} x item at tests/diagnose/test_transfers.py:{READS_AT}"


def test_checkpoint_is_separate_phase(tmp_path):
    trainer = make_trainer("Cartpole", tmp_path, max_iterations=100, log={"checkpoint_interval": 1})
    with trainer.logging() as log:
        result = transfers.audit(transfers.our_loop(trainer, log), warm_up=1, iterations=1)
    assert result.work[CHECKPOINT].syncs and transfers.violations(result, rows=1) == []


# CUDA, without a device


def trace(*, row: bool = True, warned: bool = False) -> list[dict[str, Any]]:
    """Build the trace of an iteration replayed from graphs, with a row of metrics or a sync in the rollout."""
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
    """Loop with given traces whose iterations emit torch's sync warning."""

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


def test_copy_of_metrics_row_is_allowed_on_cuda(monkeypatch):
    fake = FakeDevice(monkeypatch, trace())
    result = transfers.audit(fake.loop, warm_up=1, iterations=1)
    assert result.method == TRACED and fake.modes == ["warn", "default"]
    assert transfers.violations(result, rows=1) == []
    assert transfers.violations(result, rows=0)[0].startswith("log: 1 copies to the host (104 bytes)")
    phases = result.as_dict()["phases"]
    assert phases["rollout"]["busy"] == pytest.approx(35 / 40) == phases["rollout"]["occupied"]
    assert phases["rollout"]["launches"] == 1 and "operators" not in phases["rollout"]


def test_cuda_violations_name_line_and_function(monkeypatch):
    fake = FakeDevice(monkeypatch, trace(warned=True), warned=True)
    lines = transfers.violations(transfers.audit(fake.loop, warm_up=0, iterations=1), rows=1)
    assert lines[0].startswith("rollout: 1 copies to the device (8 bytes)")
    assert lines[1].startswith("rollout: 1 host syncs ")
    assert any("1 x sync at tests/diagnose/test_transfers.py:" in line for line in lines)
    assert f"rollout: 1 x {HTOD} at tasks/ant.py:80 (in rewards)" in lines


def test_sync_warned_by_torch_alone_is_violation(monkeypatch):
    fake = FakeDevice(monkeypatch, trace(), warned=True)
    [line, place] = transfers.violations(transfers.audit(fake.loop, warm_up=0, iterations=1), rows=1)
    assert line.startswith("rollout: 1 host syncs ") and "sync at tests/diagnose/test_transfers.py:" in place


def test_trace_without_kernels_is_an_error(monkeypatch):
    fake = FakeDevice(monkeypatch, [phase("iteration", 0, 1)])
    with pytest.raises(ConfigError, match="no kernel"):
        transfers.audit(fake.loop, warm_up=0, iterations=1)


def test_real_trace_has_expected_phases(tmp_path):
    """Profile on the CPU: the ranges become phases."""
    trainer = make_trainer("Cartpole", tmp_path, max_iterations=100)
    with trainer.logging() as log:
        loop = transfers.our_loop(trainer, log)
        loop.observe(transfers.phase_range)
        events = transfers._trace(loop, 1, stacks=True)
    work = transfers.read_events(events).work
    assert {"rollout", "update", "log", OUTSIDE, PHYSICS} == set(work)
    names = [found["name"] for found in events if found.get("cat") == "python_function"]
    assert any("gpusim_rl/learn/ppo.py(" in name and name.endswith(": update") for name in names)
