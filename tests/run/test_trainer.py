"""The run as a whole: exact resume, kills, signals, bad input, full disks, and what the loop must survive."""

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
from gpusim_rl.env import Step, VecEnv, device_env
from gpusim_rl.errors import ConfigError, TaskError
from gpusim_rl.files import checkpoint_file
from gpusim_rl.machine import torch_threads
from gpusim_rl.run import checkpoint, collector, devices, make_env, stop_signal, time_share
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
    """Let a signal arrive during an iteration."""
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
    "rows and checkpoints out of step": ("Cartpole", {"log": {"interval": 2}}),
    "asymmetric critic, gru": (Faulty, merged(RECURRENT, CRITIC)),
    "mjwarp": ("Ant", {"num_envs": 2, "sim": "mjwarp", "device": "cpu"}),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if number > 2 else name for number, name in enumerate(RUNS)]
)
def test_stopped_and_resumed_equals_uninterrupted_bit_for_bit(tmp_path, name):
    task, settings = RUNS[name]
    half = 6 if name == "lstm" else 3
    settings = merged({"max_iterations": 2 * half}, settings)
    make_trainer(task, tmp_path / "whole", **settings).train()

    stopped = make_trainer(task, tmp_path / "resumed", **settings)
    stop_at(stopped, half)
    with pytest.raises(SystemExit) as end:
        stopped.train()
    assert end.value.code == 143 and stopped.iteration == half
    torch.manual_seed(0)  # the seed of another process
    resumed = make_trainer(task, tmp_path / "resumed", checkpoint=str(the_run(tmp_path / "resumed")), **settings)
    assert resumed.iteration == half
    resumed.train()

    assert resumed.iteration == 2 * half and resumed.env_steps == 2 * half * 8 * resumed.cfg.num_envs
    assert_same_run(tmp_path / "whole", tmp_path / "resumed")
    if name == "lstm":
        again = merged(settings, {"num_envs": 3, "checkpoint": str(the_run(tmp_path / "resumed"))})
        assert evaluation(task, tmp_path, **again)["episodes"] == 3


def test_a_resume_that_trains_nothing_keeps_the_settings(tmp_path, capfd):
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
    assert "nothing to do: 3 iterations are done" in out and f"checkpoint={run} max_iterations=6\n" in out
    assert {name: (run / name).read_bytes() for name in before} == before
    again = prepare("Cartpole", checkpoint=str(run), log={"dir": str(tmp_path)}).cfg
    assert again.max_iterations == 6 and again.num_envs == 8, "what was typed holds"
    assert again.log.console == "auto", "but for what one terminal shows"


def test_a_branch_has_a_folder_of_its_own_and_says_so(tmp_path, capfd):
    make_trainer("Cartpole", tmp_path / "a", max_iterations=4, log={"checkpoint_interval": 2}).train()
    first = the_run(tmp_path / "a")
    before = {path: path.read_bytes() for path in first.rglob("*") if path.is_file()}
    numbered = first / "checkpoints" / "000002.pt"
    settings = {"checkpoint": str(numbered), "log": {"console": "plain"}}
    with pytest.raises(ConfigError, match=r"000002\.pt: nothing to do: 2 iterations are done"):
        make_trainer("Cartpole", tmp_path / "b", **settings, max_iterations=2).train()
    assert not (tmp_path / "b").exists()
    make_trainer("Cartpole", tmp_path / "b", **settings, max_iterations=4).train()
    assert f"at iteration 2 of {numbered}, in a new run folder\n" in capfd.readouterr().out
    assert read_csv(the_run(tmp_path / "b")) == read_csv(first)[2:]
    assert {path: path.read_bytes() for path in first.rglob("*") if path.is_file()} == before
    assert final_state(tmp_path / "a")["wandb_id"] != final_state(tmp_path / "b")["wandb_id"]


def test_a_checkpoint_alone_has_the_settings_of_its_run(tmp_path, capsys):
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


def test_a_run_of_another_kind_of_device_can_be_continued(tmp_path):
    make_trainer("Cartpole", tmp_path, max_iterations=2).train()
    file = the_run(tmp_path) / "checkpoints" / "last.pt"
    foreign = torch.zeros(16, dtype=torch.uint8)  # as large as the state of a CUDA generator
    state = checkpoint.load(file)
    state["algorithm"] |= {"noise_generator": foreign, "shuffle_generator": foreign}
    checkpoint.save(file, state)
    assert make_trainer("Cartpole", tmp_path, checkpoint=str(file), max_iterations=4).train()["iteration"] == 4


