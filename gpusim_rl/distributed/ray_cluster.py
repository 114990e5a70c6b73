"""Ray cluster of a run: an existing one, or a temporary one on this machine."""

from __future__ import annotations

import logging
import os
import re
import secrets
import signal
import socket
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from gpusim_rl.errors import ConfigError, first_line, import_extra
from gpusim_rl.files.provenance import check_versions
from gpusim_rl.machine.hardware import available_cpus

REQUIREMENT = "ray[tune]>=2.50,<3"  # pyproject.toml has the same

PATIENCE_S = 5.0  # timeout for a cluster at its address [s]


def require_ray(needed_by: str, address: str | None = None) -> Any:
    """Import Ray; raise ConfigError if it is missing or has an untested version."""
    if not (address or os.environ.get("RAY_ADDRESS")) and "ray" not in sys.modules:
        # Ray listens on all addresses of the machine. Who has no token can start nothing in it. Read at import.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    ray = import_extra("ray", "ray", needed_by)
    check_versions(needed_by, [REQUIREMENT])
    return ray


@contextmanager
def ray_cluster(needed_by: str, *, address: str | None = None, num_cpus: int = 1) -> Iterator[Any]:
    """Connect Ray to a cluster, or to a local one that ends with the block.

    Args:
        needed_by: Command or setting named in errors.
        address: Address of a cluster; None: RAY_ADDRESS, else a local one.
        num_cpus: Least number of CPUs that a local cluster hands out.

    Raises:
        ConfigError: Ray is missing, unreachable or does not start.
    """
    address = address or os.environ.get("RAY_ADDRESS") or None
    ray = require_ray(needed_by, address)
    if ray.is_initialized():  # by the user's script
        yield ray
        return
    # What this process can import, those of this machine can. On others the package must be installed.
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    quiet["runtime_env"] = {"env_vars": {"PYTHONPATH": path}}
    with ExitStack() as stack:
        with warnings.catch_warnings(), same_handler(signal.SIGTERM):
            warnings.simplefilter("ignore")  # of versions to come
            try:
                if address is None:
                    folder = tempfile.TemporaryDirectory(prefix="gpusim-rl-ray-", ignore_cleanup_errors=True)
                    quiet |= {"_temp_dir": stack.enter_context(folder), "include_dashboard": False}
                    ray.init("local", num_cpus=max(num_cpus, available_cpus()), **quiet)
                else:
                    _look_for(address)
                    ray.init(address, **quiet)
            except Exception as error:  # Ray raises Exception itself where a process of it does not come up
                problem, advice = f"no Ray cluster at {address}", "ray status there"
                if address is None:
                    problem, advice = "Ray has not started on this machine", "again when it is less busy"
                raise ConfigError(f"{needed_by}: {problem}: {first_line(error)}. Try {advice}") from None
        stack.callback(ray.shutdown)
        yield ray


@contextmanager
def same_handler(number: signal.Signals) -> Iterator[None]:
    """Restore a signal's handler after the block; Ray replaces it and never puts it back."""
    before = signal.getsignal(number)
    try:
        yield
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(number, before)


def _look_for(address: str) -> None:
    """Raise OSError for an unreachable address, for which Ray retries for minutes."""
    place = re.fullmatch(r"(?:ray://)?([^/]+):(\d+)", address)
    if place is not None:
        socket.create_connection((place[1], int(place[2])), timeout=PATIENCE_S).close()
