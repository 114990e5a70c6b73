"""A training run. Builds everything once; `train()` is the loop."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from gpusim_rl.checkpoint_file import check_is_data, digest_of
from gpusim_rl.config import RunSpec
from gpusim_rl.env import Environment, Step, VecEnv
from gpusim_rl.env.device_env import moved
from gpusim_rl.errors import ConfigError, one_line_if_out_of_memory
from gpusim_rl.hardware import tune_malloc
from gpusim_rl.learn.algorithm import Algorithm, EnvSpec
from gpusim_rl.run import checkpoint
from gpusim_rl.run.banner import banner
from gpusim_rl.run.compilation import CompileChoice, Trial, choose_compile, cuda_seconds
from gpusim_rl.run.cuda_graph import Graphs, choose_graph
from gpusim_rl.run.device_check import check_devices
from gpusim_rl.run.devices import choose_devices, choose_eval_devices
from gpusim_rl.run.eval_process import EvalProcess
from gpusim_rl.run.evaluation import evaluate, report
from gpusim_rl.run.finite_check import FiniteCheck
from gpusim_rl.run.log_interval import LogIntervals, LogRow
from gpusim_rl.run.logger import DIVERGED, EVAL_LOG, SKIPPED, Logger, RunStatus
from gpusim_rl.run.memory_estimate import warn_of_learner_memory, warn_of_memory
from gpusim_rl.run.metadata import describe_run
from gpusim_rl.run.metrics import Metrics, Row
from gpusim_rl.run.profiler import profiling
from gpusim_rl.run.run_dir import RunDir
from gpusim_rl.run.stop_signal import IterationLeftError, StopSignal
from gpusim_rl.run.timing import PhaseTimer
from gpusim_rl.run.writers import require_tensorboard
from gpusim_rl.sim import make_sim
from gpusim_rl.torch_threads import ROWS_PER_THREAD, limit_torch_threads, use_available_cpus

logger = logging.getLogger("gpusim_rl.run")


class Trainer:
    """Trains or evaluates one task with one algorithm.

    Building it checks the configuration, the checkpoint and the task, and leaves nothing on disk; `train()` makes the
    run folder.

    Args:
        spec: The run.

    Raises:
        ConfigError: Something in the configuration or the checkpoint does not fit.
        TaskError: A hook of the task is wrong.

    Attributes:
        iteration: Iterations done.
        env_steps: Control steps done, summed over envs.
        run_dir: Folder of the run; None before `logging` opens it.
        obs: Observations to act on next. The tensors are never replaced, because a CUDA graph uses their addresses.
    """

    def __init__(self, spec: RunSpec) -> None:
        cfg = spec.cfg
        self.spec, self.cfg = spec, cfg
        self.task_name = spec.task_class.__name__
        if cfg.log.tensorboard:
            require_tensorboard()
        self._digest = digest_of(spec.checkpoint.file) if spec.checkpoint is not None else None
        state = checkpoint.load_for(spec)
        self.resumed = state is not None
        self.seed = self._choose_seed(state)
        outside = issubclass(spec.task_class, Environment)
        self.rl_device, self.choice = choose_devices(cfg, outside=outside)
        if cfg.eval.interval and not cfg.test:
            choose_eval_devices(cfg, outside=outside)  # what is wrong is said now
        torch.manual_seed(self.seed)
        if cfg.torch_deterministic:  # without it cuBLAS refuses; read when CUDA starts
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(cfg.torch_deterministic)
        use_available_cpus()
        tune_malloc()

        self._fitting_envs = cfg.num_envs
        with self._one_line_if_out_of_memory():
            self.env = self._make_env()
            with self._devices_checked(("the environment", self.env, self.env.device)):
                self.obs = {group: value.to(self.rl_device, copy=True) for group, value in self.env.reset().items()}
            self.algorithm = self._make_algorithm()
        use_available_cpus(self.algorithm.batch_rows)
        self.metrics = Metrics(cfg.num_envs, self.rl_device)
        self.timer = PhaseTimer(self.rl_device)
        steps = self.algorithm.horizon * self.env.physics_evaluations
        check = cfg.debug.check_task
        self.graphs = Graphs(
            choose_graph(cfg.graph, self.rl_device, self.env.device, physics_steps=steps, check_task=check),
            self.rl_device,
            generators=self.algorithm.generators,
            stateful=[*self.env.stateful, self.algorithm],
        )
        self.iteration = 0
        self.env_steps = 0
        self.wandb_id = ""
        self._metrics_csv: dict[str, Any] | None = None  # what the checkpoint tells of the file
        self._best_evaluation: float | None = None  # so far, in earlier starts of the run
        self._evaluations: EvalProcess | None = None
        self.run_dir: RunDir | None = None
        self._elapsed_s, self._started_at = 0.0, time.perf_counter()
        self.intervals = LogIntervals(self.metrics, self.timer, self.rl_device)
        self._stop_signal = StopSignal()
        self._show_progress: Callable[[str], None] = lambda text: None
        self._finite_check = FiniteCheck(self.task_name)
        self._divergence_reported = False
        self._put_back = False  # to the last checkpoint, because no gradient was finite
        if state is not None:
            assert spec.checkpoint is not None
            with checkpoint.must_fit(spec.checkpoint.file, f"task {self.task_name} with algo={cfg.algo}"):
                self._load(state)
        self.compile = CompileChoice("off", "an evaluation")
        self._trial: Trial | None = None
        self._eager_graph = self.graphs.choice
        if not cfg.test:
            self._choose_compile(None if state is None else state.get("compile"))

    # The loop

    def train(self) -> Row:
        """Trains until `max_iterations`; returns the last row of metrics.

        Ctrl-C, SIGTERM and SIGHUP end the training after the iteration under way, with a checkpoint, and exit with the
        shell's code for the signal. An iteration that takes longer than 10 s is left before its end instead, and the
        checkpoint before it stays. A second signal ends the training at once.
        """
        cfg = self.cfg
        with self._one_line_if_out_of_memory():  # before the run folder is made, not at the first checkpoint
            check_is_data(self.state_dict())
        nothing = (
            f"nothing to do: {self.iteration} iterations are done, and max_iterations={cfg.max_iterations}; try"
            f" max_iterations={2 * self.iteration}"
        )
        found = self.spec.checkpoint
        if self.complete and found is not None and not found.continues:  # a new folder would stay empty
            raise ConfigError(f"{found.file}: {nothing}")
        with self.logging() as log, self._stop_signal, profiling(self, log), self._one_line_if_out_of_memory():
            if self.complete:
                log.console.info(nothing)
            left = False
            try:
                with self._between_optimizer_steps():
                    while not self.complete and self._stop_signal.number is None:
                        self.iterate(log)
            except IterationLeftError:
                left = True
            row = self._finish(log, left=left)
        if self._stop_signal.number is not None:
            raise SystemExit(128 + self._stop_signal.number)
        return row

    def iterate(self, log: Logger) -> None:
        """One iteration: collect, update, log."""
        self._stop_signal.begin_iteration()
        if self._trial is None:
            self._collect_and_update()
        elif (choice := self._trial.run(self._collect_and_update)) is not None:
            self.compile, self._trial = choice, None
            log.console.info(f"compile: {choice}")
        self.iteration += 1
        self.env_steps += self.cfg.num_envs * self.algorithm.horizon
        with self.timer("log"):
            if self._noted != (self.graphs.choice, self.compile):  # a capture failed, or compiled code was measured
                self._note_metadata(log)
            if self._evaluations is not None:
                self._evaluate(self._evaluations, log)
            status = self._record(log)
            if log.checkpoint_due(status) or self._stop_signal.long:  # what a signal in the next one would fall back to
                self.save(log)

    def _collect_and_update(self) -> None:
        env, algorithm = self.env, self.algorithm
        parts = [("the environment", env, env.device), ("the policy", algorithm.policy, self.rl_device)]
        with self._devices_checked(*parts, ("the algorithm", algorithm, self.rl_device)):
            self.collect()
            with self.timer("update"):
                algorithm.before_update()
                stats = self.graphs.run("update", algorithm.update)
                self.metrics.record_update(stats, type(algorithm).__name__)

    @contextmanager
    def _devices_checked(self, *parts: tuple[str, object, torch.device]) -> Iterator[None]:
        """With `debug.check_device`: before and after the block all tensors of these parts are on their device.

        Torch's own error in the block, where one is not, becomes one that names it.
        """
        checked = parts if self.cfg.debug.check_device else ()
        for part in checked:
            check_devices(*part)
        try:
            yield
        finally:
            for part in checked:
                check_devices(*part)

    def collect(self) -> None:
        """Acts for `horizon` control steps in all envs; the algorithm records them."""
        timed = self.timer("rollout") if self.graphs.whole_rollout else nullcontext()
        with timed, limit_torch_threads(self.cfg.num_envs, self.rl_device, ROWS_PER_THREAD):
            self.graphs.run("rollout", self._collect)

    @torch.no_grad()
    def _collect(self) -> None:
        def control_step() -> tuple[Tensor, Step]:
            with self.timer("policy"):
                action = self.algorithm.act(self.obs)
                if self.cfg.debug.check_device:
                    check_devices("the algorithm", {"act()": action}, self.rl_device)
            with self.timer("simulate"):
                step = self.env.step(action.to(self.env.device))
                if self.cfg.debug.check_device:
                    check_devices("the environment", step, self.env.device)
                return action, moved(step, self.rl_device)

        with self.timer("policy"):
            self.algorithm.begin_rollout()
            self.metrics.begin_rollout()
        for number in range(1, self.algorithm.horizon + 1):
            action, step = self.graphs.run("step", control_step)
            with self.timer("policy"):
                self.algorithm.record(action, step)
                self.metrics.record_step(step)
                self._copy_obs(step.obs)
            self._pause(f"control step {number}/{self.algorithm.horizon}")
        with self.timer("policy"):
            self.metrics.end_rollout()

    def _pause(self, done: str) -> None:
        """Between two parts of an iteration that takes long: shows where it is, or leaves it after a signal."""
        self._stop_signal.check()
        self._show_progress(f"iteration {self.iteration + 1}: {done}")

    @contextmanager
    def _between_optimizer_steps(self) -> Iterator[None]:
        """In the block every optimiser step of an update is followed by a pause, whatever the algorithm."""
        hook = register_optimizer_step_post_hook(lambda *_: self._pause("update"))
        try:
            yield
        finally:
            hook.remove()

    def _copy_obs(self, obs: dict[str, Tensor]) -> None:
        for group, value in obs.items():
            self.obs[group].copy_(value)

    def _evaluate(self, evaluations: EvalProcess, log: Logger) -> None:
        """Takes the result of an evaluation, and hands over the policy where one is due.

        The last policy is always evaluated, and the training waits for the result.
        """
        self._end_evaluation(evaluations, log)
        if not (self._finite_check.learning and evaluations.due(self.iteration, last=self.complete)):
            return
        if not all(bool(value.isfinite().all()) for value in self.algorithm.policy.state_dict().values()):
            return  # the next checkpoint, or the row before it, ends the run with the reason
        file = log.save_evaluated(self.state_dict())
        if file is not None:
            evaluations.begin(file, self.iteration)
            self._end_evaluation(evaluations, log)

    def _end_evaluation(self, evaluations: EvalProcess, log: Logger) -> None:
        row = evaluations.poll()
        if self.complete:
            with self.timer.paused():
                while evaluations.evaluating is not None and self._stop_signal.number is None:
                    log.console.progress(f"evaluation of iteration {evaluations.evaluating}")
                    row = evaluations.poll(0.1)
        if row is not None:
            self.intervals.add(row)
            log.end_evaluation(row)
        if evaluations.failure is not None:
            log.evaluations_failed(evaluations.failure)
            self._close_evaluations()

    def _start_evaluations(self, log: Logger) -> None:
        if not self.cfg.eval.interval or self.complete:
            return
        try:
            self._evaluations = EvalProcess(self.spec, log.run_dir.path / EVAL_LOG, self.iteration)
        except OSError as error:  # no memory for another process, a full disk
            log.evaluations_failed(str(error))

    def _close_evaluations(self) -> None:
        if self._evaluations is not None:
            self._evaluations.close()
            self._evaluations = None

    def evaluate(self) -> dict[str, float]:
        """Runs one whole episode in every env without exploration; prints, writes and returns the result."""
        try:
            result = evaluate(self.env, self.algorithm.policy, self.obs)
        finally:
            self.close()
        found = self.spec.checkpoint
        about = {
            "checkpoint": str(found.file if found else self.cfg.checkpoint),
            "iteration": self.iteration,
            "task": self.task_name,
            "sim": self.choice.name,
            "seed": self.seed,
            "num_envs": self.cfg.num_envs,
        }
        report(self.cfg.log.console, {**about, **result}, found.run_dir if found else None)
        return result

    # Building

    def _choose_seed(self, state: dict[str, Any] | None) -> int:
        if state is not None and not self.cfg.test:
            return int(state["seed"])
        return secrets.randbelow(2**31) if self.cfg.seed == -1 else self.cfg.seed

    def _make_env(self) -> Environment:
        cfg, task_class, task_cfg = self.cfg, self.spec.task_class, self.cfg.task
        if issubclass(task_class, Environment):
            return task_class.from_settings(cfg.env, num_envs=cfg.num_envs, seed=self.seed)
        if cfg.test:  # whole episodes only
            task_cfg = task_cfg.whole_episodes()
        scene = task_class.scene(task_cfg)
        self._fitting_envs = warn_of_memory(self.spec, scene, self.choice, self.rl_device)
        sim = make_sim(scene, self.choice, cfg.num_envs, cfg.sim)
        return VecEnv(task_class, task_cfg, sim, self.seed, check=cfg.debug.check_task)

    def _one_line_if_out_of_memory(self) -> AbstractContextManager[None]:
        return one_line_if_out_of_memory(self.cfg.num_envs, lambda: self._fitting_envs)

    def _make_algorithm(self) -> Algorithm:
        env = self.env
        spec = EnvSpec(self.cfg.num_envs, dict(env.obs_sizes), env.action_space, env.steps_between_truncations)
        settings, iterations = self.cfg.algorithm, self.cfg.max_iterations
        if self.cfg.test:
            settings = self.spec.algorithm_class.settings_to_evaluate(settings)
        self._fitting_envs = min(self._fitting_envs, warn_of_learner_memory(self.spec, spec, self.rl_device))
        return self.spec.algorithm_class(
            settings, spec, device=self.rl_device, seed=self.seed, max_iterations=iterations
        )

    def _choose_compile(self, before: str | None) -> None:
        cfg = self.cfg
        self.compile = choose_compile(
            cfg.compile,
            self.rl_device,
            self.env.device,
            check_task=cfg.debug.check_task,
            deterministic=cfg.torch_deterministic,
            before=before,
        )
        if cfg.compile not in ("auto", self.compile.mode):
            logger.warning("compile=%s has no full effect: %s", cfg.compile, self.compile)
        if self.compile.mode != "off":
            logger.info("torch.compile works in the first iterations, for a minute or more at the first start")
        if self.compile.mode in ("learner", "all"):
            self.algorithm.compile()
        if self.compile.mode == "all":
            self.env.compile()
        if self.compile.mode == "auto":
            self._trial = Trial(self._switch_compilation, cuda_seconds)

    def _switch_compilation(self, enabled: bool) -> None:
        if enabled:
            self._eager_graph = self.graphs.choice
        self.algorithm.compile(enabled)
        self.env.compile(enabled)
        self.graphs.restart(self._eager_graph)  # a capture that fails with compiled code needs not fail without

    # Logging

    @contextmanager
    def logging(self) -> Iterator[Logger]:
        """Opens the run folder and its logger; the block may `iterate`. At its end the environments are closed."""
        try:
            with RunDir.of(self.spec, self._digest, trains=not self.complete) as (run_dir, continues):
                self.run_dir = run_dir
                if not continues:  # a branch of another run is a run of its own
                    self.wandb_id = secrets.token_hex(4)
                log = Logger(
                    self.cfg,
                    run_dir,
                    wandb_id=self.wandb_id,
                    resumed_at=self.iteration if self.resumed else None,
                    best_return=self._best_evaluation if self.cfg.eval.interval else self.intervals.best_return,
                    metrics_csv=self._metrics_csv if continues else None,
                    config_dir=self.spec.config_dir,
                )
                with log, self.graphs.stream():
                    self.intervals.start()
                    log.start(banner(self, log.run_dir, continues=continues), self.spec.config)
                    if not self.complete:
                        self._note_metadata(log)
                    self._start_evaluations(log)
                    self._stop_signal.tell, self._show_progress = log.console.notice, log.console.progress
                    self._started_at = time.perf_counter()
                    self.timer.start()
                    yield log
        finally:
            self.close()

    def close(self) -> None:
        """Frees the simulator, and ends the process of evaluations."""
        self._close_evaluations()
        self.intervals.close()
        self.env.close()

    def _note_metadata(self, log: Logger) -> None:
        self._noted = self.graphs.choice, self.compile
        log.note(describe_run(self))

    @property
    def complete(self) -> bool:
        """All iterations are done."""
        return self.iteration >= self.cfg.max_iterations

    @property
    def elapsed_s(self) -> float:
        """Time of training, that of earlier starts of the run included [s]."""
        return self._elapsed_s + time.perf_counter() - self._started_at

    def _status(self, *, drain: bool = False) -> RunStatus:
        """How far the training is; ends a log interval where one is due, and checks the rows that have arrived.

        Args:
            drain: Wait for rows that are still on their way.

        Raises:
            TaskError: A number is not finite.
        """
        rows: list[LogRow] = []
        if drain:
            rows += self.intervals.drain()
        elif self.iteration % self.cfg.log.interval == 0 or self.iteration == self.cfg.max_iterations:
            overflow = self.env.overflow.sum().float().to(self.rl_device)
            rows += self.intervals.end(self.iteration, self.env_steps, self.elapsed_s, {"sim/overflow": overflow})
        diverged = None
        for row in rows:
            self._finite_check.check_row(row, self.iteration, self.algorithm)
            if row.numbers.get("sim/diverged") and not self._divergence_reported:
                self._divergence_reported = True
                diverged = self._first_diverged()
        intervals = self.intervals
        return RunStatus(
            self.iteration,
            tuple(rows),
            intervals.mean_return,
            intervals.best_return,
            self._stop_signal.number is not None,
            diverged,
        )

    def _record(self, log: Logger, *, drain: bool = False) -> RunStatus:
        """Publishes the rows that have arrived.

        Args:
            log: Where.
            drain: Wait for rows that are still on their way.

        Raises:
            TaskError: A number is not finite, or nothing can be learned any more.
        """
        status = self._status(drain=drain)
        log.record(status)
        for row in status.rows:
            self._finite_check.check_samples(row, self.cfg.num_envs, log.replay(DIVERGED))
            if not self._finite_check.learns(row):
                self._put_learner_back(log, row)
        return status

    def _put_learner_back(self, log: Logger, row: LogRow) -> None:
        """The learner is as in the last checkpoint, for once; the envs and the count of iterations go on.

        Weights are as they were, for what is not finite is skipped. Statistics of normalisers may be beyond repair.
        """
        last = log.last_checkpoint
        if self._put_back or last is None or self.complete:
            replay = log.dump(SKIPPED, self.state_dict())
            raise self._finite_check.no_gradient(row, self.algorithm, replay)
        self._put_back = True
        state = checkpoint.load(last)
        self.algorithm.policy.load_state_dict(state["policy"])
        self.algorithm.load_state_dict(state["algorithm"])
        self.algorithm.begin_episodes()
        log.console.warn(
            f"no gradient was finite any more in iteration {row.iterations[-1]}: the learner is put back to"
            f" iteration {state['iteration']}. If this happens again, the run ends"
        )

    def _first_diverged(self) -> dict[str, Any] | None:
        """From where the first env diverged, to be replayed."""
        first = self.env.first_diverged()
        if first is None:
            return None
        about = {"task": self.task_name, "config": self.spec.config, "sim": self.choice.name}
        return {**about, "iteration": self.iteration, **first}

    def save(self, log: Logger, *, final: bool = False) -> None:
        """Writes a checkpoint.

        First writes the pending rows, because a resumed run does not produce them again.

        Args:
            log: Where.
            final: The training ends here. Else the state of a learner that has stopped learning is not saved: the
                last checkpoint is what it can be put back to.
        """
        status = self._record(log, drain=True)
        if not (final or self._finite_check.learning):
            return
        self._finite_check.check_policy(self.algorithm.policy.state_dict(), self.iteration)
        log.save(status, self.state_dict())

    def _finish(self, log: Logger, *, left: bool) -> Row:
        status = self._record(log, drain=True)
        if not left and not log.is_saved(status):  # a signal after the last look, or a disk that is full
            self.save(log, final=True)
        return log.finish(status, left=left)

    # State

    def state_dict(self) -> dict[str, Any]:
        """Everything that the rest of the run depends on."""
        return {
            "task": self.task_name,
            "config": self.spec.config,
            "overrides": self.spec.overrides,
            "obs_sizes": dict(self.env.obs_sizes),
            "num_actions": self.env.num_actions,
            "sim": self.choice.name,
            "compile": self.compile.mode if self.compile.measured else "auto",
            "seed": self.seed,
            "iteration": self.iteration,
            "env_steps": self.env_steps,
            "elapsed_s": self.elapsed_s,
            "best_return": self.intervals.best_return,
            "wandb_id": self.wandb_id,
            "policy": self.algorithm.policy.state_dict(),
            "algorithm": self.algorithm.state_dict(),
            "env": self.env.state_dict(),
            "torch_rng": torch.get_rng_state(),
            "metrics": self.metrics.state_dict(),
        }

    def _load(self, state: dict[str, Any]) -> None:
        for key, now in (("obs_sizes", dict(self.env.obs_sizes)), ("num_actions", self.env.num_actions)):
            if state[key] != now:
                raise ValueError(f"{key} saved {state[key]}, now {now}")
        self.algorithm.policy.load_state_dict(state["policy"])
        self.iteration, self.env_steps = int(state["iteration"]), int(state["env_steps"])
        if self.cfg.test:
            self._copy_obs(self.env.begin_from(state["env"]))
            return
        self.algorithm.load_state_dict(state["algorithm"])
        torch.set_rng_state(state["torch_rng"].cpu())
        self.intervals.resume(self.iteration, self.env_steps, state["best_return"])
        self._elapsed_s, self.wandb_id = float(state["elapsed_s"]), state["wandb_id"]
        self._metrics_csv, self._best_evaluation = state.get("metrics_csv"), state.get("best_evaluation")
        if state["sim"] != self.choice.name or not self.env.resumable:  # new episodes begin
            self._copy_obs(self.env.begin_from(state["env"]))
            self.algorithm.begin_episodes()
        else:
            self._copy_obs(self.env.load_state_dict(state["env"]))
            self.metrics.load_state_dict(state["metrics"])
