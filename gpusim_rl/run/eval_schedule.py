"""Schedule and results of evaluations during training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gpusim_rl.run.eval_process import EvalProcess
from gpusim_rl.run.log_interval import LogIntervals
from gpusim_rl.run.logger import Logger
from gpusim_rl.run.run_spec import RunSpec
from gpusim_rl.run.stop_signal import StopSignal
from gpusim_rl.run.timing import PhaseTimer

EVAL_LOG = "eval.log"  # output of the evaluation process, in the run folder


class EvalSchedule:
    """Evaluations every `eval.interval` iterations in another process; training continues if that process fails."""

    def __init__(
        self, spec: RunSpec, log: Logger, iteration: int, intervals: LogIntervals, timer: PhaseTimer, stop: StopSignal
    ) -> None:
        self._log, self._intervals, self._timer, self._stop_signal = log, intervals, timer, stop
        self._process: EvalProcess | None = None
        try:
            self._process = EvalProcess(spec, log.run_dir.path / EVAL_LOG, iteration)
        except OSError as error:  # too little memory, a full disk
            self._fail(str(error))

    def after_iteration(
        self, iteration: int, state: Callable[[], Mapping[str, Any]], *, learning: bool, last: bool
    ) -> None:
        """Collect a finished evaluation and begin the next one if it is due.

        `state` builds the checkpoint. No evaluation begins unless `learning`; if `last`, wait for the result.
        """
        self._take_result(wait=last)
        if self._process is None or not (learning and self._process.due(iteration, last=last)):
            return
        checkpoints = self._log.checkpoints
        if not (last or checkpoints.may_evaluate()):
            return
        with self._stop_signal.aside(), checkpoints.budget_evaluated.spending():
            checkpoint = state()
            if not all(bool(value.isfinite().all()) for value in checkpoint["policy"].values()):
                return  # the next row or checkpoint raises the error
            file = checkpoints.save_evaluated(checkpoint)
        if file is not None:
            self._process.begin(file, iteration)
            self._take_result(wait=last)

    def _take_result(self, *, wait: bool) -> None:
        process = self._process
        if process is None:
            return
        row = process.poll()
        if wait:
            with self._timer.paused():
                while process.evaluating is not None and self._stop_signal.number is None:
                    self._log.console.progress(f"evaluation of iteration {process.evaluating}")
                    row = process.poll(0.1)
        if row is not None:
            self._intervals.add(row)
            shown = [f"{name.removeprefix('eval/')} {value:.5g}" for name, value in row.items() if value is not None]
            self._log.console.info(f"evaluation: {', '.join(shown)}")
            self._log.checkpoints.end_evaluation(row["eval/return"])
        if process.failure is not None:
            self._fail(process.failure)
            self.close()

    def _fail(self, reason: str) -> None:
        details = f"{reason.removesuffix('.')}; see {self._log.run_dir}/{EVAL_LOG}"
        kept = ", and best.pt is kept" if self._log.checkpoints.stop_evaluations() else ""
        self._log.console.warn(f"evaluations stopped ({details}); training continues without them{kept}")

    def close(self) -> None:
        """Stop the evaluation process."""
        if self._process is not None:
            self._process.close()
            self._process = None
