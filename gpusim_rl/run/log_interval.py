"""Log intervals: rows of metrics from device sums and host times."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gpusim_rl.learn.collective import ALONE, Collective
from gpusim_rl.run.collector import Collector
from gpusim_rl.run.metrics import Row
from gpusim_rl.run.system import SystemMonitor
from gpusim_rl.run.timing import Durations


@dataclass(frozen=True, slots=True)
class LogRow:
    """Row of a log interval with its unlogged flags (`check/...`), and the ranks with non-finite flags, if known."""

    iterations: range
    numbers: Row
    flags: Row
    processes: tuple[int, ...] = ()


class LogIntervals:
    """Log intervals of a training run, from its collector's metrics and timer."""

    def __init__(self, collector: Collector, collective: Collective = ALONE) -> None:
        self._collector, self._collective = collector, collective
        self._metrics, self._timer = collector.metrics, collector.timer
        self._summed_s = 0.0  # time in all-reduces before the interval
        self._monitor: SystemMonitor | None = None
        self._start = (0, 0)  # iterations and control steps before the interval
        self._added: Row = {}
        self.mean_return: float | None = None  # trimmed mean return of the newest row, if its window is full
        self.best_return: float | None = None  # highest trimmed mean return so far

    def start(self) -> None:
        """Start monitoring the machine."""
        self._monitor = SystemMonitor(self._collector.device)

    def resume(self, iteration: int, env_steps: int, best_return: float | None) -> None:
        """Continue where an earlier start of the run ended."""
        self._start = (iteration, env_steps)
        self.best_return = best_return

    def add(self, numbers: Row) -> None:
        """Add host-side numbers to the row of this interval."""
        self._added |= numbers

    def end(self, iteration: int, env_steps: int, elapsed_s: float, extra: Mapping[str, Tensor]) -> list[LogRow]:
        """End an interval, adding device scalars `extra` to its row; return arrived rows (`Metrics.flush`)."""
        numbers: Row = {"iteration": iteration, "env_steps": env_steps, "time/elapsed_s": elapsed_s, **self._added}
        numbers |= self._collector.numbers()
        self._added = {}
        durations = self._timer.flush()
        ended = (numbers, range(self._start[0] + 1, iteration + 1), env_steps - self._start[1], durations)
        self._start = (iteration, env_steps)
        self._wait()
        summing_s = self._collective.summing_s
        if summing_s is not None:  # `extra` is summed over processes: divide for the mean
            seconds, self._summed_s = summing_s - self._summed_s, summing_s
            extra = {**extra, "time/sums": torch.tensor(seconds / durations.wall_s / self._collective.size)}
        return [self._row(*row) for row in self._metrics.flush(ended, extra)]

    def drain(self) -> list[LogRow]:
        """Wait for the pending row, if any, and return it."""
        self._wait()
        return [self._row(*row) for row in self._metrics.drain()]

    def pending(self, iteration: int) -> LogRow:
        """Return the flags of the unfinished interval. Waits for the device; all processes must call this together."""
        own, collective = self._metrics.flags(), self._collective
        bad = [value is None or not math.isfinite(value) for value in own.values()]
        by_rank = [rank == collective.rank and any(bad) for rank in range(collective.size)]
        anywhere = collective.any(*bad, *by_rank)
        flags: Row = {name: math.nan if is_bad else own[name] for name, is_bad in zip(own, anywhere, strict=False)}
        processes = tuple(rank for rank, is_bad in enumerate(anywhere[len(own) :]) if is_bad)
        return LogRow(range(self._start[0] + 1, iteration + 1), {}, flags, processes if collective.size > 1 else ())

    def close(self) -> None:
        """Stop monitoring the machine."""
        if self._monitor is not None:
            self._monitor.close()

    def _wait(self) -> None:
        """Wait for the device, excluding the time from the `log` phase: on CUDA, the host runs one iteration ahead."""
        with self._timer.waiting():
            self._metrics.wait()

    def _row(self, ended: tuple[Row, range, int, Durations], values: Row) -> LogRow:
        """Combine host numbers and device values of an interval into a row; update the mean and best returns."""
        numbers, iterations, env_steps, durations = ended
        wall_s, phases = durations.wall_s, durations.phases()
        row: Row = numbers | {
            "time/iteration_s": wall_s / len(iterations),
            "speed/env_steps_per_s": env_steps / wall_s,
            "speed/sim_steps_per_s": env_steps / phases["simulate"] if phases.get("simulate") else None,
        }
        row |= {f"time/{phase}": seconds / wall_s for phase, seconds in phases.items()}
        row |= self._monitor.latest() if self._monitor is not None else {}
        flags = {name: value for name, value in values.items() if name.startswith("check/")}
        row |= {name: value for name, value in values.items() if name not in flags}
        self.mean_return = now = row.get("episode/trimmed_return")
        if now is not None and (self.best_return is None or now > self.best_return):
            self.best_return = now
        row["episode/best_return"] = self.best_return
        return LogRow(iterations, row, flags)
