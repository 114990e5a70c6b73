"""Heartbeat of data-parallel processes: detection of silent, finished and busy processes."""

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
def reported(monkeypatch) -> list[str | None]:
    """Problems reported by heartbeats, which would end the process outside of tests."""
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
    """Build the heartbeat of one of two processes."""
    return Heartbeat(store, rank, 2, LOST_AFTER_S)


def test_error_names_silent_process(reported):
    store = HashStore()
    store.set("beat_1", "7 (pid 5 on there)")
    with heartbeat(store) as first:
        time.sleep(2 * LOST_AFTER_S)
        assert first.over
    assert len(reported) == 1 and "process 1 (pid 5 on there)" in reported[0]


def test_finished_process_is_not_lost(reported):
    store = HashStore()
    store.set("beat_1", LEFT)
    with heartbeat(store):
        time.sleep(2 * LOST_AFTER_S)
    assert reported == []
    assert store.get("beat_0") == LEFT.encode()


def test_process_ending_with_error_is_lost(reported):
    store = HashStore()
    with heartbeat(store) as first:
        with pytest.raises(ZeroDivisionError), heartbeat(store, 1):
            time.sleep(LOST_AFTER_S / 4)
            raise ZeroDivisionError
        time.sleep(2 * LOST_AFTER_S)
        assert first.over
    assert reported[0] is not None and f"process 1 (pid {os.getpid()} on " in reported[0]


def test_busy_process_is_not_lost(reported):
    store = HashStore()
    other = heartbeat(store, 1)
    with heartbeat(store), other:
        until = time.monotonic() + 3 * LOST_AFTER_S
        while time.monotonic() < until:  # busy without ever waiting, like a compiler
            sum(range(100_000))
    assert reported == []


def test_one_process_reports_loss_and_all_end(reported):
    store = HashStore()
    beats = [Heartbeat(store, rank, 3, LOST_AFTER_S) for rank in (0, 2)]
    store.set("beat_1", "7 (pid 5 on there)")
    with beats[0], beats[1]:
        time.sleep(2 * LOST_AFTER_S)
    [problem] = filter(None, reported)
    assert len(reported) == 2 and "process 1 (pid 5 on there)" in problem


def test_silent_store_is_reported(reported):
    class Silent(HashStore):
        def multi_get(self, keys: list[str]) -> list[bytes]:
            gone.wait(10 * LOST_AFTER_S)
            raise RuntimeError("connection reset")

    gone = threading.Event()
    with heartbeat(Silent()):
        time.sleep(2 * LOST_AFTER_S)
        gone.set()
    assert len(reported) == 1 and "no response from first" in reported[0]


@pytest.mark.skipif(sys.platform == "win32", reason="SIGSTOP")
def test_stopped_process_is_killed_but_survives_short_stop():
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
        errors = process.stderr.read()
    assert f"process 0 of 1 (pid {process.pid} on " in errors
    assert "3 s (lost_after_s)" in errors
