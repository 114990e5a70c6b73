"""Runs many command lines of train.py, each in a fork of one process that has imported all it needs.

Reads from the file in argv[1] a list of command lines; `quick` behind it shortens their end. Writes one JSON object a
line to stdout, in their order.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MEMORY = 2_000_000_000
"""What one may take beside the libraries [bytes]: a huge number of envs must not take the memory of the machine."""
LARGEST_FILE = 100_000_000
LONG_S = 15.0
"""A run that was asked for much work is interrupted then, as by Ctrl-C."""
LIMIT_S = 60.0
"""Whoever has not ended then never will."""


def fork(arguments: list[str], folder: Path) -> dict[str, Any]:
    """Run one command line in a new folder; return how it ended and what it printed."""
    folder.mkdir(parents=True)
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        become(arguments, folder)
        return {}
    interrupted = killed = False
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        elapsed = time.monotonic() - start
        if elapsed > LIMIT_S and not killed:
            os.kill(child, signal.SIGKILL)
            killed = True
        elif elapsed > LONG_S and not interrupted:
            os.kill(child, signal.SIGINT)
            interrupted = True
        time.sleep(0.005)
    return {
        "returncode": os.waitstatus_to_exitcode(status),
        "interrupted": interrupted,
        "killed": killed,
        "seconds": time.monotonic() - start,
        "stdout": (folder / "stdout").read_text(encoding="utf-8", errors="replace"),
        "stderr": (folder / "stderr").read_text(encoding="utf-8", errors="replace"),
    }


def become(arguments: list[str], folder: Path) -> None:
    """Look like a process that was started for this command line."""
    for number, name in enumerate(["stdout", "stderr"], start=1):
        file = os.open(folder / name, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    work = folder / "work"
    work.mkdir()
    os.chdir(work)
    os.environ["HOME"] = str(work)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, LARGEST_FILE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.argv = [str(ROOT / "train.py"), *arguments]
    sys.path[0] = str(ROOT)


def run(quick: bool) -> None:
    """Run the script; `quick` leaves out the end of the interpreter, which takes longer than a refusal."""
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        if not quick or not isinstance(end.code, int):
            raise
        code = end.code
    if quick:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    import torch._dynamo  # noqa: F401  # every optimiser imports it

    sys.path.insert(0, str(ROOT))
    for module in ("api", "settings.compose", "learn.ppo", "run.trainer", "sim.mujoco", "tasks.ant", "tasks.cartpole"):
        importlib.import_module(f"gpusim_rl.{module}")
    sys.modules["gpusim_rl.settings.compose"].compose()  # Hydra builds its grammar once
    gc.freeze()
    quick = sys.argv[2:] == ["quick"]
    for number, arguments in enumerate(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))):
        ended = fork(arguments, Path.cwd() / str(number))
        if not ended:
            run(quick)
            break
        sys.stdout.write(json.dumps(ended) + "\n")
        sys.stdout.flush()
