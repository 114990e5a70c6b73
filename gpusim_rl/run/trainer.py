"""Training loop, and the state that a run continues from."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_map_only

from gpusim_rl.errors import ConfigError, one_line_if_out_of_memory
from gpusim_rl.files.checkpoint_file import check_is_data
from gpusim_rl.run import checkpoint
from gpusim_rl.run.background_compile import BackgroundCompile
from gpusim_rl.run.collector import Collector
from gpusim_rl.run.eval_schedule import EvalSchedule
from gpusim_rl.run.held_objects import generators_of
from gpusim_rl.run.log_interval import LogIntervals, LogRow
from gpusim_rl.run.logger import LOGGER_KEYS, SKIPPED, Logger, open_log
from gpusim_rl.run.metrics import Row
from gpusim_rl.run.profiler import profiling
from gpusim_rl.run.reporter import Reporter
from gpusim_rl.run.run_dir import RunDir
from gpusim_rl.run.start import RunStart, RunView
from gpusim_rl.run.stop_signal import IterationLeftError, StopSignal

PER_PROCESS = ("algorithm", "env", "torch_rng", "metrics")  # per-process entries of the training state


class Trainer:
    """Training run of one task with one algorithm, new or from `state`. The constructor writes nothing to disk."""

    def __init__(self, start: RunStart, collector: Collector, state: Mapping[str, Any] | None = None) -> None:
        self.start, self.collector, self.cfg = start, collector, start.cfg
        self.env, self.algorithm = collector.env, collector.algorithm
        self.iteration = self.env_steps = 0  # completed iterations, and control steps summed over envs and processes
        self.run_dir: RunDir | None = None  # opened by `logging`
        self.stop_signal = StopSignal()
        self.intervals = LogIntervals(collector, start.collective)
        name = start.cfg.env.id or start.cfg.env._target_ or start.task_name
        self._reporter = Reporter(self.intervals, name, self.stop_signal)
        self._check = self._reporter.finite_check
        self._evaluations: EvalSchedule | None = None
        self._compilation = BackgroundCompile(collector)
        self._elapsed_s, self._started_at = 0.0, time.perf_counter()
        self._others_stop = False  # whether another process has received a signal
        self._put_back = False  # whether the learner was restored for lack of finite gradients
        self._show_progress: Callable[[str], None] = lambda text: None
        self._earlier_log: Mapping[str, Any] = {}  # state of an earlier start's logger
        if state is not None:
            assert start.spec.checkpoint is not None
            target = f"task {start.task_name} with algo={self.cfg.algo}"
            with checkpoint.must_fit(start.spec.checkpoint.file, target):
                self._load(state)
        elif start.collective.size > 1:
            policy = self.algorithm.policy
            weights = {name: value.cpu() for name, value in policy.state_dict().items()}
            policy.load_state_dict(start.collective.share(weights))

    def train(self) -> Row:
        """Train until `max_iterations`; return the last row of metrics.

        Ctrl-C, SIGTERM and SIGHUP save a checkpoint after the current iteration and exit with code 128 + signal. An
        iteration over 10 s is aborted; the checkpoint before it remains. A second signal ends the process immediately.
        """
        cfg, named = self.cfg, self.start.spec.checkpoint
        with one_line_if_out_of_memory(cfg.num_envs):  # fail before the run folder is made
            check_is_data(self.state_dict())
        done = f"nothing to do: {self.iteration} iterations are already done (max_iterations={cfg.max_iterations})"
        hint = f"Try max_iterations={2 * self.iteration}"
        if self.complete and named is not None and not named.continues:  # a new folder would stay empty
            raise ConfigError(done, key=str(named.file), hint=hint)
        with (
            self.logging() as log,
            self.stop_signal,
            profiling(self.view(), self.collector.timer, log),
            one_line_if_out_of_memory(cfg.num_envs),
        ):
            if self.complete:
                log.console.info(f"{done}. {hint}")
            hook = register_optimizer_step_post_hook(lambda *_: self._pause("update"))
            left = False
            try:
                while not self.complete and not self.stopping:
                    self.iterate(log)
            except IterationLeftError:
                left = True
            finally:
                hook.remove()
            row = self._finish(log, left=left)
        if self.stopping:
            raise SystemExit(128 + (self.stop_signal.number or signal.SIGTERM))
        return row

    def iterate(self, log: Logger) -> None:
        """Run one iteration: collect, update, log."""
        self.stop_signal.begin_iteration()
        self.collector.collect(self._pause)
        self.collector.update()
        self.iteration += 1
        self.env_steps += self.start.collective.size * self.env.num_envs * self.algorithm.horizon
        with self.collector.timer("log"):
            self.start = self._compilation.after_iteration(self.view(), log)
            log.note(self.view())  # a capture may have failed
            if self._evaluations is not None:
                state = lambda: self.state_dict() | log.state_dict()  # noqa: E731
                learning = self._check.learning
                self._evaluations.after_iteration(self.iteration, state, learning=learning, last=self.complete)
            self._publish(log)
            stopping = self.stop_signal.number is not None
            due = log.checkpoints.due(self.iteration, self.intervals.mean_return, self.stop_signal.long)
            self._others_stop, due = self.start.collective.any(stopping, due or stopping)
            if due:
                self.save(log)

    def _pause(self, done: str) -> None:
        self.stop_signal.check()
        self._show_progress(f"iteration {self.iteration + 1}: {done}")

    @contextmanager
    def logging(self) -> Iterator[Logger]:
        """Open the run folder and its logger for the block; close the environments after it."""
        try:
            with open_log(self.view(), self._earlier_log) as log, self.collector.graphs.stream():
                self.run_dir = log.run_dir
                self.stop_signal.notify, self._show_progress = log.console.notice, log.console.progress
                if self.cfg.eval.interval and not self.complete and self.start.collective.rank == 0:
                    shared = self.intervals, self.collector.timer, self.stop_signal
                    self._evaluations = EvalSchedule(self.start.spec, log, self.iteration, *shared)
                self.intervals.start()
                self._started_at = time.perf_counter()
                self.collector.timer.start()
                yield log
        finally:
            self.close()

    def close(self) -> None:
        """Free the simulator and end the evaluation process."""
        if self._evaluations is not None:
            self._evaluations.close()
        self._compilation.close()
        self.intervals.close()
        self.collector.close()

    def view(self) -> RunView:
        """Return a view of the run's current state."""
        return RunView(
            start=self.start,
            env=self.env,
            algorithm=self.algorithm,
            num_actors=self.collector.num_actors,
            graph=self.collector.graphs.choice,
            iteration=self.iteration,
            env_steps=self.env_steps,
            elapsed_s=self._elapsed_s + time.perf_counter() - self._started_at,
            best_return=self.intervals.best_return,
        )

    def _publish(self, log: Logger, *, drain: bool = False) -> None:
        idle = self._reporter.publish(self.view(), log, drain=drain)
        if idle is not None:
            self._restore_learner(log, idle)

    def _restore_learner(self, log: Logger, row: LogRow) -> None:
        """Restore the learner from last.pt, since the normaliser may be non-finite; raise TaskError the second time."""
        if self._put_back or log.checkpoints.saved is None or self.complete:
            replay = log.dump(SKIPPED, self.state_dict())
            raise self._check.no_gradient(row, self.algorithm, replay)
        self._put_back = True
        state, regrouped = checkpoint.state_of_process(checkpoint.load(log.checkpoints.last), self.start.collective)
        self.algorithm.policy.load_state_dict(state["policy"])
        self.algorithm.load_state_dict(checkpoint.clear_entries(state["algorithm"], checkpoint.EPISODES))
        if regrouped:
            self._seed_noise()
        problem = f"no gradient was finite in several iterations, up to iteration {row.iterations[-1]}"
        restored = f"restored the learner from iteration {state['iteration']}"
        log.console.warn(f"{problem}; {restored}. The run ends if this happens again")

    def save(self, log: Logger, *, final: bool = False) -> None:
        """Publish pending rows, which a resumed run cannot reproduce; save the state if `final` or still learning."""
        self._publish(log, drain=True)
        self._check.check_row(self.intervals.pending(self.iteration), self.iteration, self.algorithm)
        if final or self._check.learning:
            self._check.check_policy(self.algorithm.policy.state_dict(), self.iteration)
            with self.stop_signal.aside(), log.checkpoints.budget.spending():
                log.checkpoints.save(self._state_to_save(log), self.intervals.mean_return)

    def _finish(self, log: Logger, *, left: bool) -> Row:
        self._publish(log, drain=True)
        # A late signal or a full disk can leave this iteration unsaved: either all processes save, or none.
        [unsaved] = self.start.collective.any(not left and log.checkpoints.saved != self.iteration)
        if unsaved:
            self.save(log, final=True)
        return log.finish(self.view(), left=left)

    @property
    def stopping(self) -> bool:
        """True if a signal has requested a stop; with several processes, as exchanged after the previous iteration."""
        return self._others_stop if self.start.collective.size > 1 else self.stop_signal.number is not None

    @property
    def complete(self) -> bool:
        """True if all iterations are done."""
        return self.iteration >= self.cfg.max_iterations

    def state_dict(self) -> dict[str, Any]:
        """Return all state needed to continue training."""
        run = self.view()
        return {
            "task": self.start.task_name,
            "config": self.start.spec.config,
            "overrides": self.start.spec.overrides,
            "obs_sizes": dict(self.env.obs_sizes),
            "images": dict(self.env.images),
            "num_actions": self.env.num_actions,
            "sim": self.start.sim.name,
            "seed": self.start.seed,
            "iteration": self.iteration,
            "env_steps": self.env_steps,
            "elapsed_s": run.elapsed_s,
            "best_return": run.best_return,
            "compiled_since": self.start.compile.since,
            "torch_rng": torch.get_rng_state(),
            **self.collector.state_dict(),
        }

    def _state_to_save(self, log: Logger) -> dict[str, Any]:
        """Return the checkpoint contents, with the per-process state of all ranks; all must call this."""
        state, collective = self.state_dict() | log.state_dict(), self.start.collective
        if collective.size == 1:
            return state
        own = tree_map_only(Tensor, Tensor.cpu, {name: state[name] for name in PER_PROCESS})
        return state | {"processes": dict(enumerate(collective.gather(own)))}

    def _load(self, state: Mapping[str, Any]) -> None:
        checkpoint.check_spaces(state, self.env)
        self.iteration, self.env_steps = int(state["iteration"]), int(state["env_steps"])
        torch.set_rng_state(state["torch_rng"].cpu())
        regrouped = self.start.regrouped
        self.collector.load_state_dict(state, same_envs=state["sim"] == self.start.sim.name and not regrouped)
        if regrouped:
            self._seed_noise()
        self.intervals.resume(self.iteration, self.env_steps, state["best_return"])
        self._elapsed_s = float(state["elapsed_s"])
        self._earlier_log = {name: state.get(name) for name in LOGGER_KEYS}

    def _seed_noise(self) -> None:
        """Reseed the algorithm's noise, so that processes with the same state differ."""
        for number, generator in enumerate(generators_of(self.algorithm, self.start.device)):
            generator.manual_seed(self.start.process_seed + self.iteration + number)
