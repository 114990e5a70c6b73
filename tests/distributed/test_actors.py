"""Training with actors: rollouts of the learner, lost actors, metrics and errors."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from gpusim_rl.api import prepare
from gpusim_rl.distributed import actors, ray_cluster, rollouts
from gpusim_rl.distributed.actor import Actor, ActorJob, EnvDescription, SentRollout
from gpusim_rl.distributed.actors import make_trainer
from gpusim_rl.distributed.engine import Engine, Lost
from gpusim_rl.distributed.rollouts import ActorsRollouts, Rollouts
from gpusim_rl.errors import ConfigError
from gpusim_rl.files import provenance
from gpusim_rl.files.checkpoint_file import load
from gpusim_rl.learn.algorithm import ActorPlace
from gpusim_rl.learn.collective import ALONE
from gpusim_rl.run import make_learner
from gpusim_rl.run.start import RunStart
from gpusim_rl.spaces import Box
from helpers.commands import ROOT, Finished, run_command, run_here
from helpers.training import read_csv, the_run

pytest_plugins = ["helpers.background"]

NETWORK = "impala.network.hidden=[16,16]"
SMALL = ("task=Cartpole", "algo=impala", NETWORK, "num_envs=4", "num_actors=2", "log.console=plain")
LONG = "max_iterations=1000000"


def train(folder: Path, *arguments: str, check: bool = True) -> Finished:
    """Run `python train.py` as a user would."""
    return run_command(sys.executable, ROOT / "train.py", *arguments, cwd=folder, check=check)


@pytest.mark.parametrize("inference", ["actor", pytest.param("learner", marks=pytest.mark.slow)])
def test_actor_training_logs_actor_metrics(tmp_path: Path, inference: str) -> None:
    words = ("actors=process", f"actors.inference={inference}", "max_iterations=12", "log.interval=4")
    run_here(ROOT / "train.py", *SMALL, *words, cwd=tmp_path)
    run = the_run(tmp_path / "runs")
    rows = read_csv(run, machine=True)
    assert [row["iteration"] for row in rows] == ["4", "8", "12"]
    last = rows[-1]
    assert int(last["env_steps"]) == 12 * 4 * 8  # a rollout has 4 envs and 8 control steps
    assert float(last["actors/alive"]) >= 1 and float(last["actors/restarts"]) == 0
    assert 0.0 <= float(last["policy/lag_min"]) <= float(last["policy/lag_mean"]) <= float(last["policy/lag_max"]) <= 8
    assert 0.0 < float(last["time/actors"]) < 1.0 and 0.0 <= float(last["actors/wait"]) <= 1.0
    assert float(last["episode/length"]) > 1


@pytest.mark.slow
def test_apex_fills_replay_memory_from_actors(tmp_path: Path) -> None:
    small = ("algo=apex", "dqn.learning_starts=64", "dqn.batch_size=32", "dqn.replay.capacity=4000")
    base = [word for word in SMALL if "impala" not in word]
    train(tmp_path, *base, *small, "dqn.network.hidden=[16]", "actors=process", "max_iterations=8")
    rows = read_csv(the_run(tmp_path / "runs"))
    assert [int(float(row["replay/transitions"])) for row in rows][-1] == 8 * 4 * 16 == int(rows[-1]["env_steps"])
    assert float(rows[-1]["loss/critic"]) > 0.0
    # resume with the same replay buffer
    train(tmp_path, "checkpoint=Cartpole", "max_iterations=10", "actors=process")
    rows = read_csv(the_run(tmp_path / "runs"))
    assert [int(float(row["replay/transitions"])) for row in rows][-1] == 10 * 4 * 16
    done = train(tmp_path, "checkpoint=Cartpole", "max_iterations=11", "actors=process", "num_actors=4")
    assert "refilling" in done.stderr


@pytest.mark.slow
def test_rollouts_are_equal_with_either_inference_place(tmp_path: Path) -> None:
    found = []
    settings: dict[str, Any] = {"algo": "impala", "num_envs": 4, "num_actors": 1, "max_iterations": 5}
    settings["impala"] = {"network": {"hidden": [16, 16]}, "precision": "fp32"}
    settings["log"] = {"dir": str(tmp_path), "console": "quiet"}
    for inference in ("actor", "learner"):
        spec = prepare("Cartpole", actors={"engine": "process", "inference": inference}, **settings)
        trainer = make_trainer(spec, ALONE)
        try:
            trainer.collector.collect()  # the first rollout uses the learner's initial weights
            found.append([tensor.clone() for tensor, _ in trainer.collector._remote.recording()])
        finally:
            trainer.close()
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_resumed_run_uses_new_exploration_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def jobs(**more: Any) -> list[int]:
        seeds = []

        def seen(start: RunStart, jobs: list[ActorJob]) -> Engine:
            seeds.extend(job.seed for job in jobs)
            raise ConfigError("seen")

        spec = prepare("Cartpole", **{**settings, **more})
        with monkeypatch.context() as patch, pytest.raises(ConfigError, match="seen"):
            patch.setattr(actors, "_make_engine", seen)
            make_trainer(spec)
        return seeds

    small = {"network": {"hidden": [8]}}
    log = {"dir": str(tmp_path), "console": "quiet"}
    settings: dict[str, Any] = {"algo": "impala", "num_envs": 4, "num_actors": 2, "actors": "process", "impala": small}
    settings |= {"log": log, "max_iterations": 3}
    make_trainer(prepare("Cartpole", **settings), ALONE).train()
    assert jobs() == jobs() != jobs(checkpoint=str(the_run(tmp_path)), max_iterations=4)


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["impala", "sac", "td3"])
def test_run_resumes_with_or_without_actors(tmp_path: Path, algo: str) -> None:
    small = [f"{algo}.network.hidden=[16]"]
    if algo != "impala":
        small += [f"{algo}.learning_starts=64", f"{algo}.batch_size=32", f"{algo}.replay.capacity=4000"]
    base = ("task=Cartpole", f"algo={algo}", "num_envs=4", *small)
    first = train(tmp_path, *base, "actors=process", "num_actors=2", "max_iterations=4")
    assert re.search(r"checkpoint=\S+ actors=process num_actors=2 max_iterations=8$", first.stdout, re.MULTILINE)
    train(tmp_path, "checkpoint=Cartpole", "max_iterations=6", "actors=process", "num_actors=4")
    without = train(tmp_path, "checkpoint=Cartpole", "max_iterations=8")
    assert re.match(r"warning: .* runs/Cartpole/2.* actors=process num_actors=4", without.stderr)
    train(tmp_path, "checkpoint=Cartpole", "max_iterations=10", "actors=process", "num_actors=2")
    iterations = [int(row["iteration"]) for row in read_csv(the_run(tmp_path / "runs"))]
    assert iterations == [*range(1, 11)]


class _Local(Engine):
    """Engine without processes."""

    waits_for = ""

    def start(self) -> None: ...
    def publish(self, version: int, state: Mapping[str, Tensor]) -> None: ...
    def _ask(self, actor: int, request: str, argument: Any) -> None: ...
    def _replace(self, actor: int, silent_s: float | None) -> Lost:
        return Lost(actor, silent_s)

    def _get(self, timeout_s: float) -> list[Any]:
        return []

    def close(self) -> None: ...


def test_actor_gets_its_place_and_no_replay_memory(monkeypatch):
    places: list[Any] = []
    make = make_learner.make_algorithm
    monkeypatch.setattr(make_learner, "make_algorithm", lambda *args: places.append(args[2]) or make(*args))
    config = prepare("Cartpole", algo="apex", num_envs=4, device="cpu").config
    made = Actor(ActorJob(config, 1, 3, 0))
    made.collector.close()
    assert places == [ActorPlace(4, 12)] and made.collector.algorithm.replay is None


class _Scheduled(Rollouts):
    """Rollouts of an in-process actor with scheduled weight versions."""

    def __init__(self, job: ActorJob, versions: list[int]) -> None:
        super().__init__(_Local(1))
        self.actor, self.versions, self.released = Actor(job), versions, 0
        self.state: Mapping[str, Tensor] = {}

    def start(self) -> None:
        self.envs = self.actor.describe()
        self.progress = self.envs.progress

    def publish(self, version: int, state: Mapping[str, Tensor]) -> None:
        self.state = {name: x.clone() for name, x in state.items()}

    def next(self, timeout_s: float) -> SentRollout:
        return self.actor.rollout(self.versions.pop(0), self.state)

    def release(self, rollout: SentRollout) -> None:
        self.released += 1

    def numbers(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        self.actor.collector.close()


def test_actors_ready_together_are_all_asked() -> None:
    others = 3
    ready: list[list[Any]] = [
        [EnvDescription(actor, {"policy": 3}, {}, Box(1), 100, 100, "", [], {}) for actor in range(1 + others)]
    ]
    asked = list[int]()

    class Ready(_Local):
        def _get(self, timeout_s: float) -> list[Any]:
            return ready.pop()

        def _ask(self, actor: int, request: str, argument: Any) -> None:
            asked.append(actor)

    recorded = ActorsRollouts(Ready(1 + others))
    recorded.start()
    recorded.publish(0, {})
    assert sorted(set(asked)) == [*range(1 + others)] and recorded.numbers()["actors/alive"] == 1 + others


def test_policy_lag_is_logged_and_stale_rollouts_are_dropped(tmp_path: Path, monkeypatch) -> None:
    # Iterations 0 to 3 take two rollouts each. Version 0 is too old in iteration 3.
    versions = [0, 0, 0, 1, 2, 0, 0, 3, 0, 1]
    scheduled: list[_Scheduled] = []

    def make_rollouts(start: RunStart, *_: Any) -> Rollouts:
        scheduled.append(_Scheduled(ActorJob(start.spec.config, 0, 1, 0), versions))
        return scheduled[0]

    monkeypatch.setattr(actors, "_make_rollouts", make_rollouts)
    monkeypatch.setattr(actors, "_make_engine", lambda *_: _Local(1))
    settings: dict[str, Any] = {"algo": "impala", "num_envs": 4, "num_actors": 1, "max_iterations": 4}
    settings["impala"] = {"max_policy_lag": 2, "network": {"hidden": [8]}}
    settings["log"] = {"dir": str(tmp_path), "console": "quiet", "interval": 2}
    trainer = make_trainer(prepare("Cartpole", actors={"engine": "process", "rollouts": 2}, **settings), ALONE)
    trainer.train()
    first, second = read_csv(the_run(tmp_path))
    assert versions == [] and scheduled[0].released == 10
    lags = [[float(row[f"policy/lag_{name}"]) for name in ("min", "mean", "max")] for row in (first, second)]
    assert lags == [[0.0, 0.25, 1.0], [0.0, 1.0, 2.0]]  # 0 0 1 0, then 0 2 0 2
    dropped = [float(row["policy/dropped"]) for row in (first, second)]
    assert dropped == pytest.approx([0.0, 2 / 6])
    assert int(second["env_steps"]) == 4 * 2 * 4 * 8


@pytest.mark.slow
def test_killed_learner_leaves_no_actors_and_run_resumes(training, tmp_path: Path) -> None:
    it = training(*SMALL, "actors=process", LONG, "log.checkpoint_interval=20")
    it.wait_for(lambda: len([*tmp_path.glob("runs/Cartpole/2*/checkpoints/last.pt")]) == 1 and len(it.actors()) == 2)
    actors = it.actors()
    it.process.kill()
    _, alive = psutil.wait_procs(actors, timeout=20)
    assert alive == []
    saved = load(the_run(tmp_path / "runs") / "checkpoints" / "last.pt")["iteration"]
    done = train(tmp_path, "checkpoint=Cartpole", "actors=process", f"max_iterations={saved + 5}")
    assert f"resumed at iteration {saved}" in " ".join(done.stdout.split())
    iterations = [int(row["iteration"]) for row in read_csv(the_run(tmp_path / "runs"))]
    assert iterations == [*range(1, saved + 6)]


def test_learner_that_fails_to_build_leaves_no_actors(tmp_path: Path, monkeypatch) -> None:
    def fail(*_: Any) -> None:
        raise ConfigError("does not fit")

    closed = list[bool]()
    monkeypatch.setattr(rollouts, "make_algorithm", fail)
    scheduled = lambda start, *_: _Scheduled(ActorJob(start.spec.config, 0, 1, 0), [])  # noqa: E731
    monkeypatch.setattr(actors, "_make_rollouts", scheduled)
    monkeypatch.setattr(actors, "_make_engine", lambda *_: _Local(1))
    monkeypatch.setattr(_Scheduled, "close", lambda _: closed.append(True))
    spec = prepare("Cartpole", algo="impala", num_envs=4, num_actors=1, actors="process", log={"dir": str(tmp_path)})
    with pytest.raises(ConfigError, match="does not fit"):
        make_trainer(spec, ALONE)
    assert closed == [True]


def test_failing_actor_ends_run_and_names_cause(tmp_path: Path) -> None:
    (tmp_path / "no_envs.py").write_text("def make(num_envs):\n    raise RuntimeError('no license')\n")
    broken = ("task=Gymnasium", "env._target_=no_envs.make", "algo=impala", "actors=process", "num_actors=1")
    done = run_here(ROOT / "train.py", *broken, cwd=tmp_path)
    assert done.returncode == 2 and "no_envs.py" in done.stderr, done.stderr
    assert re.search(r"^error: env\._target_=no_envs\.make: .*RuntimeError: no license", done.stderr, re.MULTILINE)
    assert not (tmp_path / "runs").exists()


NOT_FINITE = """
import gymnasium

