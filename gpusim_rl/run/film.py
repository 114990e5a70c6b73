"""Video of the policy at the end of training (`log.video=true`)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from gpusim_rl.errors import ConfigError
from gpusim_rl.files import paths

TIMEOUT_S = 600.0
SMALL = ("--num-envs", "4", "--width", "640", "--height", "480")


def film(run_dir: Path, flags: Sequence[str]) -> Path:
    """Record the last checkpoint in a subprocess; return the mp4, or raise ConfigError with stderr's last line."""
    command = [sys.executable, str(paths.tools_dir() / "record.py"), str(run_dir), *SMALL, *flags]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(str(error).partition("\n")[0]) from None
    if done.returncode != 0:
        said = done.stderr.strip().rpartition("\n")[2].removeprefix("error: ")
        raise ConfigError(said or f"recording exited with code {done.returncode}")
    return Path(done.stdout.strip().rpartition("\n")[2])
