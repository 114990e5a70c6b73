"""Time budget for work during training, such as writing checkpoints."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

SAVE_ALL = "GPUSIM_RL_SAVE_ALL"  # exempts numbered checkpoints if set in the environment; a search copies them
BURST_S = 2.0  # initial and maximum balance, for checkpoints of short runs


class TimeShare:
    """Token bucket that limits work to `share` of the wall-clock time, plus `BURST_S` and the last piece of work."""

    def __init__(self, share: float) -> None:
        self.share = share
        self.cost_s = 0.0  # duration of the last piece of work
        self._balance_s, self._counted_at = BURST_S, time.perf_counter()
        self._working = False

    @property
    def allows(self) -> bool:
        """True if the budget allows work now."""
        self._count(time.perf_counter())
        return self._balance_s >= 0.0

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Count the block as work; nested blocks count once."""
        if self._working:
            yield
            return
        began, self._working = time.perf_counter(), True
        try:
            yield
        finally:
            now, self._working = time.perf_counter(), False
            self.cost_s = now - began
            self._count(now)
            self._balance_s -= self.cost_s

    def _count(self, now: float) -> None:
        self._balance_s = min(BURST_S, self._balance_s + self.share * (now - self._counted_at))
        self._counted_at = now
