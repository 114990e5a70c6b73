"""Two hosts on this machine: network namespaces with a switch between them, as root on Linux."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

ADDRESSES = ("10.77.0.1", "10.77.0.2")
DEVICE = "eth0"


class TwoHosts:
    """Hosts 0 and 1 with `ADDRESSES`; all their processes end with the block. Raises OSError or CalledProcessError."""

    def __init__(self) -> None:
        name = f"gpusim_rl_{os.getpid()}"
        self._switch, self._hosts = f"{name}_s", [f"{name}_0", f"{name}_1"]

    def __enter__(self) -> TwoHosts:
        try:
            _ip("netns", "add", self._switch)
            _ip("-n", self._switch, "link", "add", "switch", "up", "type", "bridge")
            for number, (host, address) in enumerate(zip(self._hosts, ADDRESSES, strict=True)):
                _ip("netns", "add", host)
                port = f"port{number}"
                _ip("link", "add", DEVICE, "netns", host, "type", "veth", "peer", "name", port, "netns", self._switch)
                _ip("-n", self._switch, "link", "set", port, "master", "switch", "up")
                _ip("-n", host, "addr", "add", f"{address}/24", "dev", DEVICE)
                for device in ("lo", DEVICE):
                    _ip("-n", host, "link", "set", device, "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for number, host in enumerate([*self._hosts, self._switch]):
            if Path("/run/netns", host).exists():
                self.lose_power(number) if host in self._hosts else _ip("netns", "del", host)

    def start(self, number: int, command: Sequence[str], *, cwd: Path, env: dict[str, str], log: IO[str]):
        """Start a command on a host named `host0` or `host1`."""
        script = 'hostname "$0" && exec "$@"'
        words = ["ip", "netns", "exec", self._hosts[number], "unshare", "--uts", "sh", "-c", script, f"host{number}"]
        return subprocess.Popen([*words, *command], cwd=cwd, env=env, stdout=log, stderr=log)

    def processes(self, number: int) -> list[int]:
        found = subprocess.run(["ip", "netns", "pids", self._hosts[number]], capture_output=True, text=True, check=True)
        return [int(word) for word in found.stdout.split()]

    def cut(self) -> None:
        """Stop forwarding; hosts are not notified."""
        _ip("-n", self._switch, "link", "set", "switch", "down")

    def mend(self) -> None:
        _ip("-n", self._switch, "link", "set", "switch", "up")

    def lose_power(self, number: int) -> None:
        """Kill a host without sending another packet."""
        _ip("-n", self._hosts[number], "link", "set", DEVICE, "down")
        while pids := self.processes(number):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        _ip("netns", "del", self._hosts[number])


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