def returns_of(trainer: Trainer, monkeypatch: Any, returns: dict[int, float], full_from: int = 1) -> None:
    """Let rows have these returns, by iteration; the window is full from an iteration on."""
    flush = trainer.collector.metrics.flush

    def mocked(*args: Any) -> list[tuple[Any, Row]]:
        now, full = returns[trainer.iteration], trainer.iteration >= full_from
        numbers = {"episode/return": now, "episode/trimmed_return": now if full else None}
        return [(host, row | numbers) for host, row in flush(*args)]

    monkeypatch.setattr(trainer.collector.metrics, "flush", mocked)


def test_best_is_saved_although_a_better_one_passed_too_soon_after_the_last_save(tmp_path, monkeypatch):
    trainer = make_trainer("Cartpole", tmp_path, max_iterations=100, log={"checkpoint_interval": 100})
    returns = {1: 5.0, 2: 9.0, 3: 7.0, 4: 6.0, 5: 8.0}
    returns_of(trainer, monkeypatch, returns)
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
        (4, [1, 2, 3, 4, 4], [None, None, None, 5.0, 5.0]),  # the lucky 9 of a few episodes is no record
        (9, [1, 2, 3, 4, 5], [None] * 5),  # a short run: its newest mean is over the most episodes
    ],
)
def test_a_mean_of_few_episodes_is_no_record(tmp_path, monkeypatch, full_from, best, best_returns):
    trainer = make_trainer("Cartpole", tmp_path, max_iterations=100, log={"checkpoint_interval": 1})
    returns = {1: 1.0, 2: 9.0, 3: 3.0, 4: 5.0, 5: 4.0}
    returns_of(trainer, monkeypatch, returns, full_from)
    saved, told = [], []
    with trainer.logging() as log:
        for _ in returns:
            trainer.iterate(log)
            saved.append(checkpoint.load(log.run_dir.checkpoints / "best.pt")["iteration"])
            told.append(trainer.intervals.best_return)
    assert (saved, told) == (best, best_returns)


def test_deterministic_kernels_are_those_of_physics_too_and_get_the_workspace_that_cublas_wants(tmp_path, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    try:
        trainer = make_trainer("Cartpole", tmp_path, torch_deterministic=True, sim="mjwarp")
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert trainer.env.sim._model.opt.deterministic  # type: ignore[attr-defined]


def test_the_digest_of_a_start_is_that_of_the_checkpoint_that_it_has_read(tmp_path, monkeypatch):
    """Another process trains further between the two."""
    make_trainer("Cartpole", tmp_path, max_iterations=2).train()
    last = the_run(tmp_path) / "checkpoints" / "last.pt"
    before, settings = last.read_bytes(), {"checkpoint": str(the_run(tmp_path)), "max_iterations": 4}
    make_trainer("Cartpole", tmp_path, **settings).train()
    after, open_file = last.read_bytes(), checkpoint_file.open_file

    def then_swapped(path: Path, *arguments: Any) -> Any:
        opened = open_file(path, *arguments)
        last.unlink()
        last.write_bytes(after)
        return opened

    last.write_bytes(before)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_file, "open_file", then_swapped)
        trainer = make_trainer("Cartpole", tmp_path, **settings)
    assert trainer.start.iteration == 2 and trainer.start.digest == before[-64:].decode()
    with pytest.raises(ConfigError, match="was trained further by another process"):
        trainer.train()


def test_a_resumed_run_keeps_its_seed_and_says_that_another_one_is_ignored(tmp_path, capfd):
    with ThreadPoolExecutor(1) as pool:  # signals are the main thread's
        assert pool.submit(make_trainer("Cartpole", tmp_path, seed=5).train).result()["iteration"] == 3
    settings = {"checkpoint": str(the_run(tmp_path)), "max_iterations": 4, "log": {"console": "plain"}}
    assert make_trainer("Cartpole", tmp_path, seed=6, **settings).train()["iteration"] == 4
    assert "seed     5 (the checkpoint's; seed=6 is ignored)\n" in capfd.readouterr().out


