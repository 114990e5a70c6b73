"""Tests of whole runs: exact resume, signals, invalid checkpoints, NaN and divergence, evaluation, rows."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpusim_rl.api import prepare
from gpusim_rl.env import Step, VecEnv
from gpusim_rl.errors import ConfigError, TaskError
from gpusim_rl.files import checkpoint_file
from gpusim_rl.machine import torch_threads
from gpusim_rl.run import checkpoint, devices, make_env, stop_signal
from gpusim_rl.run.checkpoint import Checkpoints
from gpusim_rl.run.evaluation import evaluate, restore
from gpusim_rl.run.logger import Logger
from gpusim_rl.run.metrics import Row
from gpusim_rl.run.phases import PHASES
from gpusim_rl.run.run_dir import RunDir
from gpusim_rl.run.trainer import Trainer
from gpusim_rl.run.writers import CsvWriter
from gpusim_rl.view.player import Player
from helpers.training import (
    OVERFLOWS,
    Broken,
    Faulty,
    Schooled,
    Uncontrolled,
    assert_same_run,
    differences,
    evaluation,
    final_state,
    make_trainer,
    merged,
    read_csv,
    schooled_params,
    small_spec,
    the_run,
)

META = torch.device("meta")


def stop_at(trainer: Trainer, iteration: int, number: int = signal.SIGTERM) -> None:
    """Raise a signal during an iteration."""
    update = trainer.algorithm.update

    def interrupted(*args: Any) -> Any:
        if trainer.iteration + 1 == iteration:
            signal.raise_signal(number)
        return update(*args)

    trainer.algorithm.update = interrupted  # type: ignore[method-assign]


RECURRENT = {"ppo": {"network": {"rnn": "lstm"}, "sequence_length": 4}}
CRITIC = {"task": {"critic": True}, "ppo": {"network": {"rnn": "gru"}}}
RUNS: dict[str, tuple[Any, dict[str, Any]]] = {
    "linear schedule": ("Cartpole", {"ppo": {"precision": "fp32", "schedule": "linear"}}),
    "lstm": ("Cartpole", RECURRENT),
    "Ant": ("Ant", {"num_envs": 3, "task": {"episode_length": 20}}),
    "one batch, short episodes": ("Cartpole", {"sim": {"persistent": False}, "task": {"episode_length": 3}}),
    "different intervals of rows and checkpoints": ("Cartpole", {"log": {"interval": 2}}),
    "asymmetric critic, gru": (Faulty, merged(RECURRENT, CRITIC)),
    "mjwarp": ("Ant", {"num_envs": 2, "sim": "mjwarp", "device": "cpu"}),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if number > 2 else name for number, name in enumerate(RUNS)]
)
def test_resumed_run_equals_uninterrupted_run(tmp_path, name):
    task, settings = RUNS[name]
    half = 6 if name == "lstm" else 3
    settings = merged({"max_iterations": 2 * half}, settings)
    make_trainer(task, tmp_path / "whole", **settings).train()

    stopped = make_trainer(task, tmp_path / "resumed", **settings)
    stop_at(stopped, half)
    with pytest.raises(SystemExit) as end:
        stopped.train()
    assert end.value.code == 143 and stopped.iteration == half
    torch.manual_seed(0)  # like the seed of a new process
    resumed = make_trainer(task, tmp_path / "resumed", checkpoint=str(the_run(tmp_path / "resumed")), **settings)
    assert resumed.iteration == half
    resumed.train()

    assert resumed.iteration == 2 * half and resumed.env_steps == 2 * half * 8 * resumed.cfg.num_envs
    assert_same_run(tmp_path / "whole", tmp_path / "resumed")
    if name == "lstm":
        again = merged(settings, {"num_envs": 3, "checkpoint": str(the_run(tmp_path / "resumed"))})
        assert evaluation(task, tmp_path, **again)["episodes"] == 3


def test_finished_run_keeps_its_settings_at_resume(tmp_path, capfd):
    interrupted = make_trainer("Cartpole", tmp_path, max_iterations=6)
    stop_at(interrupted, 3)
    with pytest.raises(SystemExit):
        interrupted.train()
    run = the_run(tmp_path)
    names = ("config.yaml", "overrides.yaml", "env.json", "metrics.csv")
    before = {name: (run / name).read_bytes() for name in names}
    again = make_trainer("Cartpole", tmp_path, checkpoint=str(run), max_iterations=2, log={"console": "plain"})
    again.train()
    out = capfd.readouterr().out
    assert "nothing to do: 3 " in out and f"checkpoint={run} max_iterations=6\n" in out
    assert {name: (run / name).read_bytes() for name in before} == before
    again = prepare("Cartpole", checkpoint=str(run), log={"dir": str(tmp_path)}).cfg
    assert again.max_iterations == 6 and again.num_envs == 8, "overrides are kept"
    assert again.log.console == "auto", "except settings of the console"


def test_resume_from_numbered_checkpoint_makes_a_new_run_folder(tmp_path, capfd):
    make_trainer("Cartpole", tmp_path / "a", max_iterations=4, log={"checkpoint_interval": 2}).train()
    first = the_run(tmp_path / "a")
    before = {path: path.read_bytes() for path in first.rglob("*") if path.is_file()}
    numbered = first / "checkpoints" / "000002.pt"
    settings = {"checkpoint": str(numbered), "log": {"console": "plain"}}
    with pytest.raises(ConfigError, match=r"000002\.pt: nothing to do: 2 "):
        make_trainer("Cartpole", tmp_path / "b", **settings, max_iterations=2).train()
    assert not (tmp_path / "b").exists()
    make_trainer("Cartpole", tmp_path / "b", **settings, max_iterations=4).train()
    assert f"iteration 2 from {numbered}, in a new run folder\n" in capfd.readouterr().out
    assert read_csv(the_run(tmp_path / "b")) == read_csv(first)[2:]
    assert {path: path.read_bytes() for path in first.rglob("*") if path.is_file()} == before
    assert final_state(tmp_path / "a")["wandb_id"] != final_state(tmp_path / "b")["wandb_id"]


def test_checkpoint_restores_the_settings_of_its_run(tmp_path, capsys):
    settings = {"task": {"episode_length": 77}, "ppo": {"gamma": 0.5}, "max_iterations": 1}
    make_trainer("Cartpole", tmp_path, **settings).train()
    run = the_run(tmp_path)
    lone = shutil.copy(run / "checkpoints" / "last.pt", tmp_path / "mine.pt")
    cfg = prepare("Cartpole", checkpoint=str(lone)).cfg
    assert (cfg.task.episode_length, cfg.algorithm.gamma, cfg.num_envs, cfg.max_iterations) == (77, 0.5, 8, 1)
    before = RunDir(run).config
    (run / "config.yaml").unlink()
    make_trainer("Cartpole", tmp_path, checkpoint=str(run), max_iterations=2).train()
    assert "config.yaml is " in capsys.readouterr().err
    assert RunDir(run).config == {**before, "max_iterations": 2, "checkpoint": str(run)}


def test_cuda_checkpoint_resumes_on_cpu(tmp_path):
    make_trainer("Cartpole", tmp_path, max_iterations=2).train()
    file = the_run(tmp_path) / "checkpoints" / "last.pt"
    foreign = torch.zeros(16, dtype=torch.uint8)  # as large as the state of a CUDA generator
    state = checkpoint.load(file)
    state["algorithm"] |= {"noise_generator": foreign, "shuffle_generator": foreign}
    checkpoint.save(file, state)
    assert make_trainer("Cartpole", tmp_path, checkpoint=str(file), max_iterations=4).train()["iteration"] == 4


def fake_returns(trainer: Trainer, monkeypatch: Any, returns: dict[int, float], full_from: int = 1) -> None:
    """Set the returns of rows by iteration; the window is full from iteration `full_from`."""
    flush = trainer.collector.metrics.flush

    def mocked(*args: Any) -> list[tuple[Any, Row]]:
        now, full = returns[trainer.iteration], trainer.iteration >= full_from
        numbers = {"episode/return": now, "episode/trimmed_return": now if full else None}
        return [(host, row | numbers) for host, row in flush(*args)]

    monkeypatch.setattr(trainer.collector.metrics, "flush", mocked)


def test_best_pt_is_rate_limited(tmp_path, monkeypatch):
    trainer = make_trainer("Cartpole", tmp_path, max_iterations=100, log={"checkpoint_interval": 100})
    returns = {1: 5.0, 2: 9.0, 3: 7.0, 4: 6.0, 5: 8.0}
    fake_returns(trainer, monkeypatch, returns)
    best = []
    with trainer.logging() as log:
        for iteration in returns:
            monkeypatch.setattr(checkpoint, "BEST_INTERVAL_S", 1e9 if iteration == 2 else -1.0)
            trainer.iterate(log)
            best.append(checkpoint.load(log.run_dir.checkpoints / "best.pt")["iteration"])
    assert best == [1, 1, 3, 3, 5] and trainer.intervals.best_return == 9.0


@pytest.mark.parametrize(
    ("full_from", "best", "best_returns"),
    [
        (4, [1, 2, 3, 4, 4], [None, None, None, 5.0, 5.0]),  # ignores the return 9 of a few episodes
        (9, [1, 2, 3, 4, 5], [None] * 5),  # short run: best.pt is the newest
    ],
)
def test_incomplete_window_sets_no_best_return(tmp_path, monkeypatch, full_from, best, best_returns):
    trainer = make_trainer("Cartpole", tmp_path, max_iterations=100, log={"checkpoint_interval": 1})
    returns = {1: 1.0, 2: 9.0, 3: 3.0, 4: 5.0, 5: 4.0}
    fake_returns(trainer, monkeypatch, returns, full_from)
    saved, recorded = [], []
    with trainer.logging() as log:
        for _ in returns:
            trainer.iterate(log)
            saved.append(checkpoint.load(log.run_dir.checkpoints / "best.pt")["iteration"])
            recorded.append(trainer.intervals.best_return)
    assert (saved, recorded) == (best, best_returns)


def test_torch_deterministic_covers_physics_and_cublas(tmp_path, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    try:
        trainer = make_trainer("Cartpole", tmp_path, torch_deterministic=True, sim="mjwarp")
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert trainer.env.sim._model.opt.deterministic  # type: ignore[attr-defined]


def test_concurrent_training_of_the_same_run_is_detected(tmp_path, monkeypatch):
    """Another process continues the run between start and training."""
    make_trainer("Cartpole", tmp_path, max_iterations=2).train()
    last = the_run(tmp_path) / "checkpoints" / "last.pt"
    before, settings = last.read_bytes(), {"checkpoint": str(the_run(tmp_path)), "max_iterations": 4}
    make_trainer("Cartpole", tmp_path, **settings).train()
    after, open_file = last.read_bytes(), checkpoint_file.open_file

    def open_then_replace(path: Path, *arguments: Any) -> Any:
        opened = open_file(path, *arguments)
        last.unlink()
        last.write_bytes(after)
        return opened

    last.write_bytes(before)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_file, "open_file", open_then_replace)
        trainer = make_trainer("Cartpole", tmp_path, **settings)
    assert trainer.start.iteration == 2 and trainer.start.digest == before[-64:].decode()
    with pytest.raises(ConfigError, match="another process"):
        trainer.train()


def test_resumed_run_keeps_its_seed_and_reports_ignored_settings(tmp_path, capfd):
    with ThreadPoolExecutor(1) as pool:  # covers training outside the main thread
        assert pool.submit(make_trainer("Cartpole", tmp_path, seed=5).train).result()["iteration"] == 3
    settings = {"checkpoint": str(the_run(tmp_path)), "max_iterations": 4, "log": {"console": "plain"}, "graph": "step"}
    assert make_trainer("Cartpole", tmp_path, seed=6, **settings).train()["iteration"] == 4
    assert re.search(r"(?ms)^graph +off \(CUDA.*^seed +5 .*seed=6 is ignored", capfd.readouterr().out)


def test_settings_ignored_at_resume_are_reported(tmp_path, capsys):
    make_trainer("Cartpole", tmp_path).train()
    again = {"checkpoint": str(the_run(tmp_path)), "max_iterations": 4}
    make_trainer("Cartpole", tmp_path, **again, experiment="another", pretrained={"init_from": "other.pt"})
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and "experiment" in lines[0] and "pretrained.init_from" in lines[1]
    make_trainer("Cartpole", tmp_path, **again, log={"dir": str(tmp_path / "elsewhere")})
    assert "log.dir" in capsys.readouterr().err
    make_trainer("Cartpole", tmp_path, **again)
    best = {**again, "checkpoint": f"{the_run(tmp_path)}/checkpoints/best.pt"}
    make_trainer("Cartpole", tmp_path, **best, experiment="another", log={"dir": str(tmp_path / "elsewhere")})
    assert capsys.readouterr().err == "", "a branch has its own folder"


def test_values_no_longer_randomised_return_to_the_model(tmp_path):
    def scaled(**names: Any) -> dict[str, Any]:
        mass = {"range": [2.0, 3.0], "operation": "scaling", "distribution": "uniform", **names}
        actor = {"rigid_body_properties": {"mass": mass}}
        return {"randomize": True, "randomization_params": {"actor_params": {"cartpole": actor}}}

    make_trainer("Cartpole", tmp_path, task=scaled()).train()
    again = {"checkpoint": str(the_run(tmp_path)), "max_iterations": 4}
    resumed: Any = make_trainer("Cartpole", tmp_path, **again, task=scaled(names=["pole"]))
    mass = resumed.env.sim.param("body_mass", "cartpole", None)
    assert bool((mass.value[:, :2] == mass.default[:2]).all() and (mass.value[:, 2] > mass.default[2]).all())


def test_task_overrides_apply_at_resume(tmp_path):
    make_trainer("Anymal", tmp_path, max_iterations=2).train()
    saved = final_state(tmp_path)["env"]["task"]["tensors"]
    changed = {"command_x": [0.0, 0.5], "lin_vel_scale": 1.0}
    resumed: Any = make_trainer("Anymal", tmp_path, checkpoint=str(the_run(tmp_path)), max_iterations=3, task=changed)
    task = resumed.env.task
    assert (task.commands._low[0], task.commands._span[0], task.scales["lin_vel"]) == (0.0, 0.5, 1.0)
    assert torch.equal(task.commands.value, saved["commands.value"]), "a running episode keeps its command"
    resumed.train()
    task.commands.resample(torch.ones(8, dtype=torch.bool))
    assert (task.commands["x"] >= 0.0).all() and (task.commands["x"] <= 0.5).all()


@pytest.mark.parametrize("chosen", [True, False])
def test_omp_num_threads_overrides_thread_choice(tmp_path, monkeypatch, chosen):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if chosen:
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
    calls: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", calls.append)
    make_trainer("Cartpole", tmp_path)
    assert calls[-1:] == ([] if chosen else [1])  # small batches


@pytest.mark.parametrize(
    ("num_envs", "horizon", "minibatch_size", "threads"),
    [
        (64, 16, 2047, 1),
        (128, 16, 32768, 2),  # 2048 samples in total
        (4096, 16, 1024, 4),  # the policy acts for 4096 envs at once
        (4096, 16, 32768, 8),
        (None, None, None, 8),
    ],
)
def test_torch_threads_follow_batch_rows(monkeypatch, num_envs, horizon, minibatch_size, threads):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch_threads, "available_cpus", lambda: 8)
    calls: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", calls.append)
    rows = None
    if num_envs is not None:
        cfg = prepare("Cartpole", ppo={"horizon": horizon, "minibatch_size": minibatch_size}).cfg.algorithm
        rows = cfg.batch_rows(num_envs)
    torch_threads.use_available_cpus(rows)
    assert calls == [threads]


def test_resume_on_another_simulator_keeps_training_progress(tmp_path):
    task = schooled_params()
    began: Any = make_trainer(Schooled, tmp_path, max_iterations=2, num_envs=4, task=task)
    began.train()
    run = the_run(tmp_path)
    settings = {"checkpoint": str(run), "num_envs": 4, "task": task}
    resumed: Any = make_trainer(Schooled, tmp_path, **settings, max_iterations=3, sim="mjwarp", device="cpu")
    assert resumed.start.sim.name == "mjwarp" and resumed.iteration == 2
    assert not differences(resumed.algorithm.policy.state_dict(), began.algorithm.policy.state_dict())
    assert resumed.env.task.steps == 17  # 2 x 8 and one of the check of the hooks
    assert resumed.env.task.level.tolist() == [0, 17, 34, 51] and resumed.env.randomizer.steps == 16
    assert torch.equal(resumed.collector.obs["policy"], resumed.env._obs["policy"])
    resumed.train()
    assert resumed.iteration == 3 and resumed.env.task.steps == 25


def test_second_signal_aborts_the_iteration(tmp_path):
    trainer = make_trainer("Cartpole", tmp_path)
    act = trainer.algorithm.act

    def acting(*args: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return act(*args)

    trainer.algorithm.act = acting  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.iteration == 0 and not list((the_run(tmp_path) / "checkpoints").iterdir())


def test_repeated_sighup_counts_once_and_nohup_is_respected():
    """Kernel and shell both send SIGHUP."""
    notices: list[str] = []
    stop = stop_signal.StopSignal()
    stop.notify = notices.append
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    try:
        with stop:
            for _ in range(2):
                signal.raise_signal(signal.SIGHUP)
            with pytest.raises(SystemExit) as end:
                signal.raise_signal(signal.SIGTERM)
        assert stop.number == signal.SIGHUP and len(notices) == 1 and end.value.code == 128 + signal.SIGTERM
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with stop_signal.StopSignal() as ignoring:
            signal.raise_signal(signal.SIGHUP)
        assert ignoring.number is None
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("moment", ["while writing a row", "after checking for a checkpoint"])
def test_signal_saves_the_current_iteration_at_any_moment(tmp_path, monkeypatch, moment):
    trainer = make_trainer("Cartpole", tmp_path, max_iterations=9)
    record, due = Logger.record, Checkpoints.due
    before = signal.getsignal(signal.SIGINT)

    def early(log: Logger, rows: Any) -> None:
        record(log, rows)
        if trainer.iteration == 4 and trainer.stop_signal.number is None:
            signal.raise_signal(signal.SIGINT)

    def late(*args: Any) -> bool:
        is_due = due(*args)
        if trainer.iteration == 4:
            signal.raise_signal(signal.SIGINT)
        return is_due

    if moment == "while writing a row":
        monkeypatch.setattr(Logger, "record", early)
    else:
        monkeypatch.setattr(Checkpoints, "due", late)
    with pytest.raises(SystemExit) as end:
        trainer.train()
    assert end.value.code == 130 and final_state(tmp_path)["iteration"] == 4
    assert signal.getsignal(signal.SIGINT) is before  # SIG_IGN if a shell started the tests in the background


def test_run_stopped_before_first_iteration_resumes(tmp_path, monkeypatch):
    enter = Logger.__enter__

    def slow_start(log: Logger) -> Logger:
        trainer.stop_signal.number = signal.SIGTERM
        return enter(log)

    trainer = make_trainer("Cartpole", tmp_path)
    monkeypatch.setattr(Logger, "__enter__", slow_start)
    with pytest.raises(SystemExit):
        trainer.train()
    monkeypatch.undo()
    resumed = make_trainer("Cartpole", tmp_path, checkpoint=str(the_run(tmp_path)))
    resumed.train()
    assert [row["iteration"] for row in read_csv(the_run(tmp_path))] == ["1", "2", "3"]


def slow_down(trainer: Trainer, monkeypatch: pytest.MonkeyPatch, where: str, iteration: int) -> list[int]:
    """Make each of 8 steps of an iteration take 2 s and raise SIGTERM in one; return the steps begun per iteration.

    Advances the clock of `stop_signal`, so that the load of the machine does not count.
    """
    owner, name = (
        (trainer.algorithm.steps.optimizer, "masked_step") if where == "update" else (trainer.algorithm, "act")
    )
    method = getattr(owner, name)
    parts = [0] * 10
    now_s = 0.0
    monkeypatch.setattr(stop_signal, "time", SimpleNamespace(perf_counter=lambda: now_s))

    def slow(*args: Any) -> Any:
        nonlocal now_s
        now_s += 2.0
        parts[trainer.iteration] += 1
        if trainer.iteration + 1 == iteration and parts[trainer.iteration] == 2:
            signal.raise_signal(signal.SIGTERM)
        return method(*args)

    setattr(owner, name, slow)
    return parts


@pytest.mark.parametrize("where", ["rollout", "update"])
def test_signal_aborts_long_iteration_and_keeps_last_checkpoint(tmp_path, monkeypatch, capfd, where):
    settings = {"max_iterations": 5, "ppo": {"horizon": 8, "minibatch_size": 16}}
    make_trainer("Cartpole", tmp_path / "whole", **settings).train()
    stopped = make_trainer("Cartpole", tmp_path / "resumed", log={"console": "plain"}, **settings)
    parts = slow_down(stopped, monkeypatch, where, iteration=4)
    with pytest.raises(SystemExit) as end:
        stopped.train()
    assert end.value.code == 143
    assert parts[:5] == [8, 8, 8, 2, 0]  # control steps, or minibatches
    assert final_state(tmp_path / "resumed")["iteration"] == 3
    out, err = capfd.readouterr()
    assert "middle of this iteration" in err
    assert re.search("aborted iteration 4; .* iteration 3\n", out) and "\nnext:\n" in out
    monkeypatch.undo()
    make_trainer("Cartpole", tmp_path / "resumed", checkpoint=str(the_run(tmp_path / "resumed")), **settings).train()
    assert_same_run(tmp_path / "whole", tmp_path / "resumed")


def test_signal_in_long_first_iteration_leaves_no_checkpoint(tmp_path, monkeypatch, capfd):
    trainer = make_trainer("Cartpole", tmp_path, log={"console": "plain"})
    parts = slow_down(trainer, monkeypatch, "rollout", iteration=1)
    with pytest.raises(SystemExit) as end:
        trainer.train()
    assert end.value.code == 143
    assert parts[0] == 6  # 12 s
    assert not list((the_run(tmp_path) / "checkpoints").iterdir())
    out, err = capfd.readouterr()
    assert "stopping" in err and re.search("aborted iteration 1; .*no checkpoint\n$", out)


@pytest.mark.parametrize("where", ["row", "evaluation"])
def test_slow_writing_does_not_count_as_long_iteration(tmp_path, monkeypatch, where):
    """With a fake clock, writing takes 12 s; numbered and last iterations are still saved."""
    now_s, saved = 0.0, []
    clock = SimpleNamespace(perf_counter=lambda: now_s)
    for module in (stop_signal, checkpoint):
        monkeypatch.setattr(module, "time", clock)

    def slow(name: str, function: Any) -> Any:
        def call(*args: Any) -> Any:
            nonlocal now_s
            now_s += 12.0 if where == name else 0.0
            return function(*args)

        return call

    def save(path: Path, state: Any) -> None:
        saved.append(state["iteration"])
        Path(path).touch()

    monkeypatch.setattr(checkpoint, "save", save)
    monkeypatch.setattr(CsvWriter, "write", slow("row", CsvWriter.write))
    monkeypatch.setattr(checkpoint.Checkpoints, "save_evaluated", slow("evaluation", lambda self, state: None))
    evaluations = {"interval": int(where == "evaluation")}
    settings = {"max_iterations": 8, "log": {"checkpoint_interval": 3}, "eval": evaluations}
    trainer = make_trainer("Cartpole", tmp_path, **settings)
    monkeypatch.setattr("gpusim_rl.run.eval_schedule.EvalProcess", lambda *args: FakeEvaluations())
    trainer.train()
    assert saved == [3, 6, 8]


class FakeEvaluations:
    """Evaluations that are always due."""

    evaluating = failure = None

    def due(self, iteration: int, *, last: bool) -> bool:
        return True

    def poll(self, timeout_s: float = 0.0) -> None:
        return None

    def close(self) -> None:
        """Do nothing."""


def test_return_is_empty_before_first_episode_ends(tmp_path):
    trainer = make_trainer("Cartpole", tmp_path, max_iterations=1, ppo={"horizon": 1})
    row = trainer.train()
    assert row["episode/return"] is None and row["episode/best_return"] is None
    (line,) = read_csv(the_run(tmp_path))
    assert line["episode/return"] == line["episode/length"] == line["episode/best_return"] == ""


@pytest.mark.parametrize(
    ("rewards", "ends", "warned"),
    [
        ({"alive_reward": -1.0, "forward_weight": 0.0}, {}, True),
        ({"alive_reward": 1.0, "forward_weight": 0.0}, {}, False),
        ({"alive_reward": -1.0}, {"min_height": -9.0, "max_angle": 99.0, "episode_length": 20}, False),
    ],
    ids=["negative alive reward", "positive alive reward", "time limit only"],
)
def test_rewards_that_favor_early_failure_warn_once(tmp_path, capfd, rewards, ends, warned):
    more = {"randomize_episode_start": False, "max_state": 1e6, **rewards, **ends}
    ppo = {"horizon": 64, "minibatch_size": 2048, "epochs": 1}
    make_trainer("Hopper", tmp_path, num_envs=64, max_iterations=2, task=more, ppo=ppo).train()
    assert capfd.readouterr().err.count("failing early") == warned


# 8 control steps per iteration: step 11 is the third of iteration 2. The observation after step 16, the last of
# iteration 2, is the policy's input in iteration 3 but the critic's in iteration 2.
@pytest.mark.parametrize(
    ("fault", "settings", "message"),
    [
        ({"nan_observation_at": 11}, {}, "(group 'policy', step 3, env 1, column 0)"),
        ({"nan_observation_at": 16, "critic": True}, {}, "after the last step (group 'policy', env 1, column 0)"),
        ({"nan_reward_at": 11}, {}, "reward (step 2, env 1) is not finite in iteration 2; "),
        ({"nan_reward_at": 11}, {"log": {"interval": 4}}, "iterations 1 to 4; "),
        (
            {"nan_observation_at": 11},
            {"log": {"interval": 4, "checkpoint_interval": 1}},
            "iterations 1 to 2; ",  # found at the checkpoint, before the row
        ),
        ({"inf_observation_at": 11}, {"debug": "check"}, "'policy' is not finite (env 1, column 0)"),
        ({"nan_control_at": 11}, {"debug": "check"}, "not finite (env 1)"),
    ],
)
def test_nan_from_a_task_names_task_and_tensor(tmp_path, fault, settings, message):
    trainer = make_trainer(Faulty, tmp_path, max_iterations=8, task=fault, **settings)
    with pytest.raises(TaskError) as error:
        trainer.train()
    assert str(error.value).startswith("Faulty") and message in str(error.value) and "\n" not in str(error.value)
    assert str(error.value) in (the_run(tmp_path) / "train.log").read_text()
    for file in (the_run(tmp_path) / "checkpoints").iterdir():
        saved = checkpoint.load(file)
        assert saved["iteration"] < 2
        assert all(value.isfinite().all() for value in saved["policy"].values())


def test_diverged_env_is_masked_counted_and_dumped(tmp_path, capfd):
    trainer = make_trainer(Faulty, tmp_path, task={"speed_at": 11, "randomize_episode_start": False})
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    update = trainer.algorithm.update

    def watched() -> Any:
        rollout = trainer.algorithm.rollout
        seen.append((rollout.valid.clone(), rollout.reward.clone()))
        return update()

    trainer.algorithm.update = watched  # type: ignore[method-assign]
    trainer.train()
    assert [float(row["sim/diverged"]) for row in read_csv(the_run(tmp_path))] == [0.0, 1.0, 0.0]
    valid, reward = seen[1]
    assert (~valid).nonzero().tolist() == [[2, 1]] and reward[2, 1] == 0
    assert all(valid.all() for valid, _ in (seen[0], seen[2]))
    state = final_state(tmp_path)
    assert all(value.isfinite().all() for value in state["policy"].values())
    norm = trainer.algorithm.policy.obs_norm["policy"]
    assert norm.count == 3 * 8 * 8 - 1 and norm.var.max() < 100

    (line,) = capfd.readouterr().err.splitlines()
    assert "1 of 8 envs diverged, the first (env 1)" in line and line.endswith("/diverged.pt")
    dump = checkpoint.load(the_run(tmp_path) / "diverged.pt")
    assert dump["task"] == "Faulty" and dump["iteration"] == 2 and dump["env"] == 1
    assert dump["config"]["task"]["speed_at"] == 11
    assert (dump["state"]["cartpole"]["joint_vel"] == 1e30).all() and dump["action"].shape == (1,)
    assert_rejected(tmp_path, "not a training checkpoint", Faulty, checkpoint=str(the_run(tmp_path) / "diverged.pt"))

    run, before = the_run(tmp_path), (the_run(tmp_path) / "diverged.pt").read_bytes()
    make_trainer(Faulty, tmp_path, checkpoint=str(run), max_iterations=5, task={"speed_at": 30}).train()
    assert [float(row["sim/diverged"]) for row in read_csv(run)] == [0.0, 1.0, 0.0, 1.0, 0.0]
    assert (run / "diverged.pt").read_bytes() == before and capfd.readouterr().err == "", (
        "only the first divergence is dumped"
    )


@pytest.mark.parametrize(
    ("task", "setting", "late"), [(Broken, "task.physics_hz", True), (Uncontrolled, "debug.check_task=true", False)]
)
def test_divergence_of_all_envs_ends_the_run(tmp_path, capfd, task, setting, late):
    trainer = make_trainer(task, tmp_path, max_iterations=5)
    if late:
        delay_rows(trainer)
    with pytest.raises(TaskError) as error:
        trainer.train()
    assert setting in str(error.value) and error.value.key == task.__name__
    assert str(error.value).endswith(f" --replay {the_run(tmp_path)}/diverged.pt")
    assert trainer.iteration == 1 + late and "8 of 8 envs diverged" in capfd.readouterr().err
    assert checkpoint.load(the_run(tmp_path) / "diverged.pt")["diverged_envs"] == 8
    assert str(error.value) in (the_run(tmp_path) / "train.log").read_text()


def test_one_healthy_env_keeps_the_run_alive(tmp_path):
    class OneHealthy(Broken):
        def apply_action(self, action: torch.Tensor) -> None:
            Faulty.apply_action(self, action)
            broken = torch.arange(self.num_envs) > 0
            self.robot.set_state(broken, joint_vel=torch.full_like(self.robot.joint_vel, 1e30))

    row = make_trainer(OneHealthy, tmp_path).train()
    assert row["sim/diverged"] == 7 * 8 and row["iteration"] == 3


@pytest.mark.parametrize(
    ("rows", "warnings"),
    [
        ([(0.5, 0.7, 0), (0.4, 0.85, 0), (0.5, 0.9, 0)], [("85 %", "sim.nconmax=48")]),
        ([(0.3, 1.1, 5), (0.4, 0.85, 0)], [("5 envs", "sim.njmax=128", "sim.nconmax=64", "100 % of sim.nconmax=32")]),
        ([(0.9, 0.3, 0), (1.2, 0.3, 1)], [("90 %", "sim.njmax=176"), ("1 envs", "sim.njmax=256 sim.nconmax=32")]),
        ([(0.3, 0.5, 7), (0.3, 0.5, 9)], [("7 envs", "MuJoCo Warp itself", "spheres")]),
    ],
)  # fmt: skip
def test_full_contact_buffers_warn_once_with_suggested_sizes(rows, warnings):
    lines: list[str] = []
    log: Any = object.__new__(Logger)
    log._room, log._warned, log._silent = {"njmax": 128, "nconmax": 32}, set(), False
    log.console = SimpleNamespace(warn=lines.append)
    for njmax, nconmax, envs in rows:
        log._check_buffers({"sim/njmax_used": njmax, "sim/nconmax_used": nconmax, "sim/overflow": float(envs)})
    assert len(lines) == len(warnings)
    assert all(word in line for line, words in zip(lines, warnings, strict=True) for word in words)


def overflowing(trainer: Trainer, *iterations: int) -> None:
    """Make the loss of these iterations so large that no gradient is finite."""
    loss = trainer.algorithm._loss

    def poisoned(*args: Any) -> Any:
        parts = loss(*args)
        return parts * 3e38 * 3e38 if trainer.iteration + 1 in iterations else parts

    trainer.algorithm._loss = poisoned  # type: ignore[method-assign]


def test_run_without_finite_gradients_ends_with_a_dump(tmp_path, capfd):
    trainer = make_trainer("Cartpole", tmp_path, max_iterations=9, ppo=OVERFLOWS)
    with pytest.raises(TaskError) as error:
        trainer.train()
    assert "3 or more iterations, up to iteration 3 (" in str(error.value)
    assert str(error.value).endswith(f" --replay {the_run(tmp_path)}/skipped.pt")
    rows = read_csv(the_run(tmp_path))
    assert [float(row["policy/skipped_minibatches"]) for row in rows] == [4.0, 8.0, 12.0]
    (line,) = capfd.readouterr().err.splitlines()
    assert "policy/skipped_minibatches is 4: gradients" in line

    # the dump is a checkpoint that resumes with other settings
    longer = {"checkpoint": str(the_run(tmp_path) / "skipped.pt"), "max_iterations": 4}
    longer["ppo"] = OVERFLOWS | {"value_coef": 1.0, "reward_scale": 1.0}
    row = make_trainer("Cartpole", tmp_path / "better", **longer).train()
    assert row["iteration"] == 4 and row["policy/skipped_minibatches"] == 12.0


def test_stalled_learner_is_restored_once(tmp_path, capfd):
    settings = {"ppo": {"network": {"rnn": "lstm"}, "sequence_length": 4}, "log": {"checkpoint_interval": 3}}
    trainer = make_trainer("Cartpole", tmp_path, max_iterations=30, **settings)
    overflowing(trainer, 2, 5, 6, 7, 12, 13, 14)
    seen: dict[int, torch.Tensor] = {}
    iterate = trainer.iterate

    def watched(log: Logger) -> None:
        iterate(log)
        seen[trainer.iteration] = trainer.algorithm.policy.state_dict()["head.log_std"].clone()

    trainer.iterate = watched  # type: ignore[method-assign]
    with pytest.raises(TaskError, match="more iterations, up to iteration 14"):
        trainer.train()
    assert torch.equal(seen[6], seen[4]) and not torch.equal(seen[4], seen[3])
    saved = checkpoint.load(the_run(tmp_path) / "checkpoints" / "000003.pt")
    assert torch.equal(seen[7], saved["policy"]["head.log_std"]), "restored from iteration 3, the newest checkpoint"
    assert not torch.equal(seen[8], seen[7]), "learning continues"
    warnings = capfd.readouterr().err.splitlines()
    assert any("iteration 3" in line for line in warnings)
    assert [float(row["iteration"]) for row in read_csv(the_run(tmp_path))] == list(range(1, 15))
    assert (the_run(tmp_path) / "skipped.pt").is_file()


def test_reward_outlier_sets_no_best_return(tmp_path):
    task = {"huge_reward_at": 30, "episode_length": 3, "randomize_episode_start": False}
    trainer = make_trainer(Faulty, tmp_path, max_iterations=7, task=task)
    trainer.train()
    rows = read_csv(the_run(tmp_path))
    assert float(rows[4]["episode/return"]) > 1e9 and rows[4]["episode/count"] == "100.0"
    assert abs(float(rows[4]["episode/trimmed_return"])) < 10.0
    assert float(rows[-1]["episode/best_return"]) < 10.0
    best = checkpoint.load(the_run(tmp_path) / "checkpoints" / "best.pt")
    assert best["best_return"] < 10.0 and final_state(tmp_path)["best_return"] == trainer.intervals.best_return


def assert_rejected(folder: Path, message: str, task: Any = "Cartpole", **settings: Any) -> None:
    before = sorted(folder.rglob("*"))
    with pytest.raises(ConfigError) as error:
        make_trainer(task, folder, **settings).train()
    assert message in str(error.value), error.value
    assert "\n" not in str(error.value) and sorted(folder.rglob("*")) == before


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Folder with one run of Cartpole."""
    folder = tmp_path_factory.mktemp("trained")
    make_trainer("Cartpole", folder, max_iterations=2, log={"checkpoint_interval": 1}).train()
    return folder


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_envs": 16}, "num_envs: saved 8, now 16"),
        ({"ppo": {"network": {"rnn": "lstm"}}}, "ppo.network.rnn: saved None, now lstm"),
        ({"test": True, "ppo": {"network": {"hidden": [16]}}}, "ppo.network.hidden: saved [16, 16], now [16]"),
    ],
)
def test_checkpoint_of_another_structure_is_rejected(trained, settings, message):
    assert_rejected(trained, message, checkpoint=str(the_run(trained)), **settings)


