"""What a training tells after each iteration: rows that were checked, and checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpusim_rl.run import checkpoint
from gpusim_rl.run.finite_check import FiniteCheck
from gpusim_rl.run.log_interval import LogRow
from gpusim_rl.run.logger import DIVERGED, SKIPPED, Logger, RunStatus
from gpusim_rl.run.metrics import Row

if TYPE_CHECKING:
    from gpusim_rl.run.trainer import Trainer


class Reporter:
    """Tells a logger how far a training is. The logger itself knows no trainer.

    Args:
        trainer: Of the run.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._finite_check = FiniteCheck(trainer.task_name)
        self._divergence_reported = False
        self._put_back = False  # to the last checkpoint, because no gradient was finite

    @property
    def learning(self) -> bool:
        """Whether the newest row tells of an update that changed the policy."""
        return self._finite_check.learning

    def status(self, *, drain: bool = False) -> RunStatus:
        """How far the training is; ends a log interval where one is due, and checks the rows that have arrived.

        Args:
            drain: Wait for rows that are still on their way.

        Raises:
            TaskError: A number is not finite.
        """
        it = self._trainer
        intervals, log_interval = it.intervals, it.cfg.log.interval
        rows: list[LogRow] = []
        if drain:
            rows += intervals.drain()
        elif it.iteration % log_interval == 0 or it.iteration == it.cfg.max_iterations:
            overflow = it.env.overflow.sum().float().to(it.collector.device)
            rows += intervals.end(it.iteration, it.env_steps, it.elapsed_s, {"sim/overflow": overflow})
        diverged = None
        for row in rows:
            self._finite_check.check_row(row, it.iteration, it.algorithm)
            if row.numbers.get("sim/diverged") and not self._divergence_reported:
                self._divergence_reported = True
                diverged = self._first_diverged()
        return RunStatus(
            it.iteration,
            tuple(rows),
            intervals.mean_return,
            intervals.best_return,
            it.stop_signal.number is not None,
            diverged,
        )

    def publish(self, log: Logger, *, drain: bool = False) -> RunStatus:
        """Publishes the rows that have arrived.

        Args:
            log: Where.
            drain: Wait for rows that are still on their way.

        Raises:
            TaskError: A number is not finite, or nothing can be learned any more.
        """
        status = self.status(drain=drain)
        log.record(status)
        for row in status.rows:
            self._finite_check.check_samples(row, self._trainer.cfg.num_envs, log.replay(DIVERGED))
            if not self._finite_check.learns(row):
                self._put_learner_back(log, row)
        return status

    def save(self, log: Logger, *, final: bool = False) -> None:
        """Writes a checkpoint.

        First writes the pending rows, because a resumed run does not produce them again.

        Args:
            log: Where.
            final: The training ends here. Else the state of a learner that has stopped learning is not saved: the
                last checkpoint is what it can be put back to.
        """
        status = self.publish(log, drain=True)
        if not (final or self.learning):
            return
        it = self._trainer
        self._finite_check.check_policy(it.algorithm.policy.state_dict(), it.iteration)
        log.save(status, it.state_of_all())

    def finish(self, log: Logger, *, left: bool) -> Row:
        """Publishes and saves what is left; returns the last row of metrics.

        Args:
            log: Where.
            left: The iteration after it was left before its end.
        """
        status = self.publish(log, drain=True)
        # A signal after the last look, or a disk that is full: of all processes, or of none.
        [unsaved] = self._trainer.collective.any(not left and not log.is_saved(status))
        if unsaved:
            self.save(log, final=True)
        return log.finish(status, left=left)

    def _put_learner_back(self, log: Logger, row: LogRow) -> None:
        """The learner is as in the last checkpoint, for once; the envs and the count of iterations go on.

        Weights are as they were, for what is not finite is skipped. Statistics of normalisers may be beyond repair.
        """
        it, last = self._trainer, log.last_checkpoint
        if self._put_back or last is None or it.complete:
            replay = log.dump(SKIPPED, it.state_dict())
            raise self._finite_check.no_gradient(row, it.algorithm, replay)
        self._put_back = True
        state = checkpoint.load(last)
        it.algorithm.policy.load_state_dict(state["policy"])
        it.algorithm.load_state_dict(state["algorithm"])
        it.algorithm.begin_episodes()
        log.console.warn(
            f"no gradient was finite any more in iteration {row.iterations[-1]}: the learner is put back to"
            f" iteration {state['iteration']}. If this happens again, the run ends"
        )

    def _first_diverged(self) -> dict[str, Any] | None:
        """From where the first env diverged, to be replayed."""
        it = self._trainer
        first = it.env.first_diverged()
        if first is None:
            return None
        about = {"task": it.task_name, "config": it.spec.config, "sim": it.start.sim.name}
        return {**about, "iteration": it.iteration, **first}
