"""A run: everything is built once, then `train()` reads like the algorithm."""

from __future__ import annotations

import dataclasses
import math
import os
import secrets
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from gpusim_rl.config import RunConfig
from gpusim_rl.env import Step, Task, VecEnv
from gpusim_rl.errors import ConfigError, TaskError
from gpusim_rl.hardware import available_cpus, tune_malloc
from gpusim_rl.learn.networks import ActorCritic, Hidden, Sample
from gpusim_rl.learn.ppo import PPO, choose_precision
from gpusim_rl.learn.rollout import Rollout
from gpusim_rl.paths import find_checkpoint
from gpusim_rl.run import checkpoint
from gpusim_rl.run.cuda_graph import Graphs, choose_graph
from gpusim_rl.run.logger import Logger, report
from gpusim_rl.run.memory_estimate import check_learner_memory, check_memory
from gpusim_rl.run.metrics import Metrics, Row
from gpusim_rl.run.profile import profiling
from gpusim_rl.run.run_dir import RunDir, chosen_task
from gpusim_rl.run.timing import PhaseTimer
from gpusim_rl.run.writers import require_tensorboard
from gpusim_rl.sim import Scene, SimChoice, choose_sim, make_sim
from gpusim_rl.sim.registry import SIMULATORS
from gpusim_rl.torch_threads import limit_torch_threads

# What a checkpoint's tensors depend on: it cannot be continued with other values.
ROWS_PER_THREAD = 1024
STRUCTURE = ("num_envs", "ppo.horizon", "ppo.network", "ppo.normalize_obs", "ppo.normalize_value")
POLICY_STRUCTURE = ("ppo.network", "ppo.normalize_obs", "ppo.normalize_value")