def test_a_setting_that_a_resume_cannot_take_is_told_of(tmp_path, capsys):
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
    assert capsys.readouterr().err == "", "a branch has a folder of its own"


def test_what_is_not_randomised_any_more_is_as_in_the_model(tmp_path):
    def scaled(**names: Any) -> dict[str, Any]:
        mass = {"range": [2.0, 3.0], "operation": "scaling", "distribution": "uniform", **names}
        actor = {"rigid_body_properties": {"mass": mass}}
        return {"randomize": True, "randomization_params": {"actor_params": {"cartpole": actor}}}

    make_trainer("Cartpole", tmp_path, task=scaled()).train()
    again = {"checkpoint": str(the_run(tmp_path)), "max_iterations": 4}
    resumed: Any = make_trainer("Cartpole", tmp_path, **again, task=scaled(names=["pole"]))
    mass = resumed.env.sim.param("body_mass", "cartpole", None)
    assert bool((mass.value[:, :2] == mass.default[:2]).all() and (mass.value[:, 2] > mass.default[2]).all())


def test_values_of_the_task_typed_at_a_resume_hold(tmp_path):
    make_trainer("Anymal", tmp_path, max_iterations=2).train()
    saved = final_state(tmp_path)["env"]["task"]["tensors"]
    changed = {"command_x": [0.0, 0.5], "lin_vel_scale": 1.0}
    resumed: Any = make_trainer("Anymal", tmp_path, checkpoint=str(the_run(tmp_path)), max_iterations=3, task=changed)
    task = resumed.env.task
    assert (task.commands._low[0], task.commands._span[0], task.scales["lin_vel"]) == (0.0, 0.5, 1.0)
    assert torch.equal(task.commands.value, saved["commands.value"]), "an episode under way keeps its command"
    resumed.train()
    task.commands.resample(torch.ones(8, dtype=torch.bool))
    assert (task.commands["x"] >= 0.0).all() and (task.commands["x"] <= 0.5).all()


@pytest.mark.parametrize("chosen", [True, False])
def test_a_number_of_threads_that_the_user_chose_stays(tmp_path, monkeypatch, chosen):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if chosen:
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
    calls: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", calls.append)
    make_trainer("Cartpole", tmp_path)
    assert calls[-1:] == ([] if chosen else [1])  # it is small


@pytest.mark.parametrize(
    ("num_envs", "horizon", "minibatch_size", "threads"),
    [
        (64, 16, 2047, 1),
        (128, 16, 32768, 2),  # 2048 samples in all
        (4096, 16, 1024, 4),  # the policy acts for all envs at once
        (4096, 16, 32768, 8),
        (None, None, None, 8),
    ],
)
def test_the_number_of_torch_threads_follows_the_batch_rows(monkeypatch, num_envs, horizon, minibatch_size, threads):
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


def test_another_simulator_continues_with_new_episodes_where_the_training_was(tmp_path):
    task = schooled_params()
    began: Any = make_trainer(Schooled, tmp_path, max_iterations=2, num_envs=4, task=task)
    began.train()
    run = the_run(tmp_path)
    settings = {"checkpoint": str(run), "num_envs": 4, "task": task}
    resumed: Any = make_trainer(Schooled, tmp_path, **settings, max_iterations=3, sim="mjwarp", device="cpu")
    assert resumed.start.sim.name == "mjwarp" and resumed.iteration == 2
    assert not differences(resumed.algorithm.policy.state_dict(), began.algorithm.policy.state_dict())
    assert resumed.env.task.steps == 17  # 2 x 8, and the check of the hooks
    assert resumed.env.task.level.tolist() == [0, 17, 34, 51]
    assert resumed.env.randomizer.steps == 16
    assert torch.equal(resumed.collector.obs["policy"], resumed.env._obs["policy"])
    resumed.train()
    assert resumed.iteration == 3 and resumed.env.task.steps == 25


