"""Tests of evaluations during training: results, choice of best.pt, isolation from the training."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from gpusim_rl.api import prepare
from gpusim_rl.connect.gymnasium_in import GymnasiumEnv
from gpusim_rl.distributed import actors
from gpusim_rl.errors import ConfigError
from gpusim_rl.learn.algorithm import Policy
from gpusim_rl.run import checkpoint, devices, eval_process, eval_schedule
from gpusim_rl.run.eval_process import EvalProcess, Evaluation, answers
from gpusim_rl.run.evaluation import evaluate
from gpusim_rl.run.run_spec import RunSpec
from gpusim_rl.run.trainer import Trainer
from gpusim_rl.run.writers import Row
from helpers.raised import raises
from helpers.training import Faulty, differences, evaluation, make_trainer, read_csv, the_run

EVAL = {"interval": 2, "num_envs": 3}
SHORT = {"task": {"episode_length": 40}, "ppo": {"precision": "fp32"}}


class InThisProcess(EvalProcess):
    """Evaluation in this process; a result arrives after `delay` polls."""

    delay = 1
    returns: list[float] | None = None  # override the measured returns

    def __init__(self, spec: RunSpec, printed: Path, iteration: int) -> None:
        self.evaluating, self.failure = None, None
        self._interval, self._last = spec.cfg.eval.interval, iteration
        self._evaluation = Evaluation(spec.config)
        self._result: Row = {}
        self._polls = 0

    def begin(self, file: Path, iteration: int) -> None:
        self._last = self.evaluating = iteration
        state = torch.random.get_rng_state()
        self._result = {"eval/iteration": iteration, **self._evaluation(checkpoint.load(file))}
        torch.random.set_rng_state(state)
        if self.returns:
            self._result["eval/return"] = self.returns.pop(0)
        self._polls = self.delay

    def poll(self, timeout_s: float = 0.0) -> Row | None:
        self._polls -= 1
        if self.evaluating is None or self._polls >= 0:
            return None
        self.evaluating = None
        return self._result

    def close(self) -> None:
        self._evaluation.env.close()


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> type[InThisProcess]:
    class Chosen(InThisProcess):
        pass

    monkeypatch.setattr(eval_schedule, "EvalProcess", Chosen)
    return Chosen


def training_columns(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    return [{name: value for name, value in row.items() if not name.startswith("eval/")} for row in rows]


def evaluations(run: Path) -> list[dict[str, str]]:
    return [row for row in read_csv(run) if row.get("eval/iteration")]


def warnings(run: Path) -> list[str]:
    return [line for line in (run / "train.log").read_text().splitlines() if "warning" in line]


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_evaluations_leave_training_bit_identical(tmp_path, monkeypatch, real):
    if not real:
        monkeypatch.setattr(eval_schedule, "EvalProcess", InThisProcess)
    make_trainer("Cartpole", tmp_path / "without", max_iterations=4, **SHORT).train()
    make_trainer("Cartpole", tmp_path / "with", max_iterations=4, eval=EVAL, **SHORT).train()
    without, run = the_run(tmp_path / "without"), the_run(tmp_path / "with")
    last = [checkpoint.load(folder / "checkpoints" / "last.pt") for folder in (without, run)]
    assert [
        x for x in differences(*last) if x.startswith(("/policy", "/algorithm", "/env", "/metrics/", "/torch_rng"))
    ] == []
    assert training_columns(read_csv(run)) == read_csv(without)
    assert warnings(run) == [] and (not real or (run / "eval.log").read_text() == "")

    [newest] = [row for row in evaluations(run) if row["iteration"] == "4"]
    assert newest["eval/iteration"] == "4"
    tested = evaluation("Cartpole", tmp_path, checkpoint=str(run), num_envs=3, seed=1, **SHORT)
    assert float(newest["eval/return"]) == tested["return_mean"]
    assert float(newest["eval/length"]) == tested["length_mean"]
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"last.pt", "best.pt"}
    evaluated = {float(row["eval/return"]): int(row["eval/iteration"]) for row in evaluations(run)}
    best = checkpoint.load(run / "checkpoints" / "best.pt")
    assert len(evaluated) == 1 or best["iteration"] == evaluated[max(evaluated)]


def test_training_continues_after_evaluation_process_is_killed(tmp_path):
    trainer = make_trainer("Cartpole", tmp_path, max_iterations=4, eval={"interval": 1}, **SHORT)
    iterate = trainer.iterate

    def killing(log: Any) -> None:
        if trainer.iteration == 1:
            process: Any = trainer._evaluations._process
            os.kill(process._child.process.pid, signal.SIGKILL)
            process._child.process.wait()
            while process._answers.empty():
                time.sleep(0.01)
        iterate(log)

    trainer.iterate = killing  # type: ignore[method-assign]
    trainer.train()
    run = the_run(tmp_path)
    assert trainer.iteration == 4 and len(read_csv(run)) == 4
    [warning] = warnings(run)
    assert "evaluations" in warning and "code -9" in warning
    assert (run / "checkpoints" / "best.pt").is_file() and not (run / "checkpoints" / "evaluated.pt").exists()


@pytest.mark.slow
def test_evaluation_process_and_its_envs_end_with_the_training(tmp_path):
    trainer = gymnasium_trainer(tmp_path, "async")
    trainer.train()
    assert trainer.run_dir is not None
    process = EvalProcess(trainer.start.spec, tmp_path / "eval.log", 0)
    process.begin(trainer.run_dir.path / "checkpoints" / "last.pt", 1)
    row = process.poll(60.0)
    assert row is not None and row["eval/return"] == row["eval/length"], (tmp_path / "eval.log").read_text()
    everything = [psutil.Process(process._child.process.pid), *psutil.Process(process._child.process.pid).children()]
    assert len(everything) == 3
    assert process._child.process.stdin is not None
    process._child.process.stdin.close()  # the kernel closes stdin if the training is killed
    assert process._child.process.wait(60) == 0 and psutil.wait_procs(everything, timeout=60)[1] == []
    assert process.poll(5.0) is None and str(process.failure).endswith("exit code 0")
    process.close()


def test_best_pt_is_the_checkpoint_with_the_best_evaluation(tmp_path, in_process):
    in_process.returns = [1.0, 5.0, float("nan"), 3.0]
    make_trainer("Cartpole", tmp_path, max_iterations=8, eval=EVAL, **SHORT).train()
    run = the_run(tmp_path)
    assert [row["eval/iteration"] for row in evaluations(run)] == ["2", "4", "6", "8"]
    assert [row["iteration"] for row in evaluations(run)] == ["3", "5", "7", "8"]  # iterations in which results arrived
    assert checkpoint.load(run / "checkpoints" / "best.pt")["iteration"] == 4

    in_process.returns = [4.0, 6.0]
    resumed = make_trainer("Cartpole", tmp_path, checkpoint=str(run), max_iterations=12, eval=EVAL, **SHORT)
    resumed.train()
    assert checkpoint.load(run / "checkpoints" / "best.pt")["iteration"] == 12
    assert checkpoint.load(run / "checkpoints" / "last.pt")["best_evaluation"] == 6.0


def test_slow_evaluation_delays_only_the_next_evaluation(tmp_path, in_process):
    in_process.delay = 3
    make_trainer("Cartpole", tmp_path, max_iterations=9, eval=EVAL, **SHORT).train()
    assert [(row["iteration"], row["eval/iteration"]) for row in evaluations(the_run(tmp_path))] == [
        *(("5", "2"), ("8", "5"), ("9", "9"))
    ]


def test_failed_evaluations_fall_back_to_training_returns(tmp_path, monkeypatch):
    def refuse(*arguments: Any) -> None:
        raise OSError("no process")

    monkeypatch.setattr(eval_schedule, "EvalProcess", refuse)
    trainer = make_trainer("Cartpole", tmp_path, max_iterations=2, eval=EVAL, **SHORT)
    with trainer.logging() as log:
        trainer.iterate(log)
        assert not log.checkpoints._evaluations_decide
    assert "(no process" in warnings(the_run(tmp_path))[0]


@pytest.mark.parametrize(("line", "words"), [(b"hello\n", "'hello'"), (b'{"eval/ret', "with code -9")])
def test_invalid_answer_ends_evaluations(tmp_path, line, words):
    process = EvalProcess(prepare("Cartpole", eval=EVAL), tmp_path / "eval.log", 0)
    process._child.process.kill()
    process._answers.put(line)
    while process.failure is None:
        assert process.poll() is None
    assert words in process.failure
    process.close()


def test_hanging_evaluation_times_out(tmp_path, monkeypatch):
    monkeypatch.setattr(eval_process, "LONGEST_S", 0.0)
    process = EvalProcess(prepare("Cartpole", eval=EVAL), tmp_path / "eval.log", 0)
    process.begin(tmp_path / "none.pt", 2)
    assert process.poll(0.001) is None
    assert "0 s" in str(process.failure) and not process.due(4)
    process.close()


def test_evaluations_share_initial_states(tmp_path):
    trainer = make_trainer("Cartpole", tmp_path, max_iterations=1, eval=EVAL, **SHORT)
    evaluation = Evaluation(trainer.start.spec.config)
    state = trainer.state_dict()
    assert evaluation(state) == evaluation(state)


def test_evaluation_process_answers_errors_in_one_line(tmp_path, capsys):
    trainer = make_trainer(Faulty, tmp_path, max_iterations=1, **SHORT)
    config = json.dumps({"config": trainer.start.spec.config})
    [answer] = answers([config, json.dumps({"checkpoint": str(tmp_path / "none.pt")}), config])
    assert json.loads(answer)["error"].startswith("cannot read checkpoint")
    wrong = {**trainer.start.spec.config, "task": {**trainer.start.spec.config["task"], "_target_": "__main__.Nothing"}}
    [answer] = answers([json.dumps({"config": wrong}), config])
    assert json.loads(answer)["error"].startswith("task._target_=__main__.Nothing: ")
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "device"),
    [
        ({}, "cpu"),
        ({"sim": "mjwarp"}, "cuda:0"),
        ({"sim_device": "cuda"}, "cuda:0"),
        ({"eval_device": "cuda"}, "cuda:0"),
    ],
    ids=str,
)
def test_evaluations_of_a_cuda_run_use_the_cpu_by_default(settings, device, monkeypatch):
    monkeypatch.setattr(devices, "find_device", lambda name, key: torch.device("cpu" if name == "cpu" else "cuda:0"))
    found, sim = devices.choose_eval_devices(prepare("Cartpole", device="cuda", **settings).cfg)
    assert found == sim.device == torch.device("cuda:0" if settings else "cpu")


def test_unknown_eval_device_is_rejected(tmp_path):
    with raises(ConfigError, key="eval_device=cuda:7"):
        make_trainer("Cartpole", tmp_path, eval=EVAL, eval_device="cuda:7")


class Limited(gym.Env):
    """Env with rewards 1, 2, ...; the first episode of env i has 2 + i steps, each later one a step more."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (1,))
    action_space = gym.spaces.Box(-1.0, 1.0, (1,))
    episode = -1

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self.length, self.episode = 2 + seed, -1
        self.episode, self.t = self.episode + 1, 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return np.zeros(1, np.float32), float(self.t), self.t == self.length + self.episode, False, {}


