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

REQUIREMENT = "ray[tune]>=2.50,<3"  # as in pyproject.toml
PATIENCE_S = 5.0  # timeout for connecting to a cluster's address [s]


def require_ray(needed_by: str, address: str | None = None) -> Any:
    """Import Ray; raise ConfigError if it is missing or has an untested version."""
    if not (address or os.environ.get("RAY_ADDRESS")) and "ray" not in sys.modules:
        # Ray listens on all addresses; only clients with the token may connect. Ray reads both variables at import.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    ray = import_extra("ray", "ray", needed_by)
    check_versions(needed_by, [REQUIREMENT])
    return ray


@contextmanager
def ray_cluster(needed_by: str, *, address: str | None = None, num_cpus: int = 1) -> Iterator[Any]:
    """Connect to a Ray cluster, or start a local one that ends with the block; yield `ray`.

    Without `address`, RAY_ADDRESS is used. `num_cpus` is the minimum number of CPUs of a local cluster.
    """
    address = address or os.environ.get("RAY_ADDRESS") or None
    ray = require_ray(needed_by, address)
    if ray.is_initialized():  # by the user's script
        yield ray
        return
    # Processes of this machine import from the same path; elsewhere the package must be installed.
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    quiet["runtime_env"] = {"env_vars": {"PYTHONPATH": path}}
    with ExitStack() as stack:
        with warnings.catch_warnings(), same_handler(signal.SIGTERM):
            warnings.simplefilter("ignore")  # deprecations
            try:
                if address is None:
                    folder = tempfile.TemporaryDirectory(prefix="gpusim-rl-ray-", ignore_cleanup_errors=True)
                    quiet |= {"_temp_dir": stack.enter_context(folder), "include_dashboard": False}
                    ray.init("local", num_cpus=max(num_cpus, available_cpus()), **quiet)
                else:
                    _look_for(address)
                    ray.init(address, **quiet)
            except Exception as error:  # ray.init raises bare Exceptions
                problem = "Ray failed to start on this machine" if address is None else f"no Ray cluster at {address}"
                hint = "Try again on an idle machine" if address is None else "Try ray status on that machine"
                raise ConfigError(f"{problem}: {first_line(error)}", key=needed_by, hint=hint) from None
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
    """Raise OSError for an unreachable address; Ray itself would retry for minutes."""
    place = re.fullmatch(r"(?:ray://)?([^/]+):(\d+)", address)
    if place is not None:
        socket.create_connection((place[1], int(place[2])), timeout=PATIENCE_S).close()
