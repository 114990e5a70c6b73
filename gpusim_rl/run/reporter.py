"""Metrics reporting: check, log and publish rows of metrics."""

from __future__ import annotations

import torch

from gpusim_rl.env import Environment
from gpusim_rl.run.finite_check import FiniteCheck
from gpusim_rl.run.log_interval import LogIntervals, LogRow
from gpusim_rl.run.logger import DIVERGED, Logger
from gpusim_rl.run.start import RunView
from gpusim_rl.run.stop_signal import StopSignal


class Reporter:
    """Metrics reporter of a training run; raises TaskError for non-finite values, or if no sample is valid."""

    def __init__(self, intervals: LogIntervals, task_name: str, stop_signal: StopSignal) -> None:
        self.finite_check = FiniteCheck(task_name)
        self._intervals, self._stop_signal = intervals, stop_signal
        self._divergence_reported = False

    def publish(self, run: RunView, log: Logger, *, drain: bool = False) -> LogRow | None:
        """Publish rows that have arrived, after ending a due log interval; `drain` instead waits for pending rows.

        Return the row at which the policy has not changed for `PATIENCE` iterations, or None.
        """
        rows = self._intervals.drain() if drain else self._rows_of_interval(run)
        for row in rows:
            self.finite_check.check_row(row, run.iteration, run.algorithm)
        with self._stop_signal.aside():
            log.record(rows)
        if not self._divergence_reported and any(row.numbers.get("sim/diverged") for row in rows):
            self._divergence_reported = True
            if (first := run.env.first_diverged()) is not None:
                about = {"task": run.start.task_name, "config": run.start.spec.config, "sim": run.start.sim.name}
                log.write_diverged({**about, "iteration": run.iteration, **first})
        idle = None
        for row in rows:
            foreign = issubclass(run.start.spec.task_class, Environment)  # another library's, without a dump
            self.finite_check.check_samples(row, run.cfg.num_envs, None if foreign else log.replay(DIVERGED))
            idle = idle if self.finite_check.learns(row) else row
        return idle

    def _rows_of_interval(self, run: RunView) -> list[LogRow]:
        if run.iteration % run.cfg.log.interval and not run.complete:
            return []
        numbers = {"sim/overflow": run.env.overflow.sum().float().to(run.start.device)}
        for name, (room, need) in run.env.buffers.items():  # summed over processes: the mean, or above 1 if one is full
            share = torch.where(need > room, 1.0, 1.0 / run.start.collective.size)
            numbers[f"sim/{name}_used"] = (share * need / room).to(run.start.device)
        return self._intervals.end(run.iteration, run.env_steps, run.elapsed_s, numbers)
