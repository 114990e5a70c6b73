"""Plugin for tests marked `serial`, which run alone: pytest-xdist workers lock a session file."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from pathlib import Path

import pytest


class Turns:
    def __init__(self, folder: Path) -> None:
        self.gate = (folder / "gate").open("w")  # held by a waiting serial test, so that none overtakes it
        self.running = (folder / "running").open("w")
        self.kept = False

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # outermost: waiting is not part of a test's time
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        alone = is_serial(item)
        if not self.kept:
            fcntl.flock(self.gate, fcntl.LOCK_EX)
            fcntl.flock(self.running, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        if not alone:
            fcntl.flock(self.gate, fcntl.LOCK_UN)
        try:
            return (yield)
        finally:
            self.kept = alone and nextitem is not None and is_serial(nextitem)  # wait once per file
            if not self.kept:
                fcntl.flock(self.running, fcntl.LOCK_UN)
                fcntl.flock(self.gate, fcntl.LOCK_UN)


def is_serial(item: pytest.Item) -> bool:
    return item.get_closest_marker("serial") is not None