def test_checkpoint_of_another_task_is_rejected(trained):
    run = the_run(trained)
    assert_rejected(trained, "another task", "Pendulum", checkpoint=str(run))
    copied = trained / "copied.pt"  # no run folder
    copied.write_bytes((run / "checkpoints" / "last.pt").read_bytes())
    assert_rejected(trained, f"another task: {copied}", "Pendulum", checkpoint=str(copied))


@pytest.mark.parametrize("kind", ["truncated", "other program", "no policy", "other sizes"])
def test_invalid_checkpoint_is_rejected(trained, tmp_path, kind):
    good = the_run(trained) / "checkpoints" / "last.pt"
    bad = tmp_path / "bad.pt"
    payload = checkpoint.load(good)
    if kind == "truncated":
        bad.write_bytes(good.read_bytes()[:5000])
    elif kind == "other program":
        torch.save({"model": torch.zeros(3)}, bad)
    elif kind == "no policy":
        del payload["policy"]
        checkpoint.save(bad, payload)
    else:
        env = payload["env"]["sim"]
        checkpoint.save(bad, {**payload, "env": {**payload["env"], "sim": {**env, "state": env["state"][:, :-1]}}})
    assert_rejected(tmp_path, str(bad), checkpoint=str(bad))


def test_failed_allocation_leaves_no_files(tmp_path, monkeypatch):
    def full(*args: Any, **kwargs: Any) -> Any:
        raise MemoryError("Unable to allocate 3.00 TiB for an array")

    monkeypatch.setattr(make_env, "make_sim", full)
    assert_rejected(tmp_path, "Try num_envs=4")


