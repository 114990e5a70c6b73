"""Tests of compile=auto: when it begins, the switch, its record in checkpoints, failures; on the CPU, as if on CUDA."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from gpusim_rl.env.vec_env import COMPILED
from gpusim_rl.machine.compiled import Compiled
from gpusim_rl.machine.hardware import has_compiler
from gpusim_rl.run import background_compile, devices
from gpusim_rl.run.background_compile import BackgroundCompile
from gpusim_rl.run.cuda_graph import GraphChoice, Graphs
from gpusim_rl.run.devices import CompileChoice
from gpusim_rl.run.held_objects import generators_of
from gpusim_rl.run.trainer import Trainer
from gpusim_rl.testing.recorded_graphs import RecordedGraphs
from helpers.commands import ROOT, run_command
from helpers.training import differences, make_trainer

CPU = torch.device("cpu")
HANGS = "import time; time.sleep(100)"


@pytest.fixture(autouse=True)
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "IN_BACKGROUND", ("cpu",))
    monkeypatch.setattr(devices, "has_compiler", lambda: True)
    monkeypatch.setattr(background_compile, "MEASURED_S", 0.0)


def make(folder: Path, **changes: Any) -> Trainer:
    return make_trainer("Cartpole", folder, **{"max_iterations": 10**9, "log": {"console": "plain"}, **changes})


def iterate_until_decided(trainer: Trainer) -> None:
    with trainer.logging() as log:
        while trainer.start.compile.mode == "later":
            trainer.iterate(log)


class Child:
    """Child that ends after `polls` polls."""

    def __init__(self, polls: int) -> None:
        self.process = SimpleNamespace(poll=self._poll, returncode=0)
        self._polls, self.closed, self.silent_s = polls, False, 0.0

    def _poll(self) -> int | None:
        self._polls -= 1
        return None if self._polls else 0

    def close(self) -> None:
        self.closed = True


def test_switch_recaptures_graphs_and_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(Compiled, "compile", lambda region: compiled.append(region._name))
    states, captured = [], []
    for wanted in ("off", "auto"):
        trainer = make(tmp_path / wanted, compile=wanted)
        graphs = RecordedGraphs if wanted == "auto" else Graphs
        options: dict[str, Any] = {"generators": generators_of(trainer.algorithm, CPU)}
        options |= {"stateful": trainer.collector.graphs._stateful}
        trainer.collector.graphs = graphs(GraphChoice("update", "test"), CPU, **options)
        trainer._compilation._child = child = Child(polls=6)  # type: ignore[assignment]
        with trainer.logging() as log:
            for iteration in range(1, 12):
                trainer.iterate(log)
                captured.append(trainer.collector.graphs._captured.get("update"))
                assert (trainer.state_dict()["compiled_since"] == 6) == (wanted == "auto" and iteration >= 6)
            states.append(trainer.state_dict())
    assert compiled == [*(f"Cartpole: {name}" for name in COMPILED.values()), "the PPO loss"]
    del captured[:11]
    assert [graph is not None for graph in captured] == [False] * 3 + [True] * 2 + [False] * 4 + [True] * 2
    assert captured[3] is captured[4] is not captured[-1] is captured[-2]
    for part in ("policy", "algorithm", "env", "metrics"):
        assert differences(states[0][part], states[1][part]) == [], part
    assert trainer.run_dir is not None and child.closed
    assert "switching to compiled code after iteration 6" in trainer.run_dir.train_log.read_text()
    assert trainer.run_dir.environment["compile"]["since"] == 6


@pytest.mark.parametrize(
    ("command", "reason"),
    [("raise SystemExit('error: no compiler')", "no compiler"), (HANGS, "SIGKILL"), (HANGS, "it took over 0 min")],
    ids=["failing", "killed", "hanging"],
)
def test_failed_child_leaves_run_uncompiled(
    command: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_compile, "_START", command)
    monkeypatch.setattr(background_compile, "LONGEST_S", 0.1 if "0 min" in reason else 99.0)
    trainer = make(tmp_path)
    with trainer.logging() as log:
        while trainer.start.compile.mode == "later":
            trainer.iterate(log)
            if reason == "SIGKILL" and (child := trainer._compilation._child) is not None:
                os.kill(child.process.pid, signal.SIGKILL)
        trainer.iterate(log)
    assert trainer.start.compile.mode == "off" and reason in trainer.start.compile.reason
    assert trainer.run_dir is not None
    [warning] = [line for line in trainer.run_dir.train_log.read_text().splitlines() if "failed (" in line]
    assert reason in warning and "compile.log" in warning
    assert trainer.start.compile.since is None


def test_child_ends_with_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_compile, "_START", HANGS)
    trainer = make(tmp_path)
    with trainer.logging() as log:
        while trainer._compilation._child is None:
            trainer.iterate(log)
        process = psutil.Process(trainer._compilation._child.process.pid)
        assert process.is_running()
    assert not process.is_running()


@pytest.mark.parametrize("why", ["short", "memory", "script"])
def test_compilation_that_cannot_pay_does_not_begin(why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if why == "memory":
        monkeypatch.setattr(background_compile, "memory_available_bytes", lambda: 1 << 20)
    trainer = make(tmp_path, max_iterations=50 if why == "short" else 10**9)
    if why == "script":
        monkeypatch.setitem(trainer.start.spec.config["task"], "_target_", "__main__.Cartpole")
    iterate_until_decided(trainer)
    assert trainer.start.compile.mode == "off" and why in trainer.start.compile.reason.replace("150 s", "short")
    assert not (Path(str(trainer.run_dir)) / "compile.log").exists()


def test_child_on_same_device_fails_if_nothing_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.exc import TorchDynamoException

    def fail(*_: object) -> None:
        raise TorchDynamoException("read-only cache")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: fail)
    settings = background_compile.settings_of_child(make(tmp_path, device="auto", sim="mujoco").start)
    assert settings["device"] == "cpu"
    with pytest.raises(SystemExit, match="nothing could be compiled"):
        background_compile.fill_cache(settings)


def trained(trainer: Trainer, until: int, **saved: int) -> dict[str, Any]:
    """Train until an iteration; save checkpoints after the iterations `saved`, by name. Return the state."""
    with trainer.logging() as log:
        while trainer.iteration < until:
            trainer.iterate(log)
            for name, iteration in saved.items():
                if trainer.iteration == iteration:
                    trainer.save(log)
                    shutil.copy(log.checkpoints.last, Path(trainer.cfg.log.dir) / name)
        return trainer.state_dict()


def real(folder: Path) -> None:
    """Let a child compile; repeat the run with a switch at the same iteration, resumed before and after the switch."""
    from torch._dynamo.utils import counters

    devices.IN_BACKGROUND, background_compile.MEASURED_S = ("cpu",), 0.0
    options: dict[str, Any] = {"max_iterations": 10**6}
    whole = make_trainer("Cartpole", folder, **options)
    with whole.logging() as log:
        while whole.start.compile.mode == "later":
            whole.iterate(log)
            time.sleep(0.5)  # fewer iterations to repeat
        switched = whole.start.compile.since
        assert switched is not None and whole._compilation._child is None
        counters.clear()
        for _ in range(4):
            whole.iterate(log)
        expected = whole.state_dict()
    # forward passes of each region, and the gradient of the loss
    assert counters["inductor"]["fxgraph_cache_hit"] == len(COMPILED) + 2, counters["inductor"]
    assert "fxgraph_cache_miss" not in counters["inductor"]

    def switch(self: Any, run: Any, log: Any) -> CompileChoice:
        return self._switch(run, log) if run.iteration == switched else run.start.compile

    BackgroundCompile._decide = switch  # type: ignore[method-assign]
    end = switched + 4
    states = [trained(make_trainer("Cartpole", folder, **options), end, before=2, after=switched + 1)]
    for name, mode in (("before", "later"), ("after", "all")):
        trainer = make_trainer("Cartpole", folder, checkpoint=str(folder / name), **options)
        assert trainer.start.compile.mode == mode
        states.append(trained(trainer, end))
    for state in states:
        assert state["compiled_since"] == switched
        for part in ("policy", "algorithm", "env", "metrics"):
            assert differences(state[part], expected[part]) == [], part


@pytest.mark.slow
@pytest.mark.skipif(not has_compiler(), reason="torch.compile needs a C++ compiler")
def test_run_compiles_from_cache_of_child_and_resumes_exactly(tmp_path: Path) -> None:
    """Run in a process without the shape checks that torch cannot compile."""
    file, paths = tmp_path / "call.py", [str(ROOT / "tests" / "run"), str(ROOT / "tests"), str(ROOT)]
    call = f"import sys\nsys.path[:0] = {paths}\nimport pathlib, test_background_compile as it\n"
    file.write_text(f"{call}it.real(pathlib.Path({str(tmp_path)!r}))\n")
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    run_command(sys.executable, file, cwd=ROOT, env=environment, timeout_s=600, cold=True)