class Trainer:
    """Trains or evaluates one task.

    Building it checks the configuration, the checkpoint and the task, and leaves nothing on disk; `train()` makes the
    run folder.

    Args:
        cfg: The run.
        task_class: The task; `cfg.task` is its configuration.
        config: The composed configuration as plain values, for the run folder and the checkpoints.
        overrides: The command line.

    Raises:
        ConfigError: Something in the configuration or the checkpoint does not fit.
        TaskError: A hook of the task is wrong.

    Attributes:
        iteration: Iterations done.
        env_steps: Control steps done, summed over envs.
    """

    def __init__(
        self, cfg: RunConfig, task_class: type[Task], *, config: Mapping[str, Any], overrides: list[str]
    ) -> None:
        self.cfg = cfg
        self.task_name = task_class.__name__
        self.config = dict(config)
        self.overrides = list(overrides)
        if cfg.log.tensorboard:
            require_tensorboard()
        self.resumed = self._read_checkpoint()
        self.seed = self._choose_seed()
        self.rl_device, self.choice = choose_devices(cfg)
        torch.manual_seed(self.seed)
        if cfg.torch_deterministic:  # without it cuBLAS refuses; read when CUDA starts
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(cfg.torch_deterministic)
        use_available_cpus(cfg)
        tune_malloc()

        bf16, self.precision_reason = choose_precision(cfg.ppo.precision, self.rl_device)
        self.env = self._make_env(task_class, bf16)
        # What one iteration hands to the next stays at its place: a graph reads and writes it there.
        self.obs = {group: value.clone() for group, value in self._to_learner(self.env.reset()).items()}
        obs_size = sum(self.env.obs_sizes.values())
        check_learner_memory(cfg, obs_size, self.env.num_actions, self.rl_device, bf16=bf16)
        self.policy = ActorCritic(self.env.obs_sizes, self.env.num_actions, cfg.ppo, bf16=bf16).to(self.rl_device)
        self.sampling = torch.Generator(self.rl_device).manual_seed(self.seed + 1)
        shuffling = torch.Generator(self.rl_device).manual_seed(self.seed + 2)
        self.ppo = PPO(
            self.policy,
            cfg.ppo,
            horizon=cfg.ppo.horizon,
            num_envs=cfg.num_envs,
            max_iterations=cfg.max_iterations,
            generator=shuffling,
        )
        self.hidden: Hidden = self.policy.initial_state(cfg.num_envs)
        self.is_first = torch.ones(cfg.num_envs, dtype=torch.bool, device=self.rl_device)
        self.noise = torch.zeros(cfg.num_envs, self.env.num_actions, device=self.rl_device)
        self.rollout = Rollout(
            cfg.ppo.horizon,
            cfg.num_envs,
            self.env.obs_sizes,
            self.env.num_actions,
            initial_hidden=self.hidden,
            sequence_length=self.ppo.sequence_length,
            max_truncations=1 + (cfg.ppo.horizon - 1) // self.env.max_episode_length,
            device=self.rl_device,
        )
        self.metrics = Metrics(cfg.num_envs, self.rl_device)
        self.timer = PhaseTimer(self.rl_device)
        choice = choose_graph(
            cfg.graph,
            self.rl_device,
            self.env.device,
            horizon=cfg.ppo.horizon,
            check_task=cfg.debug.check_task,
        )
        self.graphs = Graphs(choice, self.rl_device, generators=[self.sampling, shuffling], owners=[self.env.task])
        self.iteration = 0
        self.env_steps = 0
        self.elapsed_s = 0.0
        self.best_return: float | None = None
        self.wandb_id = secrets.token_hex(4)
        self._stop_signal: int | None = None
        if self.resumed is not None:
            try:
                self._load(self.resumed)
            except (KeyError, ValueError, RuntimeError) as error:  # a missing part, or a tensor of another shape
                reason = f"no {error}" if isinstance(error, KeyError) else str(error).partition("\n")[0]
                raise ConfigError(f"checkpoint {cfg.checkpoint} does not fit task {self.task_name}: {reason}") from None

    # The algorithm

    def train(self) -> Row:
        """Trains until `max_iterations`; returns the last row of metrics.

        Ctrl-C and SIGTERM end the training after the iteration under way, with a checkpoint, and exit with the
        shell's code for the signal; a second one ends it at once.
        """
        run_dir = self.run_dir()
        with Logger(self, run_dir) as log, self._signals(), self.graphs.stream(), profiling(self, log):
            self.timer.start()
            while self.iteration < self.cfg.max_iterations and self._stop_signal is None:
                self.iterate(log)
            row = log.finish()
        if self._stop_signal is not None:
            raise SystemExit(128 + self._stop_signal)
        return row

    def iterate(self, log: Logger) -> None:
        """One iteration: act, learn, write down."""
        self.collect()
        with self.timer("update"):
            self.metrics.record_update(self.graphs.run("update", self._update))
        self.iteration += 1
        self.env_steps += self.cfg.num_envs * self.cfg.ppo.horizon
        with self.timer("log"):
            log.record()

    def collect(self) -> None:
        """Acts for `horizon` control steps in all envs and fills the rollout."""
        timed = self.timer("rollout") if self.graphs.whole_rollout else nullcontext()
        with timed, limit_torch_threads(self.cfg.num_envs, self.rl_device, ROWS_PER_THREAD):
            self.graphs.run("rollout", self._collect)

    @torch.no_grad()
    def _collect(self) -> None:
        self.rollout.begin()
        for t in range(self.cfg.ppo.horizon):
            sample, step = self.graphs.run("step", self._act_and_step)
            with self.timer("policy"):
                self.rollout.write_policy(t, self.obs, self.hidden, self.is_first, sample)
                self.rollout.write_outcome(
                    t, step.reward, step.terminated, step.truncated, step.diverged, step.final_obs, sample.hidden
                )
                self.metrics.record_step(step)
                self._carry(sample.hidden, step)

    def _act_and_step(self) -> tuple[Sample, Step]:
        with self.timer("policy"):
            self.noise.normal_(generator=self.sampling)
            sample = self.policy.act(self.obs, self.hidden, self.noise)
        with self.timer("simulate"):
            return sample, self._step(sample.action)

    def _carry(self, hidden: Hidden, step: Step) -> None:
        self._take(step.obs)
        for state, new in zip(self.hidden, hidden, strict=True):
            state.copy_(new.masked_fill(step.done[None, :, None], 0.0))
        self.is_first.copy_(step.done)

    def _update(self) -> dict[str, Tensor]:
        return self.ppo.update(self.rollout, self.obs, self.hidden)

    def _step(self, action: Tensor) -> Step:
        step = self.env.step(action.to(self.env.device))
        if self.env.device == self.rl_device:
            return step
        # Physics on the CPU under a policy on the GPU: the one configuration that copies, as its user asked.
        moved = {name: _move(getattr(step, name), self.rl_device) for name in Step.__slots__}
        return Step(**moved)

    def _to_learner(self, obs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {group: value.to(self.rl_device) for group, value in obs.items()}

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Runs one whole episode in every env with the mean action; prints and returns what came of it."""
        returns = torch.zeros(self.cfg.num_envs, device=self.rl_device)
        lengths = torch.zeros_like(returns)
        running = torch.ones(self.cfg.num_envs, dtype=torch.bool, device=self.rl_device)
        diverged = torch.zeros((), device=self.rl_device)
        self.noise.zero_()
        for _ in range(self.env.max_episode_length):
            sample = self.policy.act(self.obs, self.hidden, self.noise)
            step = self._step(sample.action)
            returns += torch.where(running, step.reward, 0.0)
            lengths += running.float()
            diverged += (step.diverged & running).sum()
            running &= ~step.done
            self._carry(sample.hidden, step)
        result = {
            "episodes": float(self.cfg.num_envs),
            "return_mean": float(returns.mean()),
            "return_std": float(returns.std(correction=0)),
            "return_min": float(returns.min()),
            "return_max": float(returns.max()),
            "length_mean": float(lengths.mean()),
            "diverged": float(diverged),
        }
        report(self, result)
        self.env.close()
        return result

    @property
    def stopping(self) -> bool:
        """A signal asked for the end."""
        return self._stop_signal is not None

    # Building

    def _choose_seed(self) -> int:
        if self.resumed is not None and not self.cfg.test:
            return int(self.resumed["seed"])
        return secrets.randbelow(2**31) if self.cfg.seed == -1 else self.cfg.seed

    def _make_env(self, task_class: type[Task], bf16: bool) -> VecEnv:
        task_cfg = self.cfg.task
        if self.cfg.test:  # whole episodes only
            task_cfg = dataclasses.replace(task_cfg, randomize_episode_start=False)
        scene: Scene = task_class.scene(task_cfg)
        check_memory(scene.model, self.cfg, self.choice, self.rl_device, bf16=bf16)
        sim = make_sim(scene, self.choice, self.cfg.num_envs, self.cfg.sim)
        return VecEnv(task_class, task_cfg, sim, self.seed, check=self.cfg.debug.check_task)

    def _read_checkpoint(self) -> dict[str, Any] | None:
        if self.cfg.checkpoint is None:
            if self.cfg.test:
                raise ConfigError("test=true needs checkpoint=<run folder or .pt file>")
            return None
        found = find_checkpoint(self.cfg.checkpoint, self.cfg.log.dir)
        payload = checkpoint.load(found.file)
        missing = {"task", "config", "seed", "policy"} - payload.keys()
        if missing:
            raise ConfigError(f"{found.file} is not a checkpoint of a training: it has no {', '.join(sorted(missing))}")
        if payload["task"] != self.task_name:
            raise ConfigError(
                f"checkpoint {found.file} is of task {payload['task']}, not {self.task_name};"
                f" try task={payload['task']}"
            )
        keys = POLICY_STRUCTURE if self.cfg.test else STRUCTURE
        different = checkpoint.structural_difference(payload["config"], self.config, keys)
        if different:
            raise ConfigError(f"checkpoint {found.file} does not fit this configuration: {'; '.join(different)}")
        return payload

    def run_dir(self) -> RunDir:
        """Continues in the run's own folder from its last checkpoint, else makes a new one."""
        if self.cfg.checkpoint is not None:
            found = find_checkpoint(self.cfg.checkpoint, self.cfg.log.dir)
            if found.run_dir is not None and found.file.name == "last.pt":
                run_dir = RunDir.open(found.run_dir)
                run_dir.go_on(config=self.config, overrides=self.overrides)
                return run_dir
            self.wandb_id = secrets.token_hex(4)  # a branch of the run is a run of its own
        name = chosen_task(self.overrides) or self.task_name
        return RunDir.create(
            Path(self.cfg.log.dir),
            self.cfg.experiment or name,
            name,
            config=self.config,
            overrides=self.overrides,
        )

    @contextmanager
    def _signals(self) -> Iterator[None]:
        def stop(number: int, frame: FrameType | None) -> None:
            if self._stop_signal is not None:
                raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
            self._stop_signal = number
            with suppress(OSError):  # not print: the signal may have come in the middle of one
                os.write(2, b"\nstopping after this iteration, with a checkpoint; once more stops at once\n")

        if threading.current_thread() is not threading.main_thread():
            yield  # Python hands signals to the main thread, which is not ours to direct
            return
        previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    # State

    def state_dict(self) -> dict[str, Any]:
        """Everything that the rest of the run depends on."""
        return {
            "task": self.task_name,
            "config": self.config,
            "overrides": self.overrides,
            "obs_sizes": dict(self.env.obs_sizes),
            "num_actions": self.env.num_actions,
            "sim": self.choice.name,
            "seed": self.seed,
            "iteration": self.iteration,
            "env_steps": self.env_steps,
            "elapsed_s": self.elapsed_s,
            "best_return": self.best_return,
            "wandb_id": self.wandb_id,
            "policy": self.policy.state_dict(),
            "ppo": self.ppo.state_dict(),
            "env": self.env.state_dict(),
            "hidden": [state.clone() for state in self.hidden],
            "is_first": self.is_first.clone(),
            "sampling": self.sampling.get_state(),
            "shuffling": self.ppo.generator.get_state(),
            "torch_rng": torch.get_rng_state(),
            "metrics": self.metrics.state_dict(),
        }

    def _load(self, state: dict[str, Any]) -> None:
        for key in ("obs_sizes", "num_actions"):
            now = dict(self.env.obs_sizes) if key == "obs_sizes" else self.env.num_actions
            if state[key] != now:
                raise ValueError(f"{key} saved {state[key]}, now {now}")
        self.policy.load_state_dict(state["policy"])
        if self.cfg.test:
            self._take(self.env.begin_from(state["env"]))
            return
        self.ppo.load_state_dict(state["ppo"])
        if state["config"]["ppo"]["learning_rate"] != self.cfg.ppo.learning_rate:
            self.ppo.learning_rate.fill_(self.cfg.ppo.learning_rate)  # a new value is a new start of the schedule
        for generator, saved in ((self.sampling, state["sampling"]), (self.ppo.generator, state["shuffling"])):
            if saved.shape == generator.get_state().shape:  # CPU and CUDA have different generators
                generator.set_state(saved.cpu())
        torch.set_rng_state(state["torch_rng"].cpu())
        self.iteration, self.env_steps = int(state["iteration"]), int(state["env_steps"])
        self.elapsed_s, self.best_return = float(state["elapsed_s"]), state["best_return"]
        self.wandb_id = state["wandb_id"]
        if state["sim"] != self.choice.name:  # another simulator begins new episodes
            self._take(self.env.begin_from(state["env"]))
        else:
            self._take(self.env.load_state_dict(state["env"]))
            for mine, saved in zip(self.hidden, state["hidden"], strict=True):
                mine.copy_(saved)
            self.is_first.copy_(state["is_first"])
            self.metrics.load_state_dict(state["metrics"])

    def _take(self, obs: dict[str, Tensor]) -> None:
        for group, value in obs.items():
            self.obs[group].copy_(value)

    def check_finite(self, row: Row, iterations: range) -> None:
        """Stops the run if a row says that something was not finite.

        Args:
            row: Numbers of a log interval.
            iterations: The iterations of that interval.

        Raises:
            TaskError: With what it was, where (if this is still known) and when.
        """
        flags = {"check/obs": "an observation", "check/reward": "a reward", "loss/value": "the loss"}
        bad = [what for key, what in flags.items() if not _is_finite(row.get(key))]
        if not bad:
            return
        exact = len(iterations) == 1 and iterations[-1] == self.iteration  # else the tensors are of a later iteration
        raise self._not_finite((self._first_bad() if exact else None) or bad[0], iterations)

    def check_policy(self) -> None:
        """Stops the run before a checkpoint of a policy that is not finite: rows may be late or rare.

        Raises:
            TaskError: With the first bad tensor.
        """
        for name, value in self.policy.state_dict().items():
            if not torch.isfinite(value).all():
                raise self._not_finite(f"the policy ({name})", range(self.iteration, self.iteration + 1))

    def _not_finite(self, what: str, iterations: range) -> TaskError:
        first, last = iterations[0], iterations[-1]
        when = f"iteration {last}" if first == last else f"iterations {first} to {last}"
        return TaskError(
            f"{self.task_name}: {what} is not finite in {when}; all checkpoints are from before it."
            " Try debug.check_task=true to name the hook and the step"
        )

    def _first_bad(self) -> str | None:
        """The first thing from the task that is not finite in this iteration, and where."""
        rollout, last = self.rollout, {group: value[None] for group, value in self.obs.items()}
        suspects = [
            ("an observation", rollout.obs, ("step", "env", "column")),
            ("the last observation of an episode", rollout.final_obs, ("", "env", "column")),
            ("an observation after the last step", last, ("", "env", "column")),
            ("a reward", {"": rollout.reward}, ("step", "env")),
        ]
        for what, tensors, axes in suspects:
            for group, value in tensors.items():
                bad = ~torch.isfinite(value)
                if bad.any():
                    index = bad.nonzero()[0].tolist()
                    place = [f"{axis} {number}" for axis, number in zip(axes, index, strict=True) if axis]
                    return f"{what} ({', '.join([f'group {group!r}'] * bool(group) + place)})"
        return None


def _is_finite(value: float | None) -> bool:
    return value is None or math.isfinite(value)


def choose_devices(cfg: RunConfig) -> tuple[torch.device, SimChoice]:
    """Where the learner lives, and the simulator with its device.

    Raises:
        ConfigError: There is no such device, or the simulator cannot run on it.
    """
    rl_device = _device(cfg.rl_device or cfg.device, "rl_device" if cfg.rl_device else "device")
    sim_device = _device(cfg.sim_device or cfg.device, "sim_device" if cfg.sim_device else "device")
    if cfg.sim_device is None and cfg.sim.name != "auto" and SIMULATORS[cfg.sim.name].devices == ("cpu",):
        sim_device = torch.device("cpu")  # the only place where it runs; a policy on the GPU can still use it
    return rl_device, choose_sim(cfg.sim.name, sim_device)


def use_available_cpus(training: RunConfig | None = None) -> None:
    """Gives torch a thread for each CPU of this process, unless the user chose a number, which torch has followed.

    Args:
        training: What it is for, if not for an environment alone. Threads that share few rows of a matrix wait for each
            other longer than they work (benchmarks/few_rows.json), so there is one for every ROWS_PER_THREAD at most.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return
    threads = available_cpus()
    if training is not None:
        samples = training.num_envs * training.ppo.horizon
        rows = max(training.num_envs, min(training.ppo.minibatch_size, samples))
        threads = min(threads, max(1, rows // ROWS_PER_THREAD))
    torch.set_num_threads(threads)


def _device(text: str, key: str) -> torch.device:
    """The device that a user means.

    Raises:
        ConfigError: There is no such device.
    """
    if text == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    device = torch.device(text)
    if device.type == "cuda":
        count = torch.cuda.device_count()
        index = device.index or 0
        if index >= count:
            has = f"{count} CUDA device{'s' if count != 1 else ''}" if count else "no CUDA device"
            raise ConfigError(f"{key}={text}: this machine has {has}; try {key}={'cuda:0' if count else 'cpu'}")
        device = torch.device("cuda", index)
    return device


def _move(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    return {name: item.to(device) for name, item in value.items()}
