"""A training run. Builds everything once; `train()` is the loop."""

from __future__ import annotations

import dataclasses
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_map_only

from gpusim_rl.env import Environment, Step, VecEnv
from gpusim_rl.env.device_env import moved
from gpusim_rl.env.half_batches import HalfBatches
from gpusim_rl.errors import ConfigError, one_line_if_out_of_memory, warn
from gpusim_rl.files.checkpoint_file import check_is_data, digest_of
from gpusim_rl.learn.algorithm import Algorithm, EnvSpec
from gpusim_rl.learn.collective import ALONE, Collective
from gpusim_rl.machine.hardware import tune_malloc
from gpusim_rl.machine.torch_threads import ROWS_PER_THREAD, limit_torch_threads, use_available_cpus
from gpusim_rl.run import checkpoint
from gpusim_rl.run.banner import banner
from gpusim_rl.run.compilation import compile_training
from gpusim_rl.run.cuda_graph import Graphs, choose_graph
from gpusim_rl.run.device_check import check_devices, devices_checked
from gpusim_rl.run.devices import choose_devices, choose_eval_devices
from gpusim_rl.run.eval_schedule import EvalSchedule
from gpusim_rl.run.evaluation import evaluate, report
from gpusim_rl.run.log_interval import LogIntervals
from gpusim_rl.run.logger import Logger, SilentLogger
from gpusim_rl.run.metadata import describe_run
from gpusim_rl.run.metrics import Metrics, Row
from gpusim_rl.run.overlap import overlapped_steps
from gpusim_rl.run.profiler import profiling
from gpusim_rl.run.reporter import Reporter
from gpusim_rl.run.run_dir import RunDir
from gpusim_rl.run.stop_signal import IterationLeftError, StopSignal
from gpusim_rl.run.timing import PhaseTimer
from gpusim_rl.run.writers import require_tensorboard
from gpusim_rl.settings.schema import RunSpec, declarations
from gpusim_rl.sim import make_sim

SEEDS_APART = 1_000_003
"""Between the seeds of two processes that learn together: their envs and their noise differ."""
OWN = ("algorithm", "env", "torch_rng", "metrics")
"""What of the state each of several processes has for itself."""
ANEW = ("replay", "priorities")
"""What of an algorithm's state belongs to the envs that it was recorded in."""


