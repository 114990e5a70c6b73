"""Python with the big libraries imported, which forks for each script: importing torch dominates small runs.

Our code and MuJoCo, which reads MUJOCO_GL on import, are imported by each command; further modules are named on the
command line. Reads requests from stdin, a JSON object per line; writes exit status and CPU time of each, and first the
process id if the request has `announce`. `helpers.commands.run_command` and `reliability.processes` are the clients.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any


def serve() -> dict[str, Any] | None:
    """Fork for each request; return the request in the child, and None at the end of input."""
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            return request
        if request.get("announce"):
            sys.stdout.write(json.dumps({"pid": pid}) + "\n")
            sys.stdout.flush()
        _, status, usage = os.wait4(pid, 0)
        reply = {"returncode": os.waitstatus_to_exitcode(status), "cpu_s": usage.ru_utime + usage.ru_stime}
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()
    return None


def become(request: dict[str, Any]) -> str:
    """Make this process look freshly started for a command; return its script."""
    for number, (name, flags) in enumerate(
        [(os.devnull, os.O_RDONLY), (request["stdout"], os.O_WRONLY), (request["stderr"], os.O_WRONLY)]
    ):
        file = os.open(name, flags)
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    # A shell may have made background processes ignore these signals.
    for number in (signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.alarm(request["timeout_s"])  # timeout
    sys.argv = request["argv"]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    return sys.argv[0]


if __name__ == "__main__":
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as train.py does before it imports torch
    import hydra  # noqa: F401
    import psutil  # noqa: F401
    import rich.live
    import rich.table  # noqa: F401
    import torch
    import torch._dynamo  # noqa: F401  # every optimiser imports it

    import kept_yaml

    kept_yaml.keep()
    for module in sys.argv[1:]:
        importlib.import_module(module)
    gc.freeze()
    if request := serve():
        runpy.run_path(become(request), run_name="__main__")
