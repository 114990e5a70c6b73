"""Tests of the trace that `debug=profile` writes."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest

from gpusim_rl.diagnose.trace import load_trace, read_events
from gpusim_rl.run.phases import OUTSIDE
from gpusim_rl.run.run_dir import RunDir
from gpusim_rl.testing.sync_counter import SyncCounter
from helpers.training import differences, make_trainer, read_csv, the_run


@pytest.mark.parametrize(
    ("settings", "traced"),
    [({"max_iterations": 8, "debug": "profile"}, [5, 6, 7]), ({"max_iterations": 2, "debug": {"profile": 3}}, [1, 2])],
)
def test_steady_iterations_are_traced_per_phase(settings, traced, tmp_path):
    trainer = make_trainer("Cartpole", tmp_path, **settings)
    trainer.train()
    run = the_run(tmp_path)
    events = load_trace(run / "profile" / "trace.json.gz")
    names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    counts = Counter(name.removeprefix("phase/") for name in names if name.startswith("phase/"))
    counts["iteration"] = sum(name.startswith("ProfilerStep#") for name in names)
    iterations, horizon = len(traced), trainer.algorithm.horizon
    assert counts.pop("policy") >= iterations * horizon
    expected = {"iteration": iterations, "simulate": iterations * horizon, "update": iterations, "log": iterations}
    assert counts == expected
    work = read_events(events).work
    assert set(work) == {"rollout", "update", "log", OUTSIDE}
    assert all(each.wall_s > 0 and each.busy_s == each.kernels == 0 for each in work.values())
    text = f"traced iteration{'s' * (iterations > 1)} {traced[0]}{f' to {traced[-1]}' * (iterations > 1)}: open"
    assert text in (run / "train.log").read_text()


def test_tracing_does_not_change_the_training(tmp_path):
    runs = []
    for name, traced in (("with", 1), ("without", 0)):
        trainer = make_trainer("Cartpole", tmp_path / name, max_iterations=4, debug={"profile": traced})
        trainer.train()
        runs.append((read_csv(the_run(tmp_path / name)), trainer.algorithm.policy.state_dict()))
    (rows, policy), (expected_rows, expected_policy) = runs
    assert rows == expected_rows and differences(policy, expected_policy) == []
    assert not (the_run(tmp_path / "without") / "profile").exists()


def test_profiler_adds_no_sync_to_the_phases(tmp_path):
    syncs = SyncCounter()
    trainer = make_trainer("Cartpole", tmp_path, max_iterations=3, debug={"profile": 1}, log={"interval": 1000})
    with syncs:
        trainer.collector.timer.observe(syncs.around)
        trainer.train()
    assert not syncs.work["rollout"].syncs and not syncs.work["update"].syncs, syncs.locations


def test_interrupted_run_keeps_its_partial_trace(tmp_path):
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
    assert sum(event["name"] == "phase/update" for event in events) == 2  # iterations 5 and 6


def test_unwritable_trace_does_not_end_the_run(tmp_path, capsys, monkeypatch):
    trainer = make_trainer("Cartpole", tmp_path, max_iterations=3, debug={"profile": 1})
    with RunDir.of(trainer.start.spec) as (run_dir, continues):
        pass
    (run_dir.path / "profile").write_text("in the way")
    monkeypatch.setattr(RunDir, "of", lambda spec, digest, trains: nullcontext((run_dir, continues)))
    assert trainer.train()["iteration"] == 3
    assert "cannot write a trace" in capsys.readouterr().err


@pytest.mark.slow
def test_profiler_output_stays_off_the_console(tmp_path, train_cli):
    done = train_cli("task=Cartpole", "debug=profile", "num_envs=16", "max_iterations=3", "ppo.horizon=4", "device=cpu")
    assert done.stderr == ""
    assert "trace.json.gz" in done.stdout and list(tmp_path.glob("runs/Cartpole/2*/profile/trace.json.gz"))
