"""Engines with killed or hanging actors: the others continue and the lost one is restarted."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch

from gpusim_rl.distributed import silence
from gpusim_rl.distributed.actor import Actor, ActorJob, EnvDescription, SentRollout, Stepped
from gpusim_rl.distributed.engine import MOST_DEATHS, MOST_DEATHS_PROVEN, Answer, Engine, Lost
from gpusim_rl.distributed.process_engine import ProcessEngine
from gpusim_rl.distributed.silence import Silence
from gpusim_rl.errors import ConfigError
from gpusim_rl.settings.compose import compose

PATIENCE_S = 120.0
ENGINES = ["process", pytest.param("ray", marks=pytest.mark.slow)]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="names of processes")


class Clock:
    """Manually advanced clock."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(silence, "time", clock)
    return clock


@contextmanager
def engine_of(kind: str, *words: str, num_actors: int = 1) -> Iterator[Engine]:
    """Start an engine and publish weights of version 7."""
    cartpole = ["task=Cartpole", "num_envs=2"]
    own = any(word.startswith("task=") for word in words)
    common = ["algo=impala", "impala.horizon=4", f"actors={kind}", f"num_actors={num_actors}"]
    config = compose([*([] if own else cartpole), *common, *words])
    jobs = [ActorJob(config, number, num_actors, 0) for number in range(num_actors)]
    if kind == "ray":
        pytest.importorskip("ray")
        from gpusim_rl.distributed.ray_engine import RayEngine

        engine: Engine = RayEngine(jobs, address=None)
    else:
        engine = ProcessEngine(jobs, pin=False)
    try:
        engine.start()
        here = Actor(jobs[0])
        engine.publish(7, here.acting_state())
        here.collector.close()
        yield engine
    finally:
        engine.close()


def answers(engine: Engine) -> Iterator[Answer]:
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        yield from engine.get(0.2)
    pytest.fail("no answer")


def actor_processes(kind: str) -> list[int]:
    word = "ray::RemoteActor" if kind == "ray" else "process_engine"
    below = psutil.Process().children(recursive=True)
    found = [it for it in below if it.status() != "zombie" and word in " ".join(it.cmdline())]
    return [it.pid for it in sorted(found, key=lambda it: it.create_time())]


def make_rollout(engine: Engine) -> None:
    """Record a rollout with the only, ready actor."""
    engine.ask_for_rollout(0)
    recorded = next(answers(engine))
    assert isinstance(recorded, SentRollout) and recorded.version == 7
    engine.release(recorded)


def wait_until_lost(engine: Engine) -> Lost:
    while isinstance(found := next(answers(engine)), SentRollout):  # the rollout came first
        engine.release(found)
        engine.ask_for_rollout(0)
    assert isinstance(found, Lost), found
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["process", "ray"])
def test_repeatedly_killed_actor_is_restarted(kind: str) -> None:
    with engine_of(kind) as engine:
        for kill in range(MOST_DEATHS + 1):  # more deaths than an actor without delivery is allowed
            assert isinstance(next(answers(engine)), EnvDescription)
            make_rollout(engine)
            began = time.monotonic()
            assert engine.get(0.2) == [] and time.monotonic() - began > 0.15, "no call is pending: `get` waits"
            if kill < MOST_DEATHS:
                [pid] = actor_processes(kind)
                engine.ask_for_rollout(0)
                os.kill(pid, signal.SIGKILL)
                wait_until_lost(engine)  # reported once for all pending calls


class Ledger(Engine):
    """Engine without actors that counts deaths."""

    start = publish = _ask = _get = _replace = close = lambda *args: None  # type: ignore[assignment]

    def delivers(self, actor: int) -> None:
        self._received(SentRollout(actor, (), 0, taken=None))  # type: ignore[arg-type]