def test_a_second_signal_ends_in_the_middle_of_an_iteration(tmp_path):
    trainer = make_trainer("Cartpole", tmp_path)
    act = trainer.algorithm.act

    def acting(*args: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return act(*args)

    trainer.algorithm.act = acting  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.iteration == 0
    assert not list((the_run(tmp_path) / "checkpoints").iterdir())


def test_a_terminal_that_closes_twice_over_is_one_signal_and_nohup_is_respected():
    """The kernel sends SIGHUP, and the shell again."""
    said: list[str] = []
    stop = stop_signal.StopSignal()
    stop.notify = said.append
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    try:
        with stop:
            for _ in range(2):
                signal.raise_signal(signal.SIGHUP)
            with pytest.raises(SystemExit) as end:
                signal.raise_signal(signal.SIGTERM)
        assert stop.number == signal.SIGHUP and len(said) == 1 and end.value.code == 128 + signal.SIGTERM
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with stop_signal.StopSignal() as ignoring:
            signal.raise_signal(signal.SIGHUP)
        assert ignoring.number is None
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("moment", ["while a row is written", "after the checkpoint's turn"])
def test_a_signal_at_any_moment_saves_the_iteration_it_came_in(tmp_path, monkeypatch, moment):
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

    if moment == "while a row is written":
        monkeypatch.setattr(Logger, "record", early)
    else:
        monkeypatch.setattr(Checkpoints, "due", late)
    with pytest.raises(SystemExit) as end:
        trainer.train()
    assert end.value.code == 130
    assert final_state(tmp_path)["iteration"] == 4
    assert signal.getsignal(signal.SIGINT) is before  # ignored, where a shell started us in the background


def test_a_run_stopped_before_its_first_iteration_can_be_resumed(tmp_path, monkeypatch):
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
    """Let each of the 8 parts of an iteration take 2 s, and SIGTERM arrive in one; returns the parts that were begun.

    The clock of `stop_signal` is put forward, so that the load of the machine does not count.
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
def test_a_signal_leaves_a_long_iteration_with_the_checkpoint_before_it(tmp_path, monkeypatch, capfd, where):
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
    assert "during this iteration" in err and "the last checkpoint remains" in err
    assert "aborted iteration 4; the newest checkpoint is of iteration 3\n" in out and "\nnext:\n" in out
    monkeypatch.undo()
    make_trainer("Cartpole", tmp_path / "resumed", checkpoint=str(the_run(tmp_path / "resumed")), **settings).train()
    assert_same_run(tmp_path / "whole", tmp_path / "resumed")


def test_a_signal_in_a_first_iteration_that_turns_out_long_leaves_it_without_a_checkpoint(tmp_path, monkeypatch, capfd):
    trainer = make_trainer("Cartpole", tmp_path, log={"console": "plain"})
    parts = slow_down(trainer, monkeypatch, "rollout", iteration=1)
    with pytest.raises(SystemExit) as end:
        trainer.train()
    assert end.value.code == 143
    assert parts[0] == 6  # 12 s
    assert not list((the_run(tmp_path) / "checkpoints").iterdir())
    out, err = capfd.readouterr()
    assert "stopping after this iteration" in err
    assert out.endswith("aborted iteration 1; there is no checkpoint\n")


@pytest.mark.parametrize("where", ["row", "evaluation"])
def test_slow_writing_makes_no_iteration_a_long_one(tmp_path, monkeypatch, where):
    """By a clock of the test's own: writing takes 12 s. Such iterations are saved by their number and at the end."""
    now_s, saved = 0.0, []
    clock = SimpleNamespace(perf_counter=lambda: now_s)
    for module in (stop_signal, time_share):
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
        """Does nothing."""


def test_before_the_first_episode_ends_its_return_is_empty(tmp_path):
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
    ids=["it costs to live", "it pays to live", "only the time limit ends"],
)
def test_rewards_that_make_it_pay_to_fail_are_told_once(tmp_path, capfd, rewards, ends, warned):
    more = {"randomize_episode_start": False, "max_state": 1e6, **rewards, **ends}
    ppo = {"horizon": 64, "minibatch_size": 2048, "epochs": 1}
    make_trainer("Hopper", tmp_path, num_envs=64, max_iterations=2, task=more, ppo=ppo).train()
    assert capfd.readouterr().err.count("a policy gains by failing early") == warned


