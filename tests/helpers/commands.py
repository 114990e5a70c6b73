"""Commands as a user runs them."""

from __future__ import annotations

import os
import resource
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Finished:
    """A command that ended."""

    returncode: int
    stdout: str
    stderr: str
    cpu_s: float  # CPU time; unlike the wall clock it does not depend on what else runs


def run_command(
    *command: str | Path,
    cwd: Path,
    env: dict[str, str] | None = None,
    timeout_s: float = 120,
    check: bool = True,
) -> Finished:
    """Run a command as a user would; with `check`, a failure shows what it printed."""
    variables = {key: value for key, value in os.environ.items() if key not in ("HYDRA_FULL_ERROR", "PYTHONPATH")}
    variables |= {"NO_COLOR": "1", "COLUMNS": "200", "WANDB_MODE": "offline", **(env or {})}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=variables,
        timeout=timeout_s,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if check:
        assert done.returncode == 0, f"{command} exited {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return Finished(done.returncode, done.stdout, done.stderr, cpu_s)