def test_only_actors_without_delivery_end_run_after_three_deaths() -> None:
    engine = Ledger(2)
    for _ in range(MOST_DEATHS - 1):
        engine._died(0, "")
    engine.delivers(0)  # proven: tolerates more deaths, independently of actor 1
    for _ in range(4):
        for _ in range(MOST_DEATHS_PROVEN):
            engine._died(0, "")
        engine.delivers(0)
    engine._died(1, "")
    engine._died(1, "")
    with pytest.raises(ConfigError, match=r"actor 1: died 3 times.*: no memory"):
        engine._died(1, "no memory")
    with pytest.raises(ConfigError, match=f"actor 0: died {MOST_DEATHS_PROVEN} times"):
        for _ in range(MOST_DEATHS_PROVEN + 1):
            engine._died(0, "")


@pytest.mark.parametrize("kind", ENGINES)
def test_hanging_or_dead_actor_is_replaced(kind: str) -> None:
    with engine_of(kind, "actors.timeout_s=2") as engine:
        assert isinstance(next(answers(engine)), EnvDescription)
        make_rollout(engine)
        [pid] = actor_processes(kind)
        os.kill(pid, signal.SIGSTOP)
        engine.ask_for_rollout(0)
        lost = wait_until_lost(engine)
        assert lost.silent_s is not None and 2.0 <= lost.silent_s < 10.0
        for _ in range(MOST_DEATHS - 1 if kind == "process" else 0):  # Ray retries a start silently
            while not (pids := actor_processes(kind)) or pid in pids:
                time.sleep(0.01)  # the new process has no command line yet
            os.kill(pid := pids[0], signal.SIGKILL)
            assert isinstance(next(answers(engine)), Lost)
        assert isinstance(next(answers(engine)), EnvDescription)
        assert pid not in actor_processes(kind)
        make_rollout(engine)


STOPS_AT_START = """
import os, pathlib, signal
import gymnasium, numpy, torch

class Flag(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        return numpy.float32([torch.are_deterministic_algorithms_enabled()]), {}

    def step(self, action):
        return self.reset()[0], 0.0, False, False, {}

def make(num_envs, marker):
    if os.getpid() != int(os.environ["PID_OF_TESTS"]) and not pathlib.Path(marker).exists():
        pathlib.Path(marker).write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    return gymnasium.vector.SyncVectorEnv([Flag] * num_envs)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["process", "ray"])
def test_actor_hanging_while_making_envs_is_replaced(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    marker = tmp_path / "marker"
    (tmp_path / "flag_envs.py").write_text(STOPS_AT_START)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PID_OF_TESTS", str(os.getpid()))
    words = ["task=Gymnasium", "env._target_=flag_envs.make", f"+env.kwargs.marker='{marker}'", "num_envs=1"]
    with engine_of(kind, *words, "env.max_episode_steps=100", "torch_deterministic=true") as engine:
        torch.use_deterministic_algorithms(False)
        until = time.monotonic() + PATIENCE_S
        while not marker.exists() and time.monotonic() < until:
            assert engine.get(0.2) == []
        pid = int(marker.read_text())
        for _ in range(38):  # 10 x 60 s in steps of 15 s
            clock.now += 15.0
            assert engine.get(0.0) == []
        clock.now += 30.0
        assert engine.get(0.0) == []
        clock.now += 15.0
        [lost] = engine.get(0.0)
        assert isinstance(lost, Lost) and lost.silent_s == 600.0
        assert isinstance(next(answers(engine)), EnvDescription)
        assert pid not in actor_processes(kind)
        engine.ask_for_step(0, None)
        clock.now += 15.0
        stepped = next(answers(engine))
        assert isinstance(stepped, Stepped), "the first answer gets the same time again"
        assert stepped.obs is not None and stepped.obs["policy"].tolist() == [[True]], "torch_deterministic"


@pytest.mark.slow
def test_actor_waiting_for_learner_is_not_hung() -> None:
    with engine_of("process", "actors.timeout_s=2") as engine:
        next(answers(engine))
        make_rollout(engine)
        began = time.monotonic()
        while time.monotonic() - began < 5.0:
            assert engine.get(0.2) == []
        make_rollout(engine)


SENDS_A_PART = """
import os, signal, struct, sys
import gymnasium