# 8 control steps per iteration: step 11 is the third one of iteration 2. What is observed after step 16, the last one
# of iteration 2, is acted on in iteration 3, but valued in iteration 2.
@pytest.mark.parametrize(
    ("fault", "settings", "message"),
    [
        ({"nan_observation_at": 11}, {}, "an observation (group 'policy', step 3, env 1, column 0) is not finite"),
        ({"nan_observation_at": 16, "critic": True}, {}, "an observation after the last step (group 'policy', env 1"),
        ({"nan_reward_at": 11}, {}, "a reward (step 2, env 1) is not finite in iteration 2; "),
        ({"nan_reward_at": 11}, {"log": {"interval": 4}}, "a reward is not finite in iterations 1 to 4; "),
        (
            {"nan_observation_at": 11},
            {"log": {"interval": 4, "checkpoint_interval": 1}},
            "an observation is not finite in iterations 1 to 2; ",  # before the checkpoint, and before the row
        ),
        ({"inf_observation_at": 11}, {"debug": "check"}, "'policy' is not finite (env 1, column 0)"),
        ({"nan_control_at": 11}, {"debug": "check"}, "a control or a force is not finite (env 1)"),
    ],
)
def test_nan_from_a_task_stops_with_one_line_that_names_it(tmp_path, fault, settings, message):
    trainer = make_trainer(Faulty, tmp_path, max_iterations=8, task=fault, **settings)
    with pytest.raises(TaskError) as error:
        trainer.train()
    assert str(error.value).startswith("Faulty") and message in str(error.value) and "\n" not in str(error.value)
    assert str(error.value) in (the_run(tmp_path) / "train.log").read_text()
    for file in (the_run(tmp_path) / "checkpoints").iterdir():
        saved = checkpoint.load(file)
        assert saved["iteration"] < 2
        assert all(value.isfinite().all() for value in saved["policy"].values())


def test_a_diverged_env_is_counted_left_out_and_written_down_and_training_goes_on(tmp_path, capfd):
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
    assert "1 of 8 envs diverged, env 1 first because of its physics" in line and line.endswith("/diverged.pt")
    dump = checkpoint.load(the_run(tmp_path) / "diverged.pt")
    assert dump["task"] == "Faulty" and dump["iteration"] == 2 and dump["env"] == 1
    assert dump["config"]["task"]["speed_at"] == 11
    assert (dump["state"]["cartpole"]["joint_vel"] == 1e30).all() and dump["action"].shape == (1,)
    refused(tmp_path, "not a checkpoint of a training", Faulty, checkpoint=str(the_run(tmp_path) / "diverged.pt"))

    run, before = the_run(tmp_path), (the_run(tmp_path) / "diverged.pt").read_bytes()
    make_trainer(Faulty, tmp_path, checkpoint=str(run), max_iterations=5, task={"speed_at": 30}).train()
    assert [float(row["sim/diverged"]) for row in read_csv(run)] == [0.0, 1.0, 0.0, 1.0, 0.0]
    assert (run / "diverged.pt").read_bytes() == before and capfd.readouterr().err == "", "only the first one"


@pytest.mark.parametrize(
    ("task", "words", "late"),
    [
        (Broken, "physics diverged. Try a higher task.physics_hz", True),
        (Uncontrolled, "actions or controls are NaN or infinite. Try debug.check_task=true", False),
    ],
)
def test_a_run_in_which_every_env_diverges_in_every_step_ends(tmp_path, capfd, task, words, late):
    trainer = make_trainer(task, tmp_path, max_iterations=5)
    if late:
        rows_an_interval_late(trainer)
    with pytest.raises(TaskError) as error:
        trainer.train()
    assert f"iteration 1: {words}" in str(error.value) and error.value.key == task.__name__
    assert str(error.value).endswith(f" --replay {the_run(tmp_path)}/diverged.pt")
    assert trainer.iteration == 1 + late
    assert "8 of 8 envs diverged, env 0 first" in capfd.readouterr().err
    assert checkpoint.load(the_run(tmp_path) / "diverged.pt")["diverged_envs"] == 8
    assert str(error.value) in (the_run(tmp_path) / "train.log").read_text()


