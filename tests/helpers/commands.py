"""Commands as a user runs them."""

from __future__ import annotations

import importlib.util
import io
import json
import logging
import os
import resource
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
# Variables that Python and OpenMP read at start.
AT_THE_START = ("PYTHON", "OMP_", "GOMP_")


@dataclass(frozen=True)
class Finished:
    returncode: int
    stdout: str
    stderr: str
    cpu_s: float  # CPU time; unlike wall time, independent of other load

    def refuses(self, words: str) -> bool:
        """Return whether the command ended with one error line that contains these words."""
        one_line = self.stderr.startswith("error: ") and self.stderr.count("\n") == 1
        return self.returncode == 2 and one_line and words in self.stderr


def load_file(path: Path, name: str) -> ModuleType:
    """Import a file as a module of this name."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_command(
    *command: str | Path,
    cwd: Path,
    env: dict[str, str] | None = None,
    timeout_s: float = 120,
    check: bool = True,
    cold: bool = False,
) -> Finished:
    """Run a command like a user; `check` shows the output of a failure.

    A Python script runs in a fork of a warm Python (`helpers.warm_python`), unless `cold` or `env` affects process
    start.
    """
    words = [str(part) for part in command]
    variables = {key: value for key, value in os.environ.items() if key not in ("HYDRA_FULL_ERROR", "PYTHONPATH")}
    variables |= {"NO_COLOR": "1", "COLUMNS": "200", "WANDB_MODE": "offline", **(env or {})}
    from_the_start = any(key.startswith(AT_THE_START) for key in env or {})
    if words[0] == sys.executable and words[1].endswith(".py") and not cold and not from_the_start:
        done = _run_warm(words[1:], cwd, variables, timeout_s)
    else:
        done = _run_cold(words, cwd, variables, timeout_s)
    if check:
        assert done.returncode == 0, f"{command} exited {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done


def run_here(script: Path, *arguments: str | Path, cwd: Path, env: Mapping[str, str] | None = None) -> Finished:
    """Run a script in this process, for arguments that it rejects at once."""
    root = logging.getLogger()
    kept = list(sys.argv), list(sys.path), dict(os.environ), Path.cwd(), list(root.handlers), root.level
    out, err, code = io.StringIO(), io.StringIO(), 0
    sys.argv = [str(script), *map(str, arguments)]
    sys.path.append(str(script.parent))
    os.environ.update({"NO_COLOR": "1", "COLUMNS": "200", **(env or {})})
    os.chdir(cwd)
    try:
        with redirect_stdout(out), redirect_stderr(err):
            runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else end.code is not None
    finally:
        sys.argv[:], sys.path[:], variables, here, root.handlers[:], level = kept
        root.setLevel(level)
        os.environ.clear()
        os.environ.update(variables)
        os.chdir(here)
    return Finished(int(code), out.getvalue(), err.getvalue(), 0.0)


def _run_cold(words: list[str], cwd: Path, variables: dict[str, str], timeout_s: float) -> Finished:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        words, cwd=cwd, env=variables, timeout=timeout_s, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Finished(done.returncode, done.stdout, done.stderr, cpu_s)


def _run_warm(argv: list[str], cwd: Path, variables: dict[str, str], timeout_s: float) -> Finished:
    server = _warm_python()
    assert server.stdin is not None and server.stdout is not None
    with tempfile.NamedTemporaryFile("r") as stdout, tempfile.NamedTemporaryFile("r") as stderr:
        request = {"argv": argv, "cwd": str(cwd), "env": variables, "timeout_s": round(timeout_s)}
        server.stdin.write(json.dumps({**request, "stdout": stdout.name, "stderr": stderr.name}) + "\n")
        server.stdin.flush()
        reply = server.stdout.readline()
        assert reply, "the warm Python has ended"
        return Finished(stdout=stdout.read(), stderr=stderr.read(), **json.loads(reply))


@cache
def _warm_python() -> subprocess.Popen[str]:
    command = [sys.executable, str(Path(__file__).with_name("warm_python.py"))]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
