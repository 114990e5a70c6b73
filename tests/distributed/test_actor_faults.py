"""What an engine does when an actor is killed or hangs: the others go on, and the lost one comes back."""

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
    """Time that a test tells."""

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
    """An engine that was started, and has weights of version 7."""
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
    """Lets the one actor, which is ready, record a rollout."""
    engine.ask_for_rollout(0)
    recorded = next(answers(engine))
    assert isinstance(recorded, SentRollout) and recorded.version == 7
    engine.release(recorded)


def until_lost(engine: Engine) -> Lost:
    while isinstance(found := next(answers(engine)), SentRollout):  # it was faster
        engine.release(found)
        engine.ask_for_rollout(0)
    assert isinstance(found, Lost), found
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["process", "ray"])
def test_a_working_actor_that_is_killed_again_and_again_comes_back(kind: str) -> None:
    with engine_of(kind) as engine:
        for kill in range(MOST_DEATHS + 1):  # more often than an actor may die before it has done anything
            assert isinstance(next(answers(engine)), EnvDescription)
            make_rollout(engine)
            began = time.monotonic()
            assert engine.get(0.2) == [] and time.monotonic() - began > 0.15, "nothing is under way: it waits"
            if kill < MOST_DEATHS:
                [pid] = actor_processes(kind)
                engine.ask_for_rollout(0)
                os.kill(pid, signal.SIGKILL)
                until_lost(engine)  # once, however many calls were under way


class Ledger(Engine):
    """An engine without actors: it only counts their deaths."""

    start = publish = _ask = _get = _replace = close = lambda *args: None  # type: ignore[assignment]

    def delivers(self, actor: int) -> None:
        self._received(SentRollout(actor, (), 0, taken=None))  # type: ignore[arg-type]


def test_only_actors_that_never_delivered_end_the_run_after_three_deaths() -> None:
    engine = Ledger(2)
    for _ in range(MOST_DEATHS - 1):
        engine._died(0, "")
    engine.delivers(0)  # from now on a machine may take it, whatever the other one does
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
def test_an_actor_that_hangs_or_dies_is_replaced(kind: str) -> None:
    with engine_of(kind, "actors.timeout_s=2") as engine:
        assert isinstance(next(answers(engine)), EnvDescription)
        make_rollout(engine)
        [pid] = actor_processes(kind)
        os.kill(pid, signal.SIGSTOP)
        engine.ask_for_rollout(0)
        lost = until_lost(engine)
        assert lost.silent_s is not None and 2.0 <= lost.silent_s < 10.0
        for _ in range(MOST_DEATHS - 1 if kind == "process" else 0):  # Ray retries a start without telling
            while not (pids := actor_processes(kind)) or pid in pids:
                time.sleep(0.01)  # the next one has no command line yet
            os.kill(pid := pids[0], signal.SIGKILL)
            assert isinstance(next(answers(engine)), Lost)
        assert isinstance(next(answers(engine)), EnvDescription)
        assert pid not in actor_processes(kind)
        make_rollout(engine)


STOPS_AT_ITS_START = """
import os, pathlib, signal
import gymnasium, numpy, torch

class Tells(gymnasium.Env):
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
    return gymnasium.vector.SyncVectorEnv([Tells] * num_envs)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["process", "ray"])
def test_an_actor_that_hangs_while_it_makes_its_envs_is_replaced(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    marker = tmp_path / "marker"
    (tmp_path / "tells_envs.py").write_text(STOPS_AT_ITS_START)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PID_OF_TESTS", str(os.getpid()))
    words = ["task=Gymnasium", "env._target_=tells_envs.make", f"+env.kwargs.marker='{marker}'", "num_envs=1"]
    with engine_of(kind, *words, "env.max_episode_steps=100", "torch_deterministic=true") as engine:
        torch.use_deterministic_algorithms(False)
        until = time.monotonic() + PATIENCE_S
        while not marker.exists() and time.monotonic() < until:
            assert engine.get(0.2) == []
        pid = int(marker.read_text())
        for _ in range(38):  # 10 x 60 s, 15 s at a look
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
        assert isinstance(stepped, Stepped), "its first answer has as long again"
        assert stepped.obs is not None and stepped.obs["policy"].tolist() == [[True]], "kernels as the learner's"


@pytest.mark.slow
def test_an_actor_that_waits_for_the_learner_does_not_hang() -> None:
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
def test_an_actor_that_hangs_while_it_sends_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def looks(watch: Silence, clock: Clock, seconds: int) -> list[int]:
    """Actors that hang, with a look each second."""
    found = []
    for _ in range(seconds):
        clock.now += 1.0
        found += [actor for actor, _ in watch.look()]
    return found


def answer_after(watch: Silence, clock: Clock, actor: int, seconds: int) -> None:
    watch.asked(actor)
    assert looks(watch, clock, seconds) == []
    watch.answered(actor)


def test_silence_of_an_actor_that_owes_an_answer_is_measured(clock: Clock) -> None:
    watch = Silence(2, 60.0)
    answer_after(watch, clock, 0, 1)
    assert looks(watch, clock, 1000) == [], "it is asked for nothing"
    watch.asked(0)
    assert looks(watch, clock, 59) == []
    assert looks(watch, clock, 1) == [0]


def test_the_first_answer_after_a_start_has_more_time(clock: Clock) -> None:
    watch = Silence(1, 60.0)
    for _ in range(2):
        watch.asked(0)
        assert looks(watch, clock, 599) == []
        assert looks(watch, clock, 1) == [0]
        watch.begins(0)


def test_slow_envs_have_more_time(clock: Clock) -> None:
    watch = Silence(2, 60.0)
    answer_after(watch, clock, 0, 100)
    answer_after(watch, clock, 1, 1)
    watch.asked(1)
    assert looks(watch, clock, 399) == [], "four times what actor 0 took"
    assert looks(watch, clock, 1) == [1]


def test_kernels_that_compiled_for_long_give_no_time_for_ever(clock: Clock) -> None:
    watch = Silence(2, 60.0)
    for actor in (0, 1):
        answer_after(watch, clock, actor, 300)
        for _ in range(8):
            answer_after(watch, clock, actor, 1)
    watch.asked(1)
    assert looks(watch, clock, 60) == [1]


def test_a_learner_that_was_away_takes_nobody_for_hung(clock: Clock) -> None:
    watch = Silence(1, 60.0)
    answer_after(watch, clock, 0, 1)
    watch.asked(0)
    for away in range(1, 5):  # a long update, or the machine slept
        clock.now += 3600.0
        assert watch.look() == ([(0, 60.0)] if away == 4 else [])
    watch.begins(0)
    answer_after(watch, clock, 0, 1)
    watch.asked(0)
    clock.now += 3600.0
    watch.look()
    watch.answered(0)
    watch.asked(0)
    assert looks(watch, clock, 60) == [0], "the time away was no answer that took long"


def test_without_a_timeout_nobody_hangs(clock: Clock) -> None:
    watch = Silence(1, None)
    answer_after(watch, clock, 0, 1)
    watch.asked(0)
    assert looks(watch, clock, 10_000) == []