def test_one_env_that_is_sound_is_enough_to_go_on(tmp_path):
    class OneSound(Broken):
        def apply_action(self, action: torch.Tensor) -> None:
            Faulty.apply_action(self, action)
            broken = torch.arange(self.num_envs) > 0
            self.robot.set_state(broken, joint_vel=torch.full_like(self.robot.joint_vel, 1e30))

    row = make_trainer(OneSound, tmp_path).train()
    assert row["sim/diverged"] == 7 * 8 and row["iteration"] == 3


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([(0.5, 0.7, 0), (0.4, 0.85, 0), (0.5, 0.9, 0)], [("85 %", "sim.nconmax=48")]),
        ([(0.3, 1.1, 5), (0.4, 0.85, 0)], [("5 envs", "sim.njmax=128", "sim.nconmax=64", "100 % of sim.nconmax=32")]),
        ([(0.9, 0.3, 0), (1.2, 0.3, 1)], [("90 %", "sim.njmax=176"), ("1 envs", "sim.njmax=256 sim.nconmax=32")]),
        ([(0.3, 0.5, 7), (0.3, 0.5, 9)], [("7 envs", "MuJoCo Warp itself", "spheres")]),
    ],
)  # fmt: skip
def test_full_buffers_are_told_once_with_values_to_set(rows, said):
    lines: list[str] = []
    log: Any = object.__new__(Logger)
    log._room, log._warned, log._silent = {"njmax": 128, "nconmax": 32}, set(), False
    log.console = SimpleNamespace(warn=lines.append)
    for njmax, nconmax, envs in rows:
        log._check_buffers({"sim/njmax_used": njmax, "sim/nconmax_used": nconmax, "sim/overflow": float(envs)})
    assert len(lines) == len(said)
    assert all(word in line for line, words in zip(lines, said, strict=True) for word in words)


def overflowing(trainer: Trainer, *iterations: int) -> None:
    """In these iterations the loss is so large that no gradient is finite."""
    loss = trainer.algorithm._loss

    def poisoned(*args: Any) -> Any:
        parts = loss(*args)
        return parts * 3e38 * 3e38 if trainer.iteration + 1 in iterations else parts

    trainer.algorithm._loss = poisoned  # type: ignore[method-assign]


def test_no_finite_gradient_ends_the_run_with_a_dump(tmp_path, capfd):
    trainer = make_trainer("Cartpole", tmp_path, max_iterations=9, ppo=OVERFLOWS)
    with pytest.raises(TaskError) as error:
        trainer.train()
    assert "no gradient was finite for 3 iterations or more, up to 3 (an observation i" in str(error.value)
    assert str(error.value).endswith(f" --replay {the_run(tmp_path)}/skipped.pt")
    rows = read_csv(the_run(tmp_path))
    assert [float(row["policy/skipped_minibatches"]) for row in rows] == [4.0, 8.0, 12.0]
    (line,) = capfd.readouterr().err.splitlines()
    assert "skipped 4 minibatches" in line

    # The dump is a checkpoint: other settings continue from it.
    longer = {"checkpoint": str(the_run(tmp_path) / "skipped.pt"), "max_iterations": 4}
    longer["ppo"] = OVERFLOWS | {"value_coef": 1.0, "reward_scale": 1.0}
    row = make_trainer("Cartpole", tmp_path / "better", **longer).train()
    assert row["iteration"] == 4 and row["policy/skipped_minibatches"] == 12.0


def test_a_learner_that_stopped_learning_is_put_back_once(tmp_path, capfd):
    settings = {"ppo": {"network": {"rnn": "lstm"}, "sequence_length": 4}, "log": {"checkpoint_interval": 3}}
    trainer = make_trainer("Cartpole", tmp_path, max_iterations=30, **settings)
    overflowing(trainer, 2, 5, 6, 7, 12, 13, 14)
    seen: dict[int, torch.Tensor] = {}
    iterate = trainer.iterate

    def watched(log: Logger) -> None:
        iterate(log)
        seen[trainer.iteration] = trainer.algorithm.policy.state_dict()["head.log_std"].clone()

    trainer.iterate = watched  # type: ignore[method-assign]
    with pytest.raises(TaskError, match=r"no gradient was finite for 3 iterations or more, up to 14"):
        trainer.train()
    assert torch.equal(seen[6], seen[4]) and not torch.equal(seen[4], seen[3])
    saved = checkpoint.load(the_run(tmp_path) / "checkpoints" / "000003.pt")
    assert torch.equal(seen[7], saved["policy"]["head.log_std"]), "back to iteration 3, the newest checkpoint"
    assert not torch.equal(seen[8], seen[7]), "it learns again"
    warnings = capfd.readouterr().err.splitlines()
    assert any("restored the learner of iteration 3" in line for line in warnings)
    assert [float(row["iteration"]) for row in read_csv(the_run(tmp_path))] == list(range(1, 15))
    assert (the_run(tmp_path) / "skipped.pt").is_file()


