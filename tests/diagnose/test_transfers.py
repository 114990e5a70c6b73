"""The audit: what it counts, how it names it, and what it lets pass."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gpusim_rl.diagnose.transfers import CHECKPOINT, COUNTED, PHYSICS, TRACED, Audit, Loop, Place, SyncCounter
from gpusim_rl.errors import ConfigError
from gpusim_rl.run import audit
from gpusim_rl.run.logger import Logger
from gpusim_rl.run.profile import OUTSIDE, Copies, Work
from helpers.training import Faulty, make_trainer
from test_profile import DTOH, HTOD, call, copy, event, kernel, phase

CPU = torch.device("cpu")


# The counter


def test_every_phase_has_its_own_numbers():
    x = torch.ones(3)
    with SyncCounter() as syncs:
        with syncs.around("simulate"):
            (x + 1).sum().item()
            with syncs.around("inner"):
                x * 2
        with syncs.around("policy"):
            x.view(3, 1)[:, 0].add_(1)  # views are no work of the device
        x.tolist()
    assert {name: (work.operators, dict(work.syncs)) for name, work in syncs.work.items()} == {
        "rollout": (3, {"item": 1}),
        "inner": (1, {}),
        OUTSIDE: (0, {"tolist": 1}),
    }
    assert [place.phase for place in syncs.found] == ["rollout", OUTSIDE]


BYTES: dict[str, tuple[Callable[[Tensor], object], tuple[int, int], tuple[int, int]]] = {
    "item": (lambda x: x.sum().item(), (0, 0), (1, 4)),
    "float": (lambda x: float(x.sum()), (0, 0), (1, 4)),
    "if": (lambda x: 1 if x.any() else 0, (0, 0), (1, 1)),
    "cpu": (lambda x: x.cpu(), (0, 0), (1, 24)),
    "numpy": (lambda x: x.numpy(), (0, 0), (1, 24)),
    "tolist": (lambda x: x.double().tolist(), (0, 0), (1, 48)),
    "nonzero": (lambda x: x.nonzero(), (0, 0), (1, 8)),
    "tensor": (lambda x: torch.tensor([1.0, 2.0]), (1, 8), (0, 0)),
    "as_tensor": (lambda x: torch.as_tensor(np.zeros(3)), (1, 24), (0, 0)),
    "to another device": (lambda x: x.to("meta"), (1, 24), (0, 0)),
    "from another device": (lambda x: torch.zeros(2, 3).copy_(torch.zeros(3, device="meta")), (0, 0), (1, 12)),
    "cpu, then numpy": (lambda x: x.cpu().numpy(), (0, 0), (1, 24)),
    "cpu, then a view": (lambda x: x.cpu().detach()[0].numpy().tolist(), (0, 0), (1, 24)),
    "cpu of two": (lambda x: (x.cpu(), x.sum().cpu())[0].sum().item(), (0, 0), (3, 32)),
    "without data": (lambda x: x + 1, (0, 0), (0, 0)),
}


@pytest.mark.parametrize("name", BYTES)
def test_copies_have_a_direction_and_a_size(name):
    copies, to_device, to_host = BYTES[name]
    x = torch.arange(6.0).reshape(2, 3)
    with SyncCounter() as syncs, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            copies(x)
        except NotImplementedError:  # the device "meta" has nothing to copy
            assert name == "from another device"
    [work] = syncs.work.values() if syncs.work else [Work()]
    assert (work.to_device, work.to_host) == (Copies(*to_device), Copies(*to_host))
    assert syncs.total == to_device[0] + to_host[0]


def test_a_librarys_own_line_is_named(tmp_path, monkeypatch):
    package = tmp_path / "peerlib" / "torch"  # as some libraries name the half of them that is for torch
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("def learn(step, x):\n    step(x)\n    return x.sum().item()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import peerlib.torch as peer  # type: ignore[import-not-found]

    def ours(x: Tensor) -> None:
        x.tolist()

    for library, lines in (("peerlib", (2, 3)), (None, ("test_audit", 3))):
        with SyncCounter(library) as syncs:
            peer.learn(ours, torch.ones(2))
        first, second = syncs.places
        assert second.endswith("peerlib/torch/__init__.py:3")
        assert (f"peerlib/torch/__init__.py:{lines[0]}" if library else "test_audit.py") in first


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
            log = stack.enter_context(Logger(trainer, trainer.run_dir()))
            return trainer, audit.audit(audit.our_loop(trainer, log), warm_up=1, iterations=2)

        yield run


@pytest.mark.parametrize("sim", ["mujoco", "mjwarp"])
def test_our_training_waits_for_nothing(audited, sim):
    trainer, result = audited("Ant", sim=sim, device="cpu")
    assert trainer.iteration == 3 and result.method == COUNTED
    work = result.work
    assert set(work) == {"rollout", "update", "log", OUTSIDE} | ({PHYSICS} if sim == "mujoco" else set())
    for name in work.keys() - {"log"}:
        assert not work[name].syncs and work[name].to_device == work[name].to_host == Copies()
    assert work["log"].syncs == {"tolist": 2} and work["log"].to_host.count == 2
    assert work["rollout"].operators > 100 and work["update"].operators > 100
    assert audit.violations(result, rows=2) == []
    first, *rest = audit.violations(result, rows=1)
    assert first.startswith("log: 2 copies to the host (") and first.endswith("in 2 iterations, 1 allowed")
    assert rest[-1].startswith("log: 2 x tolist at ") and "metrics.py:" in rest[-1]


def test_a_read_in_a_task_is_found_and_named(audited):
    trainer, result = audited(Reads)
    steps = 2 * trainer.cfg.ppo.horizon
    assert audit.violations(result, rows=2) == [
        f"rollout: {steps} copies to the host ({8 * steps} bytes) in 2 iterations",
        f"rollout: {steps} waits of the host in 2 iterations",
        f"rollout: {steps} x item at tests/run/test_audit.py:{READS_AT}",
    ]


def test_saving_is_a_phase_of_its_own(tmp_path):
    trainer = make_trainer("Cartpole", tmp_path, max_iterations=100, log={"checkpoint_interval": 1})
    with Logger(trainer, trainer.run_dir()) as log:
        result = audit.audit(audit.our_loop(trainer, log), warm_up=1, iterations=1)
    assert result.work[CHECKPOINT].syncs and audit.violations(result, rows=1) == []


def test_the_update_runs_without_data(tmp_path):
    assert audit.update_without_data(make_trainer("Cartpole", tmp_path)) is None
    assert audit.update_without_data(make_trainer("Cartpole", tmp_path, ppo={"network": {"rnn": "gru"}})) is None


def test_an_update_that_reads_data_says_where(tmp_path, monkeypatch):
    trainer = make_trainer("Cartpole", tmp_path)
    update = audit.PPO.update

    def reads(self: Any, *args: Any) -> Any:
        stats = update(self, *args)
        float(stats["loss/value"])
        return stats

    monkeypatch.setattr(audit.PPO, "update", reads)
    problem = audit.update_without_data(trainer)
    assert problem is not None and "test_audit.py:" in problem and "\n" not in problem


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
        monkeypatch.setattr(audit, "_trace", lambda loop, iterations, stacks=False: events)
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
    result = audit.audit(fake.loop, warm_up=1, iterations=1)
    assert result.method == TRACED and fake.modes == ["warn", "default"]
    assert audit.violations(result, rows=1) == []
    assert audit.violations(result, rows=0)[0] == "log: 1 copies to the host (104 bytes) in 1 iterations"
    phases = result.as_dict()["phases"]
    assert phases["rollout"]["busy"] == pytest.approx(35 / 40) == phases["rollout"]["occupied"]
    assert phases["rollout"]["launches"] == 1
    assert "operators" not in phases["rollout"]


def test_on_cuda_offenders_are_named_by_line_and_by_function(monkeypatch):
    fake = FakeDevice(monkeypatch, trace(warned=True), warned=True)
    lines = audit.violations(audit.audit(fake.loop, warm_up=0, iterations=1), rows=1)
    assert lines[:2] == [
        "rollout: 1 copies to the device (8 bytes) in 1 iterations",
        "rollout: 1 waits of the host in 1 iterations",
    ]
    assert any("rollout: 1 x sync at tests/run/test_audit.py:" in line for line in lines)
    assert f"rollout: 1 x {HTOD} at tasks/ant.py:80 (in rewards)" in lines


def test_a_wait_that_only_torch_tells_of_is_an_offence(monkeypatch):
    fake = FakeDevice(monkeypatch, trace(), warned=True)
    [line, place] = audit.violations(audit.audit(fake.loop, warm_up=0, iterations=1), rows=1)
    assert line == "rollout: 1 waits of the host in 1 iterations" and "sync at tests/run/test_audit.py:" in place


def test_a_profiler_that_sees_no_kernel_is_not_believed(monkeypatch):
    fake = FakeDevice(monkeypatch, [phase("iteration", 0, 1)])
    with pytest.raises(ConfigError, match="the profiler saw no kernel"):
        audit.audit(fake.loop, warm_up=0, iterations=1)


def test_a_real_trace_goes_the_same_way(tmp_path):
    """The profiler itself, on the CPU: our ranges come back as phases."""
    trainer = make_trainer("Cartpole", tmp_path, max_iterations=100)
    with Logger(trainer, trainer.run_dir()) as log:
        loop = audit.our_loop(trainer, log)
        loop.observe(audit.phase_range)
        events = audit._trace(loop, 1, stacks=True)
    work = audit.read_events(events).work
    assert {"rollout", "update", "log", OUTSIDE, PHYSICS} == set(work)
    names = [found["name"] for found in events if found.get("cat") == "python_function"]
    assert any("gpusim_rl/learn/ppo.py(" in name and name.endswith(": update") for name in names)


def test_json_has_plain_values_only():
    work = {"rollout": Work(Copies(1, 4), Copies(), Counter({"item": 2}), operators=5)}
    result = Audit(COUNTED, 3, work, Counter({Place("rollout", "item", "a.py:1"): 2}))
    assert result.as_dict() == {
        "method": COUNTED,
        "iterations": 3,
        "phases": {
            "rollout": {
                "to_device": {"count": 1, "bytes": 4},
                "to_host": {"count": 0, "bytes": 0},
                "syncs": {"item": 2},
                "operators": 5,
            }
        },
        "places": [{"phase": "rollout", "what": "item", "where": "a.py:1", "count": 2}],
    }
