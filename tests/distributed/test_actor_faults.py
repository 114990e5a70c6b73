"""What an engine does when an actor is killed: the others go on, and the killed one comes back."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from gpusim_rl.distributed.actor import Actor, ActorJob, EnvDescription, SentRollout
from gpusim_rl.distributed.engine import Answer, Lost
from gpusim_rl.distributed.ray_engine import RayEngine
from gpusim_rl.settings.compose import compose

PATIENCE_S = 120.0


def answers(engine: RayEngine) -> Iterator[Answer]:
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        yield from engine.get(0.2)
    pytest.fail("no answer")


def ray_actors() -> set[int]:
    below = psutil.Process().children(recursive=True)
    return {it.pid for it in below if it.status() != "zombie" and "ray::RemoteActor" in " ".join(it.cmdline())}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="names of Ray's processes")
def test_an_actor_of_ray_that_is_killed_again_and_again_comes_back():
    pytest.importorskip("ray")
    words = ["task=Cartpole", "algo=impala", "num_envs=2", "num_actors=1", "impala.horizon=4", "actors=ray"]
    job = ActorJob(compose(words), 0, 1, 0)
    engine = RayEngine([job], address=None)
    try:
        engine.start()
        here = Actor(job)
        engine.publish(7, here.acting_state())
        here.collector.close()
        for kill in range(4):  # more often than an actor may die before it has done anything
            assert isinstance(next(answers(engine)), EnvDescription)
            engine.ask_for_rollout(0)
            recorded = next(answers(engine))
            assert isinstance(recorded, SentRollout) and recorded.version == 7
            began = time.monotonic()
            assert engine.get(0.2) == [] and time.monotonic() - began > 0.15, "nothing is under way: it waits"
            if kill < 3:
                [pid] = ray_actors()
                engine.ask_for_rollout(0)
                os.kill(pid, signal.SIGKILL)
                while isinstance(found := next(answers(engine)), SentRollout):  # it was faster
                    engine.ask_for_rollout(0)
                assert isinstance(found, Lost)  # once, however many calls were under way
    finally:
        engine.close()
