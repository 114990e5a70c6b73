"""Signs of life of processes that learn together: whose silence ends a run, and whose does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from torch.distributed import HashStore, Store  # type: ignore[reportPrivateImportUsage]

from gpusim_rl.distributed.heartbeat import LEFT, Heartbeat
from helpers.commands import ROOT

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
LOST_AFTER_S = 0.6


@pytest.fixture
def said(monkeypatch) -> list[str | None]:
    """What ends this process, in place of its end."""
    problems: list[str | None] = []

    def end(self: Heartbeat, problem: str | None = None) -> None:
        self.over = True
        problems.append(problem)
        raise SystemExit  # ends the thread

    monkeypatch.setattr(Heartbeat, "_end", end)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "first")
    return problems


def heartbeat(store: Store, rank: int = 0) -> Heartbeat:
    """The heartbeat of one of two processes."""
    return Heartbeat(store, rank, 2, LOST_AFTER_S)


def test_the_line_names_the_process_that_is_silent(said):
    store = HashStore()
    store.set("beat_1", "7 (pid 5 on there)")
    with heartbeat(store) as first:
        time.sleep(2 * LOST_AFTER_S)
        assert first.over
    assert said == ["no sign of life of process 1 (pid 5 on there)"]


def test_a_process_that_is_done_is_not_lost(said):
    store = HashStore()
    store.set("beat_1", LEFT)
    with heartbeat(store):
        time.sleep(2 * LOST_AFTER_S)
    assert said == []
    assert store.get("beat_0") == LEFT.encode()


def test_a_process_that_ends_with_an_error_is_lost(said):
    store = HashStore()
    with heartbeat(store) as first:
        with pytest.raises(ZeroDivisionError), heartbeat(store, 1):
            time.sleep(LOST_AFTER_S / 4)
            raise ZeroDivisionError
        time.sleep(2 * LOST_AFTER_S)
        assert first.over
    assert said[0] is not None and said[0].startswith(f"no sign of life of process 1 (pid {os.getpid()} on ")


def test_a_process_that_computes_for_long_is_not_lost(said):
    store = HashStore()
    other = heartbeat(store, 1)
    with heartbeat(store), other:
        until = time.monotonic() + 3 * LOST_AFTER_S
        while time.monotonic() < until:  # a compiler, or a task: it never waits
            sum(range(100_000))
    assert said == []


def test_one_process_tells_it_and_the_others_end_with_it(said):
    store = HashStore()
    beats = [Heartbeat(store, rank, 3, LOST_AFTER_S) for rank in (0, 2)]
    store.set("beat_1", "7 (pid 5 on there)")
    with beats[0], beats[1]:
        time.sleep(2 * LOST_AFTER_S)
    assert [problem for problem in said if problem] == ["no sign of life of process 1 (pid 5 on there)"]
    assert len(said) == 2


def test_a_store_that_is_silent_is_told(said):
    class Silent(HashStore):
        def multi_get(self, keys: list[str]) -> list[bytes]:
            gone.wait(10 * LOST_AFTER_S)
            raise RuntimeError("connection reset")

    gone = threading.Event()
    with heartbeat(Silent()):
        time.sleep(2 * LOST_AFTER_S)
        gone.set()
    assert said == ["no answer from first, the machine of process 0,"]


@pytest.mark.skipif(sys.platform == "win32", reason="SIGSTOP")
def test_a_process_that_has_stopped_is_killed_and_goes_on_after_a_short_stop():
    script = (
        "import time; from torch.distributed import HashStore; from gpusim_rl.distributed.heartbeat import Heartbeat\n"
        "store = HashStore()\n"
        "with Heartbeat(store, 0, 1, 3.0):\n"
        "    print('beats', flush=True)\n"
        "    time.sleep(60)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "LOCAL_RANK": "0", "MASTER_ADDR": "here"}
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "beats\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.0)
        process.send_signal(signal.SIGCONT)
        time.sleep(1.0)
        assert process.poll() is None
        process.send_signal(signal.SIGSTOP)
        assert process.wait(30) == -signal.SIGKILL
        said = process.stderr.read()
    assert f"process 0 of 1 (pid {process.pid} on " in said
    assert said.endswith("did not run for 3 s (lost_after_s): it is killed\n")
