"""A training run. Builds everything once; `train()` is the loop."""

from __future__ import annotations

import secrets
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_map_only

from gpusim_rl.errors import ConfigError, one_line_if_out_of_memory
from gpusim_rl.files.checkpoint_file import check_is_data
from gpusim_rl.run import checkpoint
from gpusim_rl.run.banner import banner
from gpusim_rl.run.collector import Collector
from gpusim_rl.run.compilation import compile_training
from gpusim_rl.run.eval_schedule import EvalSchedule
from gpusim_rl.run.evaluation import evaluate, report
from gpusim_rl.run.log_interval import LogIntervals
from gpusim_rl.run.logger import Logger, SilentLogger
from gpusim_rl.run.metadata import describe_run
from gpusim_rl.run.metrics import Row
from gpusim_rl.run.profiler import profiling
from gpusim_rl.run.reporter import Reporter
from gpusim_rl.run.run_dir import RunDir
from gpusim_rl.run.start import RunStart
from gpusim_rl.run.stop_signal import IterationLeftError, StopSignal

OWN = ("algorithm", "env", "torch_rng", "metrics")
"""What of the state each of several processes has for itself."""


class Trainer:
    """Trains or evaluates one task with one algorithm.

    Building it checks the checkpoint, and leaves nothing on disk; `train()` makes the run folder.

    Args:
        start: Start of the run.
        collector: Environments and algorithm of the run.
        state: What the run continues from: `state_dict` of an earlier start; None for a new run.

    Raises:
        ConfigError: The checkpoint does not fit.

    Attributes:
        iteration: Iterations done.
        env_steps: Control steps done, summed over envs and processes.
        run_dir: Folder of the run; None before `logging` opens it.
        stop_signal: Ends the training early.
    """

    def __init__(self, start: RunStart, collector: Collector, state: Mapping[str, Any] | None = None) -> None:
        spec, collective = start.spec, start.collective
        self.start, self.collector = start, collector
        self.spec, self.cfg, self.collective = spec, spec.cfg, collective
        self.env, self.algorithm = collector.env, collector.algorithm
        self.task_name = spec.task_class.__name__
        self.iteration = 0
        self.env_steps = 0
        self.wandb_id = ""
        self._metrics_csv: dict[str, Any] | None = None  # what the checkpoint tells of the file
        self._best_evaluation: float | None = None  # so far, in earlier starts of the run
        self._evaluations: EvalSchedule | None = None
        self.run_dir: RunDir | None = None
        self._elapsed_s, self._started_at = 0.0, time.perf_counter()
        self.intervals = LogIntervals(collector, collective)
        self.stop_signal = StopSignal()
        self._others_stop = False  # another process has got a signal
        self._show_progress: Callable[[str], None] = lambda text: None
        self._reporter = Reporter(self)
        if state is not None:
            assert spec.checkpoint is not None
            with checkpoint.must_fit(spec.checkpoint.file, f"task {self.task_name} with algo={spec.cfg.algo}"):
                self._load(state)
        elif collective.size > 1:
            weights = self.algorithm.policy.state_dict()
            self.algorithm.policy.load_state_dict(collective.share({name: x.cpu() for name, x in weights.items()}))
        self.compile = compile_training(spec.cfg, collector.device, self.env, self.algorithm)

    # The loop

    def train(self) -> Row:
        """Trains until `max_iterations`; returns the last row of metrics.

        Ctrl-C, SIGTERM and SIGHUP end the training after the iteration under way, with a checkpoint, and exit with the
        shell's code for the signal. An iteration that takes longer than 10 s is left before its end instead, and the
        checkpoint before it stays. A second signal ends the training at once.
        """
        cfg = self.cfg
        with one_line_if_out_of_memory(cfg.num_envs):  # before the run folder is made, not at the first checkpoint
            check_is_data(self.state_dict())
        nothing = (
            f"nothing to do: {self.iteration} iterations are done, and max_iterations={cfg.max_iterations}; try"
            f" max_iterations={2 * self.iteration}"
        )
        found = self.spec.checkpoint
        if self.complete and found is not None and not found.continues:  # a new folder would stay empty
            raise ConfigError(f"{found.file}: {nothing}")
        with self.logging() as log, self.stop_signal, profiling(self, log), one_line_if_out_of_memory(cfg.num_envs):
            if self.complete:
                log.console.info(nothing)
            left = False
            try:
                with self._between_optimizer_steps():
                    while not self.complete and not self.stopping:
                        self.iterate(log)
            except IterationLeftError:
                left = True
            row = self._reporter.finish(log, left=left)
        if self.stopping:
            raise SystemExit(128 + (self.stop_signal.number or signal.SIGTERM))
        return row

    def iterate(self, log: Logger) -> None:
        """One iteration: collect, update, log."""
        self.stop_signal.begin_iteration()
        self.collector.collect(self._pause)
        self.collector.update()
        self.iteration += 1
        self.env_steps += self.collective.size * self.env.num_envs * self.algorithm.horizon
        with self.collector.timer("log"):
            if self._noted != self.collector.graphs.choice:  # a capture failed
                self._note_metadata(log)
            if self._evaluations is not None:
                self._evaluations.after_iteration(
                    self.iteration, self.state_dict, learning=self._reporter.learning, last=self.complete
                )
            status = self._reporter.publish(log)
            # a long iteration: what a signal in the next one would fall back to
            due = log.checkpoint_due(status) or self.stop_signal.long
            self._others_stop, due = self.collective.any(status.stopping, due)
            if due:
                self.save(log)

    def _pause(self, done: str) -> None:
        """Between two parts of an iteration that takes long: shows where it is, or leaves it after a signal."""
        self.stop_signal.check()
        self._show_progress(f"iteration {self.iteration + 1}: {done}")

    @contextmanager
    def _between_optimizer_steps(self) -> Iterator[None]:
        """In the block every optimiser step of an update is followed by a pause, whatever the algorithm."""
        hook = register_optimizer_step_post_hook(lambda *_: self._pause("update"))
        try:
            yield
        finally:
            hook.remove()

    def evaluate(self) -> dict[str, float]:
        """Runs one whole episode in every env without exploration; prints, writes and returns the result."""
        try:
            result = evaluate(self.env, self.algorithm.policy, self.collector.obs)
        finally:
            self.close()
        found = self.spec.checkpoint
        about = {
            "checkpoint": str(found.file if found else self.cfg.checkpoint),
            "iteration": self.iteration,
            "task": self.task_name,
            "sim": self.start.sim.name,
            "seed": self.start.seed,
            "num_envs": self.cfg.num_envs,
        }
        report(self.cfg.log.console, {**about, **result}, found.run_dir if found else None)
        return result

    # Logging

    @contextmanager
    def logging(self) -> Iterator[Logger]:
        """Opens the run folder and its logger; the block may `iterate`. At its end the environments are closed.

        Of several processes the first one does so.
        """
        if self.collective.rank:
            with self._logging_of_others() as log:
                yield log
            return
        try:
            with RunDir.of(self.spec, self.start.digest, trains=not self.complete) as (run_dir, continues):
                self.run_dir = run_dir
                self.collective.run_dir(str(run_dir.path.absolute()))
                if not continues:  # a branch of another run is a run of its own
                    self.wandb_id = secrets.token_hex(4)
                log = Logger(
                    self.cfg,
                    run_dir,
                    wandb_id=self.wandb_id,
                    resumed_at=self.iteration if self.start.resumed else None,
                    best_return=self._best_evaluation if self.cfg.eval.interval else self.intervals.best_return,
                    metrics_csv=self._metrics_csv if continues else None,
                    config_dir=self.spec.config_dir,
                )
                with log, self.collector.graphs.stream():
                    self.intervals.start()
                    log.start(banner(self, log.run_dir, continues=continues), self.spec.config)
                    if not self.complete:
                        self._note_metadata(log)
                    if self.cfg.eval.interval and not self.complete:
                        beside = self.intervals, self.collector.timer, self.stop_signal
                        self._evaluations = EvalSchedule(self.spec, log, self.iteration, *beside)
                    self.stop_signal.tell, self._show_progress = log.console.notice, log.console.progress
                    self._started_at = time.perf_counter()
                    self.collector.timer.start()
                    yield log
        finally:
            self.close()

    @contextmanager
    def _logging_of_others(self) -> Iterator[Logger]:
        try:
            self.run_dir = RunDir(Path(self.collective.run_dir(None)))
            resumed_at = self.iteration if self.start.resumed else None
            log = SilentLogger(self.cfg, self.run_dir, resumed_at=resumed_at)
            with log, self.collector.graphs.stream():
                self.intervals.start()
                self._note_metadata(log)
                self._started_at = time.perf_counter()
                self.collector.timer.start()
                yield log
        finally:
            self.close()

    def close(self) -> None:
        """Frees the simulator, and ends the process of evaluations."""
        if self._evaluations is not None:
            self._evaluations.close()
        self.intervals.close()
        self.collector.close()

    def _note_metadata(self, log: Logger) -> None:
        self._noted = self.collector.graphs.choice
        log.note(describe_run(self))

    def save(self, log: Logger) -> None:
        """Writes a checkpoint, and before it the rows that are pending."""
        self._reporter.save(log)

    @property
    def stopping(self) -> bool:
        """A signal has asked for the end, in this process or, at the last look, in another one."""
        # One of several must not end earlier than the others, which would wait for it.
        return self._others_stop if self.collective.size > 1 else self.stop_signal.number is not None

    @property
    def complete(self) -> bool:
        """All iterations are done."""
        return self.iteration >= self.cfg.max_iterations

    @property
    def elapsed_s(self) -> float:
        """Time of training, that of earlier starts of the run included [s]."""
        return self._elapsed_s + time.perf_counter() - self._started_at

    # State

    def state_dict(self) -> dict[str, Any]:
        """Everything that the rest of the run depends on."""
        return {
            "task": self.task_name,
            "config": self.spec.config,
            "overrides": self.spec.overrides,
            "obs_sizes": dict(self.env.obs_sizes),
            "num_actions": self.env.num_actions,
            "sim": self.start.sim.name,
            "seed": self.start.seed,
            "iteration": self.iteration,
            "env_steps": self.env_steps,
            "elapsed_s": self.elapsed_s,
            "best_return": self.intervals.best_return,
            "wandb_id": self.wandb_id,
            "torch_rng": torch.get_rng_state(),
            **self.collector.state_dict(),
        }

    def state_of_all(self) -> dict[str, Any]:
        """`state_dict`, with what the other processes have for themselves. All of them must call it at once."""
        state = self.state_dict()
        if self.collective.size == 1:
            return state
        own = tree_map_only(Tensor, Tensor.cpu, {name: state[name] for name in OWN})
        return state | {"processes": dict(enumerate(self.collective.gather(own)))}

    def _load(self, state: Mapping[str, Any]) -> None:
        for key, now in (("obs_sizes", dict(self.env.obs_sizes)), ("num_actions", self.env.num_actions)):
            if state[key] != now:
                raise ValueError(f"{key} saved {state[key]}, now {now}")
        self.iteration, self.env_steps = int(state["iteration"]), int(state["env_steps"])
        if self.cfg.test:
            self.algorithm.policy.load_state_dict(state["policy"])
            self.collector.begin_from(state["env"])
            return
        torch.set_rng_state(state["torch_rng"].cpu())
        regrouped = self.start.regrouped
        self.collector.load_state_dict(state, same_envs=state["sim"] == self.start.sim.name and not regrouped)
        if regrouped:
            for number, generator in enumerate(self.algorithm.generators):
                generator.manual_seed(self.start.process_seed + self.iteration + number)
        self.intervals.resume(self.iteration, self.env_steps, state["best_return"])
        self._elapsed_s, self.wandb_id = float(state["elapsed_s"]), state["wandb_id"]
        self._metrics_csv, self._best_evaluation = state.get("metrics_csv"), state.get("best_evaluation")
