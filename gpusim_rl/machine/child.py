"""Processes that work for this one: evaluations, actors, trials of a search, short trainings, measured cases.

They are here, below all that starts one: a training (`run`) starts an evaluation, and must not know `distributed`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import IO, Any

import psutil

ENDS_WITHIN_S = 60.0
"""A training that was told to stop ends after its iteration, with a checkpoint [s]."""
POLL_S = 0.01
MOST_READ = 4096  # bytes of what a child has printed, for its last words

_BEGIN = """
import ctypes, os, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup lets it be ignored; a terminal does not reach this session
if sys.platform == "linux":
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGHUP)
if os.getppid() == int(sys.argv[1]):  # else the parent has died before
    os.execvp(sys.argv[2], sys.argv[2:])
"""
"""Runs in a child before its program, which takes its place. `preexec_fn` may deadlock beside threads."""


class Child:
    """A process that works for this one; as a context manager it ends with the block.

    It has a session of its own: Ctrl-C in a terminal reaches this process alone, which ends the child as it sees fit.
    Where this process is killed, Linux sends the child SIGHUP, which ends a training with a checkpoint.

    Args:
        command: Program and its words.
        printed: File for its output, opened for appending and reading, which `close` closes; None makes an unnamed one.
        talks: Whether its standard input and output are pipes. Else it has no input, and its output is printed.
        env: Environment variables; None for those of this process. `cwd` and `pass_fds` are those of `Popen` too.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        printed: IO[bytes] | None = None,
        talks: bool = False,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.printed = tempfile.TemporaryFile("a+b") if printed is None else printed  # noqa: SIM115 (until `close`)
        self._before = self.printed.seek(0, os.SEEK_END)  # bytes that earlier processes have printed
        try:
            self.process = _start(
                [sys.executable, "-ISc", _BEGIN, str(os.getpid()), *command],
                stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
                stdout=subprocess.PIPE if talks else self.printed,
                stderr=self.printed,
                env=None if env is None else dict(env),
                cwd=cwd,
                pass_fds=pass_fds,
                start_new_session=True,
            )
        except OSError:
            self.printed.close()
            raise
        self._heard_s = time.monotonic()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def running(self) -> bool:
        """It has not ended yet. Where it has, its number stays reserved until `kill`, for what it has left."""
        if self.process.returncode is not None:
            return False
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).status() != psutil.STATUS_ZOMBIE
        return False

    def heard(self) -> None:
        """Note a sign of life."""
        self._heard_s = time.monotonic()

    @property
    def silent_s(self) -> float:
        """Time since its start, or its last sign of life [s]."""
        return time.monotonic() - self._heard_s

    def output(self, most: int | None = None) -> str:
        """Returns the last `most` bytes of what it has printed, or all."""
        size = self.printed.seek(0, os.SEEK_END)
        begin = self._before if self._before <= size else 0  # it was shortened
        self.printed.seek(begin if most is None else max(begin, size - most))
        return self.printed.read().decode(errors="replace")

    def last_line(self) -> str:
        """Returns the last line that it has printed and that is not empty."""
        lines = self.output(MOST_READ).strip().splitlines()
        return lines[-1] if lines else ""

    def how_it_ended(self) -> str:
        """Returns why it has ended, in words: its last line, or the signal that ended it."""
        status = self.process.wait()
        if status < 0:
            return signal.Signals(-status).name
        return self.last_line().removeprefix("error: ") or f"exit status {status}"

    def stop(self, within_s: float = ENDS_WITHIN_S, number: int = signal.SIGTERM) -> bool:
        """End it by one signal, then what it has left; kill it after a time [s]. Return whether it has ended by itself.

        A training ends with a checkpoint; a second signal would end it without one.
        """
        if self.running:
            self.process.send_signal(number)
            give_up = time.monotonic() + within_s
            while self.running and time.monotonic() < give_up:
                time.sleep(POLL_S)
        late = self.running
        self.kill()
        return not late

    def kill(self) -> None:
        """Ends it at once, and all processes that it has started in its session."""
        if self.process.returncode is None:  # else its number may be of another process by now
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def close(self) -> None:
        """Kills it and what it has left, and closes its files."""
        self.kill()
        for file in (self.process.stdin, self.process.stdout, self.printed):
            if file is not None:
                with suppress(OSError):  # what it did not read any more
                    file.close()


def importing_the_same(**more: str) -> dict[str, str]:
    """Returns variables with which a child imports what this process can, and those that differ (`more`)."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path), **more}


def _start(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Starts a process from a thread that lives as long: with its thread Linux takes the parent for dead."""
    process: Future[subprocess.Popen[bytes]] = Future()

    def start() -> None:
        try:
            process.set_result(subprocess.Popen[bytes](command, **options))
        except BaseException as error:
            process.set_exception(error)
        else:
            if sys.platform == "linux":
                with suppress(ChildProcessError):  # another thread has waited for it
                    os.waitid(os.P_PID, process.result().pid, os.WEXITED | os.WNOWAIT)

    threading.Thread(target=start, name="parent of a child", daemon=True).start()
    return process.result()