class Trainer:
    """Trains or evaluates one task with one algorithm.

    Building it checks the configuration, the checkpoint and the task, and leaves nothing on disk; `train()` makes the
    run folder.

    Args:
        spec: The run.
        collective: The processes that learn together; `num_envs` is of each.

    Raises:
        ConfigError: Something in the configuration or the checkpoint does not fit.
        TaskError: A hook of the task is wrong.

    Attributes:
        iteration: Iterations done.
        env_steps: Control steps done, summed over envs and processes.
        run_dir: Folder of the run; None before `logging` opens it.
        stop_signal: Ends the training early.
        obs: Observations to act on next. The tensors are never replaced, because a CUDA graph uses their addresses.
        num_actors: Processes that step envs for this learner; 0 where it steps its own.
    """

    num_actors = 0

    def __init__(self, spec: RunSpec, collective: Collective = ALONE) -> None:
        cfg = spec.cfg
        self.spec, self.cfg, self.collective = spec, cfg, collective
        self.task_name = spec.task_class.__name__
        if cfg.log.tensorboard:
            require_tensorboard()
        self._digest = digest_of(spec.checkpoint.file) if spec.checkpoint is not None else None
        state = checkpoint.load_for(spec)
        self.resumed = state is not None
        self.seed = collective.share(self._choose_seed(state))
        self._own_seed = self.seed + SEEDS_APART * collective.rank
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

        with one_line_if_out_of_memory(cfg.num_envs):
            self.env = self._make_env()
            with devices_checked(("the environment", self.env, self.env.device), enabled=cfg.debug.check_device):
                self.obs = {group: value.to(self.rl_device, copy=True) for group, value in self.env.reset().items()}
            self.algorithm = self._make_algorithm()
            self.algorithm.collective = collective
            self._parts = self._make_parts()
        settings = cfg.algorithm
        use_available_cpus(declarations(type(settings)).batch_rows(settings, self.env.num_envs))
        self.metrics = Metrics(cfg.num_envs, self.rl_device, collective=collective)
        self.timer = PhaseTimer(self.rl_device)
        steps = self.algorithm.horizon * self.env.physics_evaluations
        choice = choose_graph(
            cfg.graph,
            self.rl_device,
            self.env.device,
            physics_steps=steps,
            check_task=cfg.debug.check_task,
        )
        self.graphs = Graphs(
            choice,
            self.rl_device,
            generators=self.algorithm.generators,
            stateful=[*self.env.stateful, self.algorithm],
            collective=collective,
        )
        self.iteration = 0
        self.env_steps = 0
        self.wandb_id = ""
        self._metrics_csv: dict[str, Any] | None = None  # what the checkpoint tells of the file
        self._best_evaluation: float | None = None  # so far, in earlier starts of the run
        self._evaluations: EvalSchedule | None = None
        self.run_dir: RunDir | None = None
        self._elapsed_s, self._started_at = 0.0, time.perf_counter()
        self.intervals = LogIntervals(self.metrics, self.timer, self.rl_device, collective)
        self.stop_signal = StopSignal()
        self._others_stop = False  # another process has got a signal
        self._show_progress: Callable[[str], None] = lambda text: None
        self._reporter = Reporter(self)
        if state is not None:
            assert spec.checkpoint is not None
            with checkpoint.must_fit(spec.checkpoint.file, f"task {self.task_name} with algo={cfg.algo}"):
                self._load(state)
        elif collective.size > 1:
            weights = self.algorithm.policy.state_dict()
            self.algorithm.policy.load_state_dict(collective.share({name: x.cpu() for name, x in weights.items()}))
        self.compile = compile_training(cfg, self.rl_device, self.env, self.algorithm)

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
        self._collect_and_update()
        self.iteration += 1
        self.env_steps += self.collective.size * self.env.num_envs * self.algorithm.horizon
        with self.timer("log"):
            if self._noted != self.graphs.choice:  # a capture failed
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

    def _collect_and_update(self) -> None:
        env, algorithm = self.env, self.algorithm
        parts = [("the environment", env, env.device), ("the policy", algorithm.policy, self.rl_device)]
        parts.append(("the algorithm", algorithm, self.rl_device))
        with devices_checked(*parts, enabled=self.cfg.debug.check_device):
            self.collect()
            with self.timer("update"):
                algorithm.before_update()
                stats = self.graphs.run("update", algorithm.update)
                self.metrics.record_update(stats, type(algorithm).__name__)

    def collect(self) -> None:
        """Acts for `horizon` control steps in all envs; the algorithm records them."""
        timed = self.timer("rollout") if self.graphs.whole_rollout else nullcontext()
        with timed, limit_torch_threads(self.cfg.num_envs, self.rl_device, ROWS_PER_THREAD):
            self.graphs.run("rollout", self._collect)

    @torch.no_grad()
    def _collect(self) -> None:
        with self.timer("policy"):
            self.algorithm.begin_rollout()
            self.metrics.begin_rollout()
        for number, step in enumerate(self._control_steps(), start=1):
            with self.timer("policy"):
                self.metrics.record_step(step)
            self._pause(f"control step {number}/{self.algorithm.horizon}")
        with self.timer("policy"):
            self.metrics.end_rollout()

    def _control_steps(self) -> Iterator[Step]:
        """Those of a rollout; the algorithm has recorded each, and `obs` is what it acts on next."""
        if isinstance(self.env, HalfBatches):
            yield from overlapped_steps(self.env, self._parts, self.obs, self.rl_device, self.timer)
            return

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

        for _ in range(self.algorithm.horizon):
            action, step = self.graphs.run("step", control_step)
            with self.timer("policy"):
                self.algorithm.record(action, step)
                self._copy_obs(step.obs)
            yield step

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

    def _copy_obs(self, obs: dict[str, Tensor]) -> None:
        for group, value in obs.items():
            self.obs[group].copy_(value)

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
            env_cfg = dataclasses.replace(cfg.env, overlap=False) if cfg.test else cfg.env
            return task_class.from_settings(env_cfg, num_envs=cfg.num_envs, seed=self._own_seed)
        if cfg.test:  # whole episodes only
            task_cfg = task_cfg.whole_episodes()
        sim = make_sim(task_class.scene(task_cfg), self.choice, cfg.num_envs, cfg.sim)
        return VecEnv(task_class, task_cfg, sim, self._own_seed, check=cfg.debug.check_task)

    def _make_parts(self) -> list[Algorithm]:
        """The algorithm for each half of the envs, if they step in turn."""
        halves = self.env.rows if isinstance(self.env, HalfBatches) else ()
        parts = [part for rows in halves if (part := self.algorithm.part(rows)) is not None]
        if len(parts) < len(halves):
            raise ConfigError(
                f"env.overlap=true: algo={self.cfg.algo} cannot act for half of the envs. Try env.overlap=false"
            )
        return parts

    def _env_spec(self) -> EnvSpec:
        env = self.env
        return EnvSpec(
            env.num_envs,
            dict(env.obs_sizes),
            env.action_space,
            env.steps_between_truncations,
            role="acts" if self.cfg.test else "both",
            section=self.cfg.algo,
        )

    def _make_algorithm(self) -> Algorithm:
        spec = self._env_spec()
        settings, iterations = self.cfg.algorithm, self.cfg.max_iterations
        return self.spec.algorithm_class(
            settings, spec, device=self.rl_device, seed=self._own_seed, max_iterations=iterations
        )

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
            with RunDir.of(self.spec, self._digest, trains=not self.complete) as (run_dir, continues):
                self.run_dir = run_dir
                self.collective.run_dir(str(run_dir.path.absolute()))
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
                    if self.cfg.eval.interval and not self.complete:
                        beside = self.intervals, self.timer, self.stop_signal
                        self._evaluations = EvalSchedule(self.spec, log, self.iteration, *beside)
                    self.stop_signal.tell, self._show_progress = log.console.notice, log.console.progress
                    self._started_at = time.perf_counter()
                    self.timer.start()
                    yield log
        finally:
            self.close()

    @contextmanager
    def _logging_of_others(self) -> Iterator[Logger]:
        try:
            self.run_dir = RunDir(Path(self.collective.run_dir(None)))
            log = SilentLogger(self.cfg, self.run_dir, resumed_at=self.iteration if self.resumed else None)
            with log, self.graphs.stream():
                self.intervals.start()
                self._note_metadata(log)
                self._started_at = time.perf_counter()
                self.timer.start()
                yield log
        finally:
            self.close()

    def close(self) -> None:
        """Frees the simulator, and ends the process of evaluations."""
        if self._evaluations is not None:
            self._evaluations.close()
        self.intervals.close()
        self.env.close()

    def _note_metadata(self, log: Logger) -> None:
        self._noted = self.graphs.choice
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
            "sim": self.choice.name,
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

    def state_of_all(self) -> dict[str, Any]:
        """`state_dict`, with what the other processes have for themselves. All of them must call it at once."""
        state = self.state_dict()
        if self.collective.size == 1:
            return state
        own = tree_map_only(Tensor, Tensor.cpu, {name: state[name] for name in OWN})
        return state | {"processes": dict(enumerate(self.collective.gather(own)))}

    def _state_of_rank(self, state: dict[str, Any]) -> dict[str, Any]:
        """What of a checkpoint this process continues from.

        With as many processes as before it continues as it was. Else learning continues, and episodes begin anew.
        """
        rank, size, processes = self.collective.rank, self.collective.size, state.get("processes", {})
        before = max(1, len(processes))
        if size == before or self.cfg.test:
            return state | processes.get(rank, {})
        if rank == 0:
            warn(
                f"the run had {before} process{'es' if before > 1 else ''} before, and has {size} now: new episodes"
                " begin, and a replay memory is filled again"
            )
        algorithm = {name: None if name in ANEW else value for name, value in state["algorithm"].items()}
        return state | {"sim": "", "algorithm": algorithm}

    @property
    def actor_columns(self) -> int | None:
        """Envs that send their rollouts to this learner together; None where it steps its own."""
        return None

    @property
    def several(self) -> str:
        """What has `num_envs` each, for the banner; empty where this process has all envs."""
        if self.num_actors:
            return f"{self.num_actors} actor{'s' * (self.num_actors > 1)} ({self.cfg.actors.engine}) x "
        return f"{self.collective.size} processes x " if self.collective.size > 1 else ""

    def _load(self, state: dict[str, Any]) -> None:
        state = self._state_of_rank(state)
        if state.get("actor_columns") != self.actor_columns and not self.cfg.test:
            if state["algorithm"].get("replay") is not None:
                warn("transitions come from other envs now: the replay memory is filled again")
            algorithm = {name: None if name in ANEW else value for name, value in state["algorithm"].items()}
            state = state | {"algorithm": algorithm}
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
            if not state["sim"]:  # another number of processes: their noise must differ
                for number, generator in enumerate(self.algorithm.generators):
                    generator.manual_seed(self._own_seed + self.iteration + number)
        else:
            self._copy_obs(self.env.load_state_dict(state["env"]))
            self.metrics.load_state_dict(state["metrics"])
