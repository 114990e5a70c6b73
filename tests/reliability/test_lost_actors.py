"""Actors that are killed or hang during training."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from helpers.background import Training
from helpers.training import the_run
from reliability.processes import saved_iteration
from reliability.record import record

pytest_plugins = ["helpers.background"]

WORDS = ("task=Cartpole", "algo=impala", "impala.network.hidden=[16,16]", "num_envs=4", "max_iterations=1000000")
WORDS += ("actors=process", "num_actors=2", "actors.timeout_s=3", "log.console=plain")


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("number", "count"), [(signal.SIGSTOP, 3), (signal.SIGKILL, 10)], ids=["hangs", "killed"])
def test_lost_actor_is_restarted(training: Callable[..., Training], number: signal.Signals, count: int) -> None:
    it, hangs, times = training(*WORDS), number == signal.SIGSTOP, []
    for lost in range(1, count + 1):
        it.wait_for(lambda: it.number("actors/alive") == 2 and len(it.actors()) == 2)
        before = it.number("iteration")
        it.wait_for(lambda before=before: it.number("iteration") > before + 20)
        it.actors()[0].send_signal(number)
        times.append(it.wait_for(lambda lost=lost: it.number("actors/restarts") == lost))
    it.wait_for(lambda: it.number("actors/alive") == 2)
    rollouts, output = it.number("actors/lost_rollouts"), it.end()
    assert saved_iteration(the_run(it.folder / "runs")) == it.number("iteration")
    assert output.count("was silent for" if hangs else "died; restarting it") == count and rollouts <= count
    record(
        "Hung actor" if hangs else "Killed actor",
        f"{number.name} to one of two actors, repeatedly" + ", `actors.timeout_s=3`" * hangs,
        count,
        f"restarted within {max(times):.1f} s; training continues",
        f"{rollouts:.0f} rollouts",
    )