class Idle(Policy):
    def act(self, obs: Any, hidden: Any, deterministic: bool = True) -> Any:
        return torch.zeros(len(obs["policy"]), 1), ()


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_every_env_plays_the_same_number_of_whole_episodes(mode):
    env = GymnasiumEnv(SyncVectorEnv([Limited] * 3, autoreset_mode=mode), seed=0, max_episode_steps=50)
    result, _ = evaluate(env, Idle(), env.reset(), episodes=2)
    lengths = [2, 3, 4, 3, 4, 5]
    returns = [n * (n + 1) / 2 for n in lengths]
    assert result["episodes"] == 6 and result["diverged"] == 0
    assert result["length_mean"] == pytest.approx(sum(lengths) / 6)
    assert result["return_mean"] == pytest.approx(sum(returns) / 6)
    assert (result["return_min"], result["return_max"]) == (3.0, 15.0)


def gymnasium_trainer(folder: Path, vectorization: str) -> Trainer:
    return actors.make_trainer(
        prepare(
            "Gymnasium",
            env={"id": "CartPole-v1", "vectorization": vectorization},
            num_envs=2,
            max_iterations=1,
            eval={"num_envs": 2, "episodes": 2},
            log={"dir": str(folder), "console": "quiet"},
            ppo={"horizon": 8, "minibatch_size": 16, "network": {"hidden": [8]}},
        )
    )


def test_gymnasium_envs_are_evaluated(tmp_path):
    trainer = gymnasium_trainer(tmp_path, "sync")
    first = Evaluation(trainer.start.spec.config)(trainer.state_dict())
    assert first["eval/return"] == first["eval/length"] > 0
    assert Evaluation(trainer.start.spec.config)(trainer.state_dict()) == first
    trainer.close()


def test_unknown_gymnasium_env_names_the_setting(tmp_path):
    config = prepare("Gymnasium", env={"id": "CartPole-v1"}).config
    with pytest.raises(ConfigError, match=r"eval\.num_envs=16: env\.id=Nothing-v1"):
        Evaluation({**config, "env": {**config["env"], "id": "Nothing-v1"}})