class Nan(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,))
    action_space = gymnasium.spaces.Discrete(2)
    steps = 0

    def reset(self, seed=None, options=None):
        return self.observation_space.sample(), {}

    def step(self, action):
        self.steps += 1
        return self.observation_space.sample(), float("nan") if self.steps == 5 else 0.0, False, False, {}

def make(num_envs):
    return gymnasium.vector.SyncVectorEnv([Nan] * num_envs)
"""


@pytest.mark.parametrize(
    ("engine", "inference"),
    [
        ("process", "actor"),
        pytest.param("process", "learner", marks=pytest.mark.slow),
        pytest.param("ray", "actor", marks=pytest.mark.slow),
    ],
)
def test_actor_warning_is_logged_once_by_learner(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, engine: str, inference: str
) -> None:
    if engine == "ray":
        pytest.importorskip("ray")
    (tmp_path / "nan_envs.py").write_text(NOT_FINITE)
    words = ("task=Gymnasium", "env._target_=nan_envs.make", "env.max_episode_steps=50", "algo=impala", NETWORK)
    words += (f"actors={engine}", f"actors.inference={inference}", "num_actors=2", "num_envs=2", "max_iterations=8")
    done = run_here(ROOT / "train.py", *words, "actors.rollouts=2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    [line] = [text for record in caplog.records if "returned NaN" in (text := record.getMessage())]
    assert re.match(r"actor [01]: nan_envs.make: .*\(reward of env [01]\)", line), line


@pytest.mark.slow
def test_actor_that_always_dies_ends_run_with_one_line(tmp_path: Path) -> None:
    code = "import os\ndef make(num_envs):\n    os.write(2, b'bad luck\\n'); os._exit(7)\n"
    (tmp_path / "my_envs.py").write_text(code)
    broken = ("task=Gymnasium", "env._target_=my_envs.make", "algo=impala", "actors=process", "num_actors=1")
    done = train(tmp_path, *broken, check=False)
    assert done.returncode == 2 and "actor 0: died 3 times" in done.stderr and "bad luck" in done.stderr, done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["num_actors=2"], "num_actors=2"),
        (["actors=process"], "which learns only"),
        (["actors=process", "algo=impala", "multi_gpu=true"], "multi_gpu=false"),
        (["actors=process", "algo=impala", "sim_device=cuda"], "expected cpu"),
    ],
)
def test_wrong_actor_settings_are_rejected_in_one_line(tmp_path: Path, typed: list[str], expected: str) -> None:
    done = run_here(ROOT / "train.py", "task=Cartpole", *typed, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and expected in done.stderr, done.stderr
    assert not (tmp_path / "runs").exists()


def test_missing_ray_is_reported_with_pip_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # simulates a missing package
    done = run_here(ROOT / "train.py", *SMALL, "actors=ray", cwd=tmp_path)
    assert done.returncode == 2 and "actors=ray" in done.stderr and "pip install" in done.stderr, done.stderr


def test_untested_ray_version_is_rejected(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())
    monkeypatch.setattr(provenance, "installed_version", {"ray": "3.1.0"}.get)
    with pytest.raises(ConfigError, match=re.escape(f"actors=ray needs {ray_cluster.REQUIREMENT}, but 3.1.0 is")):
        ray_cluster.require_ray("actors=ray")
    assert f'ray = ["{ray_cluster.REQUIREMENT}"]' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("inference", ["actor", "learner"])
def test_ray_restarts_killed_actor(training, inference: str) -> None:
    pytest.importorskip("ray")
    it = training(*SMALL, "actors=ray", f"actors.inference={inference}", LONG)

    it.wait_for(lambda: it.number("actors/alive") == 2, 90)
    it.actors("RemoteActor")[0].kill()
    it.wait_for(lambda: it.number("actors/restarts") == 1)
    it.wait_for(lambda: it.number("actors/alive") == 2)
    before = it.number("iteration")
    it.wait_for(lambda: it.number("iteration") > before + 20)
    assert it.number("actors/lost_rollouts") <= 2 and 0.0 <= it.number("actors/object_store") < 0.5
    it.end()


@pytest.mark.slow
def test_impala_solves_cartpole_with_actors(tmp_path: Path) -> None:
    words = ("task=Cartpole", "algo=impala", "actors=process", "num_actors=2", "num_envs=64", "max_iterations=1500")
    train(tmp_path, *words)
    last = read_csv(the_run(tmp_path / "runs"))[-1]
    assert float(last["episode/best_return"]) > 400


@pytest.mark.parametrize("address", [None, "localhost:1"])
def test_ray_start_failure_is_reported_in_one_line(monkeypatch, address):
    def init(*_, **__):
        raise Exception("The current node timed out during startup. This could happen because\nsome of the raylet")

    def require_ray(*_):
        return SimpleNamespace(init=init, is_initialized=lambda: False)

    monkeypatch.setattr(ray_cluster, "require_ray", require_ray)
    monkeypatch.setattr(ray_cluster, "_look_for", str)
    with pytest.raises(ConfigError) as error, ray_cluster.ray_cluster("actors=ray", address=address):
        pass
    assert error.value.key == "actors=ray" and "\n" not in str(error.value)
    assert ("localhost:1" if address else "this machine") in error.value.problem