class Stops(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        return self.observation_space.sample(), {}

    def step(self, action):
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps == 6:  # within the second rollout
            os.write(int(sys.argv[1]), struct.pack("!i", 1000) + b"a part")
            os.kill(os.getpid(), signal.SIGSTOP)
        return self.observation_space.sample(), 0.0, False, False, {}

def make(num_envs):
    return gymnasium.vector.SyncVectorEnv([Stops] * num_envs)
"""


@pytest.mark.slow
def test_actor_hanging_while_sending_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stops_envs.py").write_text(SENDS_A_PART)
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ["task=Gymnasium", "env._target_=stops_envs.make", "env.max_episode_steps=100", "num_envs=1"]
    with engine_of("process", *words, "actors.timeout_s=2") as engine:
        assert isinstance(next(answers(engine)), EnvDescription)
        make_rollout(engine)
        engine.ask_for_rollout(0)
        assert isinstance(next(answers(engine)), Lost)
        assert isinstance(next(answers(engine)), EnvDescription)
        make_rollout(engine)


def hung_actors(watch: Silence, clock: Clock, seconds: int) -> list[int]:
    """Advance the clock second by second; return the actors reported as hung."""
    found = []
    for _ in range(seconds):
        clock.now += 1.0
        found += [actor for actor, _ in watch.look()]
    return found


def answer_after(watch: Silence, clock: Clock, actor: int, seconds: int) -> None:
    watch.asked(actor)
    assert hung_actors(watch, clock, seconds) == []
    watch.answered(actor)


def test_silence_counts_only_while_answer_is_pending(clock: Clock) -> None:
    watch = Silence(2, 60.0)
    answer_after(watch, clock, 0, 1)
    assert hung_actors(watch, clock, 1000) == [], "no answer is pending"
    watch.asked(0)
    assert hung_actors(watch, clock, 59) == []
    assert hung_actors(watch, clock, 1) == [0]


def test_first_answer_after_start_gets_more_time(clock: Clock) -> None:
    watch = Silence(1, 60.0)
    for _ in range(2):
        watch.asked(0)
        assert hung_actors(watch, clock, 599) == []
        assert hung_actors(watch, clock, 1) == [0]
        watch.begins(0)


def test_slow_envs_get_more_time(clock: Clock) -> None:
    watch = Silence(2, 60.0)
    answer_after(watch, clock, 0, 100)
    answer_after(watch, clock, 1, 1)
    watch.asked(1)
    assert hung_actors(watch, clock, 399) == [], "four times the duration of actor 0"
    assert hung_actors(watch, clock, 1) == [1]


def test_long_compilation_extends_timeout_only_once(clock: Clock) -> None:
    watch = Silence(2, 60.0)
    for actor in (0, 1):
        answer_after(watch, clock, actor, 300)
        for _ in range(8):
            answer_after(watch, clock, actor, 1)
    watch.asked(1)
    assert hung_actors(watch, clock, 60) == [1]


def test_pause_of_learner_does_not_mark_actors_hung(clock: Clock) -> None:
    watch = Silence(1, 60.0)
    answer_after(watch, clock, 0, 1)
    watch.asked(0)
    for away in range(1, 5):  # a long update, or a suspended machine
        clock.now += 3600.0
        assert watch.look() == ([(0, 60.0)] if away == 4 else [])
    watch.begins(0)
    answer_after(watch, clock, 0, 1)
    watch.asked(0)
    clock.now += 3600.0
    watch.look()
    watch.answered(0)
    watch.asked(0)
    assert hung_actors(watch, clock, 60) == [0], "the pause does not count as a slow answer"


def test_without_timeout_no_actor_is_hung(clock: Clock) -> None:
    watch = Silence(1, None)
    answer_after(watch, clock, 0, 1)
    watch.asked(0)
    assert hung_actors(watch, clock, 10_000) == []
