"""Heartbeats of data-parallel processes: if the heartbeats of one process stop, all processes end.

An all-reduce cannot distinguish a slow process from a lost one, so a thread in each process sends heartbeats.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import NoReturn

from torch.distributed import Store  # type: ignore[reportPrivateImportUsage]

from gpusim_rl.errors import say

BEATS = 30  # heartbeats per `lost_after_s`
FIRST = 3  # head start of the process that reports the loss [heartbeats]
LEFT, ENDS = "left", "ends"  # final heartbeats: of a finished process, and of a process that reports a loss

_WATCH = """
import os, select, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
parent, most, period_s, problem = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
missed = 0
while missed < most:
    missed += 1
    if select.select([0], [], [], period_s)[0]:
        missed = 0
        if not os.read(0, 4096):
            sys.exit()
if os.getppid() == parent:
    sys.stderr.write(problem)
    os.kill(parent, signal.SIGKILL)
"""
"""Code of the watchdog process, which kills a stopped process so that torchrun notices."""


class Heartbeat:
    """Heartbeat during a block; ends the process and sets `over` if another process is silent for `lost_after_s` [s].

    `store` is a dedicated connection to the processes' store: its calls block forever if the store's machine is lost.
    """

    def __init__(self, store: Store, rank: int, size: int, lost_after_s: float) -> None:
        self.over = False
        self._store, self._rank = store, rank
        self._period_s, self._period_text = lost_after_s / BEATS, f"for {lost_after_s:g} s (lost_after_s)"
        self._keys = [f"beat_{number}" for number in range(size)]
        self._name, self._who = f"(pid {os.getpid()} on {socket.gethostname()})", f"process {rank} of {size}"
        self._beats = 0  # heartbeats that the store has answered
        self._failed = False
        self._left = threading.Event()
        self._threads = [threading.Thread(target=target, daemon=True) for target in (self._beat, self._watch)]
        self._send_beat()

    def __enter__(self) -> Heartbeat:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        self._failed = kind is not None
        self._left.set()
        for thread in self._threads:
            thread.join(self._period_s)  # a thread may block on the store

    def _send_beat(self) -> None:
        self._store.set(self._keys[self._rank], f"{self._beats} {self._name}")

    def _beat(self) -> None:
        """Send heartbeats, and check the other processes' heartbeats.

        Timeouts count our own heartbeats, not time: a process that was stopped must not blame others when it resumes.
        """
        before, missed = [""] * len(self._keys), [0] * len(self._keys)
        with suppress(RuntimeError):  # `_watch` notices a lost store
            while not self._left.wait(self._period_s):
                self._send_beat()
                beats = [value.decode() for value in self._store.multi_get(self._keys)]
                self._beats += 1
                if ENDS in beats:
                    self._end()
                for rank, (last, now) in enumerate(zip(before, beats, strict=True)):
                    missed[rank] = missed[rank] + 1 if now == last != LEFT else 0
                before = beats
                lost = [rank for rank, number in enumerate(missed) if number >= BEATS + FIRST]  # watchdog acts first
                # The first live process reports the loss; the others only if it does not.
                first = min(rank for rank, last in enumerate(beats) if rank not in lost and last != LEFT)
                if lost and (self._rank == first or max(missed) >= BEATS + 2 * FIRST):
                    self._store.set(self._keys[self._rank], ENDS)
                    names = ", ".join(f"process {rank} {beats[rank].partition(' ')[2]}" for rank in lost)
                    self._end(f"no heartbeat from {names}")
            if not self._failed:
                self._store.set(self._keys[self._rank], LEFT)

    def _watch(self) -> None:
        """End the process if the store does not answer; feed the watchdog."""
        problem = f"error: {self._who} {self._name} was unresponsive {self._period_text}: killing it\n"
        words = [str(os.getpid()), str(BEATS), str(self._period_s), problem]
        before, missed = 0, 0
        enough = BEATS if os.environ["LOCAL_RANK"] == "0" else BEATS + FIRST  # one report per machine
        with subprocess.Popen([sys.executable, "-ISc", _WATCH, *words], stdin=subprocess.PIPE, bufsize=0) as watch:
            assert watch.stdin is not None
            while not self._left.wait(self._period_s):
                with suppress(BrokenPipeError):
                    watch.stdin.write(b".")
                missed, before = missed + 1 if self._beats == before else 0, self._beats
                if missed >= enough and not self.over:
                    self._end(f"no response from {os.environ['MASTER_ADDR']}, the machine of process 0,")

    def _end(self, problem: str | None = None) -> NoReturn:
        """End the process once the others have had time to notice."""
        self.over = True
        if problem is not None:
            say(f"error: {problem} {self._period_text}: {self._who} exits", file=sys.stderr)
        time.sleep((1 if problem is None else 2) * self._period_s)
        os._exit(1)
