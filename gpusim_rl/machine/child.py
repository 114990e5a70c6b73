"""Child processes: evaluations, actors, search trials, short training runs, benchmark cases."""

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

ENDS_WITHIN_S = 60.0  # time for a training run to finish its iteration and save a checkpoint [s]
POLL_S = 0.01
MOST_READ = 4096  # bytes of output to search for the last line

_BEGIN = """
import ctypes, os, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it; no terminal reaches this session
if sys.platform == "linux":
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGHUP)
if os.getppid() == int(sys.argv[1]):  # else the parent is dead
    os.execvp(sys.argv[2], sys.argv[2:])
"""
"""Bootstrap that a child runs before its program. `preexec_fn` may deadlock in a threaded parent."""


class Child:
    """Child process; as a context manager, it is killed at the end of the block.

    The child has its own session: Ctrl-C in a terminal reaches only the parent. If the parent is killed, Linux sends
    the child SIGHUP, upon which a training run saves a checkpoint and exits.

    Args:
        command: Program and arguments.
        printed: File for stderr and stdout, opened for appending and reading, closed by `close`; None: anonymous file.
        talks: Whether stdin and stdout are pipes; otherwise stdin is empty.
        env: Environment variables; None inherits the parent's. `cwd` and `pass_fds` are passed to `Popen`.
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
        self._before = self.printed.seek(0, os.SEEK_END)  # output of earlier processes [bytes]
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
        """True if the process is alive. An exited child stays a zombie until `kill`, so its id is not reused."""
        if self.process.returncode is not None:
            return False
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).status() != psutil.STATUS_ZOMBIE
        return False

    def heard(self) -> None:
        """Record a heartbeat."""
        self._heard_s = time.monotonic()

    @property
    def silent_s(self) -> float:
        """Time since the start or the last heartbeat [s]."""
        return time.monotonic() - self._heard_s

    def output(self, most: int | None = None) -> str:
        """Return the output, or its last `most` bytes."""
        size = self.printed.seek(0, os.SEEK_END)
        begin = self._before if self._before <= size else 0  # truncated meanwhile
        self.printed.seek(begin if most is None else max(begin, size - most))
        return self.printed.read().decode(errors="replace")

    def last_line(self) -> str:
        """Return the last non-empty line of output."""
        lines = self.output(MOST_READ).strip().splitlines()
        return lines[-1] if lines else ""

    def exit_reason(self) -> str:
        """Wait for the process; return the signal that ended it, else its last line of output, else its exit status."""
        status = self.process.wait()
        if status < 0:
            return signal.Signals(-status).name
        return self.last_line().removeprefix("error: ") or f"exit status {status}"

    def stop(self, within_s: float = ENDS_WITHIN_S, number: int = signal.SIGTERM) -> bool:
        """Signal the process once, wait, then kill it and its descendants. Return whether it exited by itself."""
        if self.running:
            self.process.send_signal(number)
            give_up = time.monotonic() + within_s
            while self.running and time.monotonic() < give_up:
                time.sleep(POLL_S)
        late = self.running
        self.kill()
        return not late

    def kill(self) -> None:
        """Kill the child and all processes in its process group."""
        if self.process.returncode is None:  # else its id may be reused
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def close(self) -> None:
        """Kill the child and its descendants, and close its files."""
        self.kill()
        for file in (self.process.stdin, self.process.stdout, self.printed):
            if file is not None:
                with suppress(OSError):  # unread input
                    file.close()


def same_import_env(**more: str) -> dict[str, str]:
    """Return environment variables, updated with `more`, with which a child imports the same modules."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    # `python -c` would put the current folder first (before Python 3.11, it does).
    return {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", **more}


def _start(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a process from a thread that outlives it: Linux sends the parent-death signal when that thread ends."""
    process: Future[subprocess.Popen[bytes]] = Future()

    def start() -> None:
        try:
            process.set_result(subprocess.Popen[bytes](command, **options))
        except BaseException as error:
            process.set_exception(error)
        else:
            if sys.platform == "linux":
                with suppress(ChildProcessError):  # reaped by another thread
                    os.waitid(os.P_PID, process.result().pid, os.WEXITED | os.WNOWAIT)

    threading.Thread(target=start, name="parent of a child", daemon=True).start()
    return process.result()