def test_one_huge_reward_is_no_record(tmp_path):
    task = {"huge_reward_at": 30, "episode_length": 3, "randomize_episode_start": False}
    trainer = make_trainer(Faulty, tmp_path, max_iterations=7, task=task)
    trainer.train()
    rows = read_csv(the_run(tmp_path))
    assert float(rows[4]["episode/return"]) > 1e9 and rows[4]["episode/count"] == "100.0"
    assert abs(float(rows[4]["episode/trimmed_return"])) < 10.0
    assert float(rows[-1]["episode/best_return"]) < 10.0
    best = checkpoint.load(the_run(tmp_path) / "checkpoints" / "best.pt")
    assert best["best_return"] < 10.0 and final_state(tmp_path)["best_return"] == trainer.intervals.best_return


def refused(folder: Path, message: str, task: Any = "Cartpole", **settings: Any) -> None:
    before = sorted(folder.rglob("*"))
    with pytest.raises(ConfigError) as error:
        make_trainer(task, folder, **settings).train()
    assert message in str(error.value), error.value
    assert "\n" not in str(error.value)
    assert sorted(folder.rglob("*")) == before


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder with one run of Cartpole."""
    folder = tmp_path_factory.mktemp("trained")
    make_trainer("Cartpole", folder, max_iterations=2, log={"checkpoint_interval": 1}).train()
    return folder


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_envs": 16}, "does not fit this configuration: num_envs: saved 8, now 16"),
        ({"ppo": {"network": {"rnn": "lstm"}}}, "ppo.network.rnn: saved None, now lstm"),
        ({"test": True, "ppo": {"network": {"hidden": [16]}}}, "ppo.network.hidden: saved [16, 16], now [16]"),
    ],
)
def test_a_checkpoint_of_another_structure_is_refused(trained, settings, message):
    refused(trained, message, checkpoint=str(the_run(trained)), **settings)


def test_a_checkpoint_of_another_task_is_refused(trained):
    run = the_run(trained)
    refused(trained, "checkpoint of another task", "Pendulum", checkpoint=str(run))
    copied = trained / "copied.pt"  # has no run folder that tells the task
    copied.write_bytes((run / "checkpoints" / "last.pt").read_bytes())
    refused(trained, f"checkpoint of another task: {copied} trained", "Pendulum", checkpoint=str(copied))


@pytest.mark.parametrize("kind", ["cut short", "of another program", "without a policy", "of other sizes"])
def test_a_checkpoint_that_is_not_one_is_refused(trained, tmp_path, kind):
    good = the_run(trained) / "checkpoints" / "last.pt"
    bad = tmp_path / "bad.pt"
    payload = checkpoint.load(good)
    if kind == "cut short":
        bad.write_bytes(good.read_bytes()[:5000])
    elif kind == "of another program":
        torch.save({"model": torch.zeros(3)}, bad)
    elif kind == "without a policy":
        del payload["policy"]
        checkpoint.save(bad, payload)
    else:
        env = payload["env"]["sim"]
        checkpoint.save(bad, {**payload, "env": {**payload["env"], "sim": {**env, "state": env["state"][:, :-1]}}})
    refused(tmp_path, str(bad), checkpoint=str(bad))


def test_an_allocation_that_fails_is_one_line_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*args: Any, **kwargs: Any) -> Any:
        raise MemoryError("Unable to allocate 3.00 TiB for an array")

    monkeypatch.setattr(make_env, "make_sim", full)
    refused(tmp_path, "num_envs=8: out of memory (Unable to allocate 3.00 TiB for an array). Try num_envs=4")


def test_missing_tensorboard_is_said_before_anything_is_made(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    refused(tmp_path, "log.tensorboard=true: tensorboard is missing", log={"tensorboard": True})


def test_an_evaluation_runs_one_whole_episode_per_env_and_writes_its_result_only(trained, tmp_path, capfd):
    before = set(trained.rglob("*"))
    settings = {"checkpoint": str(the_run(trained)), "num_envs": 5, "log": {"console": "plain"}}
    results = [evaluation("Cartpole", trained, task={"episode_length": 50}, **settings) for _ in range(2)]
    assert results[0] == results[1]  # the mean action, and the same starts
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

    alone = tmp_path / "copied.pt"  # in no run folder
    alone.write_bytes((the_run(trained) / "checkpoints" / "last.pt").read_bytes())
    evaluation("Cartpole", tmp_path, **settings | {"checkpoint": str(alone), "log": {"console": "json"}})
    assert "file" not in json.loads(capfd.readouterr().out)
    assert [path.name for path in tmp_path.iterdir()] == ["copied.pt"]


def test_an_evaluation_equals_a_loop_by_hand(trained):
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


def broken(error: type[BaseException]) -> Any:
    def check(*_: Any) -> None:
        raise error("does not fit")

    return check


def test_a_policy_that_cannot_be_restored_leaves_no_envs_open(trained, monkeypatch):
    closed, close = [], VecEnv.close
    monkeypatch.setattr(VecEnv, "close", lambda env: (closed.append(env), close(env)))
    for error in (ConfigError, KeyboardInterrupt):
        monkeypatch.setattr("gpusim_rl.run.evaluation.check_spaces", broken(error))
        with pytest.raises(error):
            restore(small_spec("Cartpole", trained, test=True, checkpoint=str(the_run(trained)), num_envs=4))
    assert len(closed) == 2


def test_an_evaluation_and_a_player_are_where_the_training_was(tmp_path):
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


def test_an_evaluation_needs_a_checkpoint(tmp_path):
    refused(tmp_path, "test=true: needs a checkpoint", test=True)


def test_physics_and_learner_on_two_devices_are_the_same_training(tmp_path, monkeypatch):
    make_trainer("Cartpole", tmp_path / "one").train()
    # cpu:0 is the CPU, but for torch not the same device as cpu: everything that must be moved is.
    placed = {"sim_device": torch.device("cpu"), "rl_device": torch.device("cpu:0")}
    monkeypatch.setattr(devices, "find_device", lambda text, key: placed[key])
    two = make_trainer("Cartpole", tmp_path / "two", sim_device="cpu", rl_device="cpu")
    assert two.env.device != two.start.device
    moved = []

    def watched(step: Step, device: torch.device) -> Step:
        moved.append((step.reward.device, device))
        return device_env.moved(step, device)

    monkeypatch.setattr(collector, "moved", watched)
    two.train()
    assert set(moved) == {(placed["sim_device"], placed["rl_device"])}
    assert read_csv(the_run(tmp_path / "one")) == read_csv(the_run(tmp_path / "two"))


def test_rows_tell_of_the_training_alone_and_its_times_add_up(tmp_path):
    trainer = make_trainer("Cartpole", tmp_path, max_iterations=6)
    time.sleep(0.3)  # whatever comes before the first iteration
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


def rows_an_interval_late(trainer: Trainer) -> None:
    """As on CUDA, where a row is read when the next one is on its way."""
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


def test_rows_that_arrive_late_are_complete_and_in_the_file_before_the_checkpoint(tmp_path, monkeypatch):
    make_trainer("Cartpole", tmp_path / "whole", max_iterations=7).train()

    trainer = make_trainer("Cartpole", tmp_path / "late", max_iterations=7, log={"checkpoint_interval": 3})
    rows_an_interval_late(trainer)
    saved = []
    save = Checkpoints.save

    def watched(checkpoints: Checkpoints, state: Any, mean_return: float | None) -> None:
        saved.append((state["iteration"], [row["iteration"] for row in read_csv(the_run(tmp_path / "late"))][-1]))
        save(checkpoints, state, mean_return)

    monkeypatch.setattr(Checkpoints, "save", watched)
    row = trainer.train()
    assert saved == [(3, "3"), (6, "6"), (7, "7")]
    assert row["iteration"] == 7
    assert read_csv(the_run(tmp_path / "whole")) == read_csv(the_run(tmp_path / "late"))
