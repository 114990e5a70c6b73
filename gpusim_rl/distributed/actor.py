"""Actor, which steps envs on a CPU for a learner in another process."""

from __future__ import annotations

import dataclasses
import logging
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from gpusim_rl.env.task import load_task_or_environment
from gpusim_rl.errors import ConfigError, TaskError, first_line
from gpusim_rl.learn.algorithm import ActorPlace, load_algorithm_class
from gpusim_rl.learn.collective import Collective
from gpusim_rl.learn.remote import remote_of
from gpusim_rl.run.make_learner import make_collector
from gpusim_rl.run.metrics import RolloutSums
from gpusim_rl.run.run_spec import RunSpec
from gpusim_rl.run.start import begin
from gpusim_rl.settings.checks import build_run
from gpusim_rl.settings.trust import refuse_classes_of_script
from gpusim_rl.spaces import ActionSpace, ImageShape

PROGRESS_S = 10.0  # interval at which the first actor sends its env state (such as curriculum levels) [s]
Warned = tuple[str, str]  # template and text of a warning


@dataclass(frozen=True, slots=True)
class ActorJob:
    """Picklable arguments of an actor process."""

    config: dict[str, Any]  # composed settings of the run
    number: int  # index of the actor, from 0
    num_actors: int
    seed: int  # the run's seed
    attempt: int = 0  # number of earlier starts


@dataclass(frozen=True, slots=True)
class EnvDescription:
    """Description of a ready actor's envs, sent after every (re)start."""

    actor: int
    obs_sizes: dict[str, int]
    images: dict[str, ImageShape]
    action_space: ActionSpace
    max_episode_length: int
    steps_between_truncations: int
    summary: str
    recording: list[tuple[tuple[int, ...], torch.dtype]]  # shape and type of each tensor of a rollout
    progress: dict[str, Any]  # env state (such as curriculum levels)


@dataclass(frozen=True, slots=True)
class SentRollout:
    """Rollout for the learner; its tensors are valid until released."""

    actor: int
    tensors: Sequence[Any]  # NumPy arrays while Ray transfers them
    version: int  # version of the acting weights: number of updates
    taken: RolloutSums  # metrics of the rollout
    worked_s: float = 0.0  # duration of the rollout [s]
    waited_s: float = 0.0  # idle time of the actor before the rollout [s]
    progress: dict[str, Any] | None = None  # env state, occasionally from the first actor
    place: Any = None  # the engine's handle for `release`
    warnings: Sequence[Warned] = ()


@dataclass(frozen=True, slots=True)
class Stepped:
    """Answer to a `step` request: the first observation or a control step, as arrays."""

    actor: int
    obs: dict[str, np.ndarray] | None = None
    step: dict[str, Any] | None = None
    progress: dict[str, Any] | None = None
    warnings: Sequence[Warned] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """Error of an actor that would recur after a restart."""

    error: ConfigError | TaskError
    trace: str  # traceback for the user; empty if the error message suffices

    @classmethod
    def of(cls, actor: int, error: BaseException) -> Failed:
        """Wrap an actor's exception."""
        if isinstance(error, (ConfigError, TaskError)):
            return cls(error, "")
        problem = f"{type(error).__name__}: {first_line(error)}"
        return cls(ConfigError(problem, key=f"actor {actor}"), "".join(traceback.format_exception(error)))


class _Warnings(logging.Handler):
    """Buffer of warnings for the learner; an actor's own output is not shown."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._records: list[Warned] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._records.append((str(record.msg), record.getMessage()))

    def take(self) -> list[Warned]:
        records, self._records = self._records, []
        return records


_WARNINGS = _Warnings()


class Actor:
    """Envs and a policy that acts in them on the learner's request."""

    def __init__(self, job: ActorJob) -> None:
        logging.getLogger("gpusim_rl").addHandler(_WARNINGS)
        spec, collective = _spec_of(job), Collective()
        collective.rank = 1 + job.number + job.attempt * job.num_actors  # seeds derive from the rank
        envs = spec.cfg.num_envs
        start, _ = begin(spec, collective)
        self.collector = make_collector(start, ActorPlace(job.number * envs, job.num_actors * envs))
        self._number = job.number
        self._remote = remote_of(self.collector.algorithm)
        self._idle_since = time.monotonic()
        self._progress_at = 0.0 if job.number == 0 else float("inf")

    def describe(self) -> EnvDescription:
        """Return a description of the envs for the learner."""
        env, recording = self.collector.env, [(tuple(x.shape), x.dtype) for x, _ in self._remote.recording()]
        spaces = dict(env.obs_sizes), dict(env.images), env.action_space
        steps = env.max_episode_length, env.steps_between_truncations
        return EnvDescription(self._number, *spaces, *steps, env.summary, recording, env.state_dict())

    def acting_state(self) -> dict[str, Tensor]:
        """Return the state that `rollout` needs to act."""
        return self._remote.acting_state()

    def rollout(self, version: int, state: Mapping[str, Tensor]) -> SentRollout:
        """Record and return a rollout with the learner's state; the next rollout overwrites its tensors."""
        began = time.monotonic()
        waited_s = began - self._idle_since
        self._remote.load_acting_state(state)
        self.collector.collect()
        self._idle_since = time.monotonic()
        tensors, taken = [tensor for tensor, _ in self._remote.recording()], self.collector.metrics.take()
        worked_s, progress, warned = self._idle_since - began, self._due_progress(), _WARNINGS.take()
        return SentRollout(self._number, tensors, version, taken, worked_s, waited_s, progress, warnings=warned)

    def do(self, request: str, argument: Any) -> Stepped | None:
        """Handle a `begin` or `step` request; return the answer to a `step` request."""
        if request == "begin":
            self.collector.begin_from(argument)
            self._remote.begin_episodes()
            return None
        if argument is None:  # request for the first observation
            return Stepped(self._number, {group: value.numpy() for group, value in self.collector.obs.items()})
        step = self.collector.env.step(torch.tensor(argument))  # a copy: Ray's memory is read-only
        fields = {field.name: getattr(step, field.name) for field in dataclasses.fields(step)}
        arrays = tree_map_only(Tensor, lambda x: x.numpy(), fields)
        return Stepped(self._number, None, arrays, self._due_progress(), _WARNINGS.take())

    def _due_progress(self) -> dict[str, Any] | None:
        now = time.monotonic()
        if now - self._progress_at < PROGRESS_S:
            return None
        self._progress_at = now
        return self.collector.env.state_dict()


def tensor_of(array: np.ndarray) -> Tensor:
    """Wrap an array as a tensor without a copy; arrays in Ray's object store are read-only."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about read-only arrays
        return torch.from_numpy(array)


def _spec_of(job: ActorJob) -> RunSpec:
    config = {**job.config, "seed": job.seed, "device": "cpu", "graph": "off", "compile": "off"}
    config |= dict.fromkeys(("sim_device", "rl_device", "checkpoint", "num_actors"))
    refuse_classes_of_script(config)
    threads = config["sim"]["num_threads"] or config["actors"]["threads"]
    changes = {"actors": {"engine": None}, "sim": {"num_threads": threads}}
    changes |= {"eval": {"interval": 0}, "log": {"tensorboard": False}}
    config |= {section: {**config[section], **values} for section, values in changes.items()}
    task_class = load_task_or_environment(config["task"].get("_target_"))
    algorithm_class = load_algorithm_class(config["algo"].get("_target_"))
    cfg = build_run(config, task_class=task_class, algorithm_class=algorithm_class)
    return RunSpec(cfg, task_class, algorithm_class, config, [])
