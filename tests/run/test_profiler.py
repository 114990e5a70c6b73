"""What `debug=profile` writes."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from gpusim_rl.diagnose.trace import load_trace, read_events
from gpusim_rl.run import profiler
from gpusim_rl.run.phases import OUTSIDE
from gpusim_rl.run.run_dir import RunDir
from gpusim_rl.testing.sync_counter import SyncCounter
from helpers.training import differences, make_trainer, read_csv, the_run


@pytest.mark.parametrize(
    ("settings", "traced"),
    [
        ({"max_iterations": 8, "debug": "profile"}, [5, 6, 7]),
        ({"max_iterations": 2, "debug": {"profile": 3}}, [1, 2]),
    ],
)
def test_steady_iterations_are_traced_phase_by_phase(settings, traced, tmp_path):
    trainer = make_trainer("Cartpole", tmp_path, **settings)
    trainer.train()
    run = the_run(tmp_path)
    events = load_trace(run / "profile" / "trace.json.gz")
    names = [found["name"] for found in events if found.get("cat") == "user_annotation"]
    counts = Counter(name.removeprefix("phase/") for name in names if name.startswith("phase/"))
    counts["iteration"] = sum(name.startswith("ProfilerStep#") for name in names)
    iterations, horizon = len(traced), trainer.algorithm.horizon
    assert counts.pop("policy") >= iterations * horizon
    expected = {"iteration": iterations, "simulate": iterations * horizon, "update": iterations, "log": iterations}
    assert counts == expected
    work = read_events(events).work
    assert set(work) == {"rollout", "update", "log", OUTSIDE}
    assert all(each.wall_s > 0 and each.busy_s == each.kernels == 0 for each in work.values())
    text = f"iterations {traced[0]} to {traced[-1]}" if iterations > 1 else f"iteration {traced[0]}"
    assert f"profile/trace.json.gz has {text}: open it with" in (run / "train.log").read_text()


def test_a_trace_does_not_change_the_training(tmp_path):
    runs = []
    for name, traced in (("with", 1), ("without", 0)):
        trainer = make_trainer("Cartpole", tmp_path / name, max_iterations=4, debug={"profile": traced})
        trainer.train()
        runs.append((read_csv(the_run(tmp_path / name)), trainer.algorithm.policy.state_dict()))
    (rows, policy), (expected_rows, expected_policy) = runs
    assert rows == expected_rows and differences(policy, expected_policy) == []
    assert not (the_run(tmp_path / "without") / "profile").exists()


def test_the_profiler_adds_no_sync_to_the_phases(tmp_path):
    syncs = SyncCounter()
    trainer = make_trainer("Cartpole", tmp_path, max_iterations=3, debug={"profile": 1}, log={"interval": 1000})
    with syncs:
        trainer.collector.timer.observe(syncs.around)
        trainer.train()
    assert not syncs.work["rollout"].syncs and not syncs.work["update"].syncs, syncs.locations


def test_an_interrupted_run_keeps_the_part_of_its_trace(tmp_path):
    trainer = make_trainer("Cartpole", tmp_path, max_iterations=20, debug="profile")
    update, updates = trainer.algorithm.update, []

    def fails(*args: Any) -> Any:
        updates.append(1)
        if len(updates) == 6:
            raise ZeroDivisionError
        return update(*args)

    trainer.algorithm.update = fails  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    events = load_trace(the_run(tmp_path) / "profile" / "trace.json.gz")
    assert sum(found["name"] == "phase/update" for found in events) == 2  # of iterations 5 and 6


def test_a_trace_that_cannot_be_written_ends_nothing(tmp_path, capsys, monkeypatch):
    trainer = make_trainer("Cartpole", tmp_path, max_iterations=3, debug={"profile": 1})
    with RunDir.of(trainer.start.spec) as (run_dir, continues):
        pass
    (run_dir.path / "profile").write_text("in the way")
    monkeypatch.setattr(RunDir, "of", lambda spec, digest, trains: nullcontext((run_dir, continues)))
    assert trainer.train()["iteration"] == 3
    assert "the trace could not be written" in capsys.readouterr().err


@pytest.mark.slow
def test_the_console_stays_free_of_the_profilers_own_lines(tmp_path, train_cli):
    done = train_cli("task=Cartpole", "debug=profile", "num_envs=16", "max_iterations=3", "ppo.horizon=4", "device=cpu")
    assert done.stderr == ""
    [line] = [text for text in done.stdout.splitlines() if "trace.json.gz" in text]
    assert (tmp_path / line.split(" has ")[0]).is_file()


class Device:
    """Stands for CUDA where there is none: writes down what is asked of it."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def note(self, what: str) -> Any:
        return lambda *args: self.asked.append(what)


def test_under_nsight_the_iterations_are_marked_and_the_other_profiler_stays_away(tmp_path, monkeypatch):
    device = Device()
    trainer = make_trainer("Cartpole", tmp_path, max_iterations=8, debug={"profile": 2})
    monkeypatch.setitem(os.environ, "NSYS_PROFILING_SESSION_ID", "1")
    for owner, name in ((torch.cuda.profiler, "start"), (torch.cuda.profiler, "stop"), (torch.cuda, "synchronize")):
        monkeypatch.setattr(owner, name, device.note(name))
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", device.note("push"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", device.note("pop"))

    class OnCuda(profiler._Recorder):
        def __init__(self, run: Any, *others: Any) -> None:
            super().__init__(replace(run, start=replace(run.start, device=torch.device("cuda"))), *others)

    monkeypatch.setattr(profiler, "_Recorder", OnCuda)
    trainer.train()
    asked = [name for name in device.asked if name not in ("push", "pop")]
    assert asked == ["start", "synchronize", "stop"]
    per_iteration = device.asked.index("start") // (2 * 4)
    ranges = device.asked[device.asked.index("start") : device.asked.index("synchronize")].count("push")
    assert ranges == 2 * per_iteration > 0
    run = the_run(tmp_path)
    assert not (run / "profile").exists()
    assert "Nsight Systems has recorded iterations 5 to 6" in (run / "train.log").read_text()
