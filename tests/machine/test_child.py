"""Tests of child processes: exit reason, output, termination, loss of the parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from gpusim_rl.machine.child import Child, same_import_env

COUNTS_SIGNALS = """
    import signal, sys, time
    count = 0
    def stop(*_):
        global count
        count += 1
    signal.signal(signal.SIGTERM, stop)
    print('ready', flush=True)
    while not count:
        time.sleep(0.01)
    time.sleep(float(sys.argv[1]))
    sys.exit(10 + count)
"""


def python(code: str, *words: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(code), *words]


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_last_line_is_the_exit_reason(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("of an earlier start\n")
    with Child(python("import sys; print('one'); sys.exit('error: two')"), printed=log.open("ab+")) as child:
        assert child.exit_reason() == "two" and not child.running
        assert child.output() == "one\nerror: two\n"
    with Child(python("import sys; sys.exit(3)"), printed=log.open("ab+")) as child:
        assert child.exit_reason() == "exit status 3"
    with Child(python("import os; print('one', flush=True); os.kill(os.getpid(), 9)")) as child:
        assert child.exit_reason() == "SIGKILL" and child.output() == "one\n"
    assert log.read_text() == "of an earlier start\none\nerror: two\n"


def test_last_line_is_read_from_long_and_truncated_output() -> None:
    with Child(python("for i in range(5000): print(i)")) as child:
        child.process.wait()
        assert child.last_line() == "4999" and child.output(7) == "8\n4999\n" and len(child.output()) > 20000
        os.ftruncate(child.printed.fileno(), 0)
        assert child.last_line() == ""


def test_stopping_child_gets_one_signal_and_a_grace_period() -> None:
    with Child(python(COUNTS_SIGNALS, "0.4")) as child:
        wait_for(lambda: child.last_line() == "ready")
        assert child.stop()
        assert child.process.returncode == 11
        assert child.stop()  # a second call is a no-op


def test_unresponsive_child_is_killed_with_its_process_group() -> None:
    code = """
        import signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        below = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])
        print(below.pid, flush=True)
        time.sleep(600)
    """
    child = Child(python(code))
    wait_for(child.output)
    assert not child.stop(within_s=0.2)
    assert child.exit_reason() == "SIGKILL"
    wait_for(lambda: not psutil.pid_exists(int(child.output())))
    child.close()


@pytest.mark.parametrize("ends_itself", [True, False])
def test_stopping_child_ends_its_leftover_processes(ends_itself: bool) -> None:
    code = f"""
        import subprocess, sys, time
        below = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])
        print(below.pid, flush=True)
        time.sleep({0 if ends_itself else 600})
    """
    with Child(python(code)) as child:
        wait_for(lambda: not child.running if ends_itself else child.output())
        assert child.stop()
        wait_for(lambda: not psutil.pid_exists(int(child.output())))
        assert child.process.returncode == (0 if ends_itself else -signal.SIGTERM)


def test_silence_counts_from_the_last_heartbeat() -> None:
    with Child(python("import time; time.sleep(600)")) as child:
        time.sleep(0.1)
        assert child.silent_s >= 0.1
        child.heard()
        assert child.silent_s < 0.1
    assert child.process.returncode == -signal.SIGKILL  # by the end of the block


def test_child_uses_pipes_and_its_parents_import_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("ANSWER = b'42'")
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "decimal.py").write_text("import sys; assert sys.version_info < (3, 11)")
    monkeypatch.syspath_prepend(str(tmp_path))
    code = "import decimal, mine, sys; sys.stdout.buffer.write(sys.stdin.buffer.readline() + mine.ANSWER)"
    with Child(python(code), talks=True, env=same_import_env(), cwd=str(tmp_path / "here")) as child:
        assert child.process.communicate(b"what\n")[0] == b"what\n42"


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's parent-death signal")
def test_child_gets_a_signal_when_its_parent_is_killed(tmp_path: Path) -> None:
    notified = tmp_path / "notified"
    code = f"""
        import pathlib, signal, sys, time
        signal.signal(signal.SIGHUP, lambda *_: (pathlib.Path({str(notified)!r}).touch(), sys.exit()))
        print('ready', flush=True)
        time.sleep(600)
    """
    parent = f"""
        import threading, time
        from gpusim_rl.machine.child import Child
        def start():
            child = Child({python(code)!r})
            while not child.output():
                time.sleep(0.01)
            print(child.process.pid, flush=True)
            time.sleep(600)
        threading.Thread(target=start).start()
    """
    # As under nohup: a child that ignores SIGHUP would outlive its parent.
    nohup = "trap '' HUP; exec \"$@\""
    command = ["sh", "-c", nohup, "sh", *python(parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=same_import_env()) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        process.kill()
    wait_for(notified.exists)
    wait_for(lambda: not psutil.pid_exists(child))


def test_child_outlives_the_thread_that_started_it() -> None:
    with ThreadPoolExecutor(1) as starter:
        child = starter.submit(Child, python("print('ready', flush=True); import time; time.sleep(600)")).result()
        wait_for(child.output)
    with child:
        time.sleep(0.1)
        assert child.running


def test_child_of_a_dead_parent_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    other = os.getppid()
    monkeypatch.setattr(os, "getpid", lambda: other)
    with Child(python("print('started')")) as child:
        child.process.wait()
        assert child.output() == ""


def test_ctrl_c_in_the_terminal_does_not_reach_the_child() -> None:
    with Child(python("import time; time.sleep(600)")) as child:
        assert os.getsid(child.process.pid) == child.process.pid != os.getsid(0)


def test_failed_start_raises_and_closes_the_file(tmp_path: Path) -> None:
    file = (tmp_path / "log").open("ab+")
    with pytest.raises(OSError):
        Child(python("pass"), printed=file, cwd="/nowhere")
    assert file.closed