def test_missing_tensorboard_fails_before_run_folder_exists(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    assert_rejected(tmp_path, "log.tensorboard=true: ", log={"tensorboard": True})


def test_evaluation_plays_whole_episodes_and_writes_its_result(trained, tmp_path, capfd):
    before = set(trained.rglob("*"))
    settings = {"checkpoint": str(the_run(trained)), "num_envs": 5, "log": {"console": "plain"}}
    results = [evaluation("Cartpole", trained, task={"episode_length": 50}, **settings) for _ in range(2)]
    assert results[0] == results[1]  # mean actions and the same initial states
    assert results[0]["episodes"] == 5 and 1 <= results[0]["length_mean"] <= 50
    assert results[0]["return_min"] <= results[0]["return_mean"] <= results[0]["return_max"]
    assert re.search(r"return_mean +-?[\d.]+\n", capfd.readouterr().out)
    file = the_run(trained) / "evaluation.json"
    assert set(trained.rglob("*")) - before <= {file, file.parent.parent / "latest" / file.name}
    about = {"iteration": 2, "task": "Cartpole", "sim": "mujoco", "seed": 42, "num_envs": 5}
    last = str(file.parent / "checkpoints" / "last.pt")
    assert json.loads(file.read_text()) == {"checkpoint": last, **about, **results[1]}
    evaluation("Cartpole", trained, **settings | {"log": {"console": "json"}})
    printed = json.loads(capfd.readouterr().out)
    assert printed == {"event": "evaluation", **json.loads(file.read_text()), "file": str(file)}

    alone = tmp_path / "copied.pt"  # no run folder
    alone.write_bytes((the_run(trained) / "checkpoints" / "last.pt").read_bytes())
    evaluation("Cartpole", tmp_path, **settings | {"checkpoint": str(alone), "log": {"console": "json"}})
    assert "file" not in json.loads(capfd.readouterr().out)
    assert [path.name for path in tmp_path.iterdir()] == ["copied.pt"]


def test_evaluation_equals_hand_written_loop(trained):
    settings = {"checkpoint": str(the_run(trained)), "num_envs": 4, "task": {"episode_length": 30}}
    result = evaluation("Cartpole", trained, **settings)
    _, env, policy, obs = restore(small_spec("Cartpole", trained, test=True, **settings))
    assert not env.progress.any()  # type: ignore[attr-defined]  # whole episodes
    returns = [0.0] * 4
    ended = [False] * 4
    for _ in range(30):
        step = env.step(policy.act(obs, ())[0])
        obs = step.obs
        for env_id in range(4):
            if not ended[env_id]:
                returns[env_id] += step.reward[env_id].item()
                ended[env_id] = bool(step.done[env_id])
    assert result["return_mean"] == pytest.approx(sum(returns) / 4, rel=1e-5)


def raising(error: type[BaseException]) -> Any:
    def check(*_: Any) -> None:
        raise error("does not fit")

    return check


def test_failed_restore_closes_the_envs(trained, monkeypatch):
    closed, close = [], VecEnv.close
    monkeypatch.setattr(VecEnv, "close", lambda env: (closed.append(env), close(env)))
    for error in (ConfigError, KeyboardInterrupt):
        monkeypatch.setattr("gpusim_rl.run.evaluation.check_spaces", raising(error))
        with pytest.raises(error):
            restore(small_spec("Cartpole", trained, test=True, checkpoint=str(the_run(trained)), num_envs=4))
    assert len(closed) == 2


def test_evaluation_and_player_start_at_training_progress(tmp_path):
    task = schooled_params()
    make_trainer(Schooled, tmp_path, max_iterations=2, num_envs=4, task=task).train()
    run = str(the_run(tmp_path))
    spec = small_spec(Schooled, tmp_path, checkpoint=run, test=True, num_envs=6, task=task)
    _, tested, policy, obs = restore(spec)
    players = [Player.open(run, act=act, num_envs=6, trust=True) for act in ("trained", "zero")]
    for env in (tested, *(player.env for player in players)):
        school: Any = env
        assert school.task.steps == 17 and school.task.level.tolist() == [0, 17, 34, 51, 0, 17]
        assert school.randomizer.steps == 16
        assert not school.progress.any() and not school.staggered.any()
    assert torch.equal(obs["policy"], tested._obs["policy"])  # type: ignore[attr-defined]
    assert evaluate(tested, policy, obs)[0]["episodes"] == 6


def test_evaluation_requires_a_checkpoint(tmp_path):
    assert_rejected(tmp_path, "test=true: ", test=True)


def test_training_on_two_devices_equals_one_device(tmp_path, monkeypatch):
    make_trainer("Cartpole", tmp_path / "one").train()
    # cpu:0 is the CPU, but a device other than cpu for torch, so data between them must be moved
    placed = {"sim_device": torch.device("cpu"), "rl_device": torch.device("cpu:0")}
    monkeypatch.setattr(devices, "find_device", lambda text, key: placed[key])
    two = make_trainer("Cartpole", tmp_path / "two", sim_device="cpu", rl_device="cpu")
    assert two.env.device != two.start.device
    moved, to = [], Step.to

    def watched(step: Step, device: torch.device) -> Step:
        moved.append((step.reward.device, device))
        return to(step, device)

    monkeypatch.setattr(Step, "to", watched)
    two.train()
    assert set(moved) == {(placed["sim_device"], placed["rl_device"])}
    assert read_csv(the_run(tmp_path / "one")) == read_csv(the_run(tmp_path / "two"))


def test_rows_exclude_setup_time_and_shares_add_up(tmp_path):
    trainer = make_trainer("Cartpole", tmp_path, max_iterations=6)
    time.sleep(0.3)  # time before the first iteration
    began = time.perf_counter()
    trainer.train()
    duration_s = time.perf_counter() - began
    rows = read_csv(the_run(tmp_path), machine=True)
    for row in rows:
        shares = {phase: float(row[f"time/{phase}"]) for phase in PHASES if f"time/{phase}" in row}
        assert sum(shares.values()) <= 1.0 + 1e-9 and shares["simulate"] > 0 and shares["update"] > 0
        assert float(row["speed/sim_steps_per_s"]) > float(row["speed/env_steps_per_s"]) > 0
    assert sum(float(row["time/iteration_s"]) for row in rows) <= duration_s
    assert [int(row["env_steps"]) for row in rows] == [64 * iteration for iteration in range(1, 7)]


def delay_rows(trainer: Trainer) -> None:
    """Delay rows by one interval, as on CUDA."""
    flush, waiting = trainer.collector.metrics.flush, []

    def late(*args: Any) -> Any:
        waiting.extend(flush(*args))
        return [waiting.pop(0)] if len(waiting) > 1 else []

    def drain() -> Any:
        rest = list(waiting)
        waiting.clear()
        return rest

    trainer.collector.metrics.flush = late  # type: ignore[method-assign]
    trainer.collector.metrics.drain = drain  # type: ignore[method-assign]


def test_late_rows_are_written_before_the_checkpoint(tmp_path, monkeypatch):
    make_trainer("Cartpole", tmp_path / "whole", max_iterations=7).train()

    trainer = make_trainer("Cartpole", tmp_path / "late", max_iterations=7, log={"checkpoint_interval": 3})
    delay_rows(trainer)
    saved = []
    save = Checkpoints.save

    def watched(checkpoints: Checkpoints, state: Any, mean_return: float | None) -> None:
        saved.append((state["iteration"], [row["iteration"] for row in read_csv(the_run(tmp_path / "late"))][-1]))
        save(checkpoints, state, mean_return)

    monkeypatch.setattr(Checkpoints, "save", watched)
    row = trainer.train()
    assert saved == [(3, "3"), (6, "6"), (7, "7")] and row["iteration"] == 7
    assert read_csv(the_run(tmp_path / "whole")) == read_csv(the_run(tmp_path / "late"))
