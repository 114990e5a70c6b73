"""An actor: it steps envs of its own on a CPU, for a learner in another process."""

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

from gpusim_rl.env import Step
from gpusim_rl.env.task import load_task_or_environment
from gpusim_rl.errors import ConfigError, TaskError
from gpusim_rl.learn.algorithm import ActorPlace, load_algorithm_class
from gpusim_rl.learn.collective import Collective
from gpusim_rl.learn.remote import remote_of
from gpusim_rl.run.make_learner import make_collector
from gpusim_rl.run.metrics import Taken
from gpusim_rl.run.run_spec import RunSpec
from gpusim_rl.run.start import begin
from gpusim_rl.settings.checks import build_run
from gpusim_rl.settings.trust import refuse_classes_of_script
from gpusim_rl.spaces import ActionSpace, ImageShape

PROGRESS_S = 10.0
"""Time between two reports of the first actor on how far its envs are (levels of a curriculum, say) [s]."""
REPLACED: Mapping[str, Any] = {
    **dict.fromkeys(("sim_device", "rl_device", "checkpoint", "num_actors")),
    "device": "cpu",
    "graph": "off",
    "compile": "off",
}
"""Settings of an actor in place of the run's."""


@dataclass(frozen=True, slots=True)
class ActorJob:
    """Job of an actor: plain data, for a process on another machine."""

    config: dict[str, Any]  # composed settings of the run
    number: int  # from 0
    num_actors: int
    seed: int  # of the run
    attempt: int = 0  # earlier starts of the actor


# What an actor answers

Warned = tuple[str, str]
"""A warning before its values are filled in, and with them."""


@dataclass(frozen=True, slots=True)
class EnvDescription:
    """The envs of an actor that is ready, also after it was started again."""

    actor: int
    obs_sizes: dict[str, int]
    images: dict[str, ImageShape]
    action_space: ActionSpace
    max_episode_length: int
    steps_between_truncations: int
    summary: str
    recording: list[tuple[tuple[int, ...], torch.dtype]]  # shape and type of each tensor of a rollout
    progress: dict[str, Any]  # state of the envs at their start


@dataclass(frozen=True, slots=True)
class SentRollout:
    """A rollout for the learner. Its tensors are good until it is released."""

    actor: int
    tensors: Sequence[Any]  # or arrays while they are sent by Ray
    version: int  # of the weights that acted: updates of the learner
    taken: Taken  # metrics of the rollout
    worked_s: float = 0.0  # duration of the rollout [s]
    waited_s: float = 0.0  # time that the actor had waited before it [s]
    progress: dict[str, Any] | None = None  # state of the envs, from the first actor, now and then
    place: Any = None  # handle by which an engine releases the tensors
    warnings: Sequence[Warned] = ()


@dataclass(frozen=True, slots=True)
class Stepped:
    """Envs for which the learner acts: their first observation, or a control step, in arrays."""

    actor: int
    obs: dict[str, np.ndarray] | None = None
    step: dict[str, Any] | None = None
    progress: dict[str, Any] | None = None
    warnings: Sequence[Warned] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """An error in an actor, which would come again."""

    error: ConfigError | TaskError
    trace: str  # traceback for the user; empty where the error says enough

    @classmethod
    def of(cls, actor: int, error: BaseException) -> Failed:
        """Make the answer from an exception."""
        if isinstance(error, (ConfigError, TaskError)):
            return cls(error, "")
        text = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
        return cls(ConfigError(f"actor {actor}: {text}"), "".join(traceback.format_exception(error)))


# The actor


class _Warnings(logging.Handler):
    """Keeps warnings for the learner: nobody reads what an actor prints."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._heard: list[Warned] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a warning."""
        self._heard.append((str(record.msg), record.getMessage()))

    def take(self) -> list[Warned]:
        """Returns the warnings since the last call."""
        heard, self._heard = self._heard, []
        return heard


_WARNINGS = _Warnings()


class _OneOfActors(Collective):
    """An actor: it learns nothing, and has a seed of its own."""

    def __init__(self, job: ActorJob) -> None:
        self.rank = 1 + job.number + job.attempt * job.num_actors


class Actor:
    """Envs, and a policy that acts in them as a learner elsewhere says."""

    def __init__(self, job: ActorJob) -> None:
        logging.getLogger("gpusim_rl").addHandler(_WARNINGS)
        spec = _spec_of(job)
        envs = spec.cfg.num_envs
        start, _ = begin(spec, _OneOfActors(job))
        self.collector = make_collector(start, ActorPlace(job.number * envs, job.num_actors * envs))
        self._number = job.number
        self._remote = remote_of(self.collector.algorithm)
        self._idle_since = time.monotonic()
        self._progress_at = 0.0 if job.number == 0 else float("inf")

    def describe(self) -> EnvDescription:
        """Describes the envs to the learner."""
        env = self.collector.env
        return EnvDescription(
            self._number,
            dict(env.obs_sizes),
            dict(env.images),
            env.action_space,
            env.max_episode_length,
            env.steps_between_truncations,
            env.summary,
            [(tuple(x.shape), x.dtype) for x, _ in self._remote.recording()],
            env.state_dict(),
        )

    def acting_state(self) -> dict[str, Tensor]:
        """Returns what `rollout` acts by: its shapes and types are those of the learner's."""
        return self._remote.acting_state()

    def rollout(self, version: int, state: Mapping[str, Tensor]) -> SentRollout:
        """Act for a rollout in all envs by a version of the learner's `Remote.acting_state`.

        The next rollout overwrites its tensors.
        """
        began = time.monotonic()
        waited_s = began - self._idle_since
        self._remote.load_acting_state(state)
        self.collector.collect()
        self._idle_since = time.monotonic()
        tensors, taken = [tensor for tensor, _ in self._remote.recording()], self.collector.metrics.take()
        worked_s, progress, warnings = self._idle_since - began, self._due_progress(), _WARNINGS.take()
        return SentRollout(
            self._number, tensors, version, taken, worked_s, waited_s, progress=progress, warnings=warnings
        )

    def do(self, request: str, argument: Any) -> Stepped | None:
        """Begins at the progress of other envs, or takes a step: all requests but rollouts, which each engine sends."""
        if request == "step":
            return self._step(argument)
        self.collector.begin_from(argument)
        self._remote.begin_episodes()
        return None

    def _step(self, action: np.ndarray | None) -> Stepped:
        """Advances the envs by one control step; None asks for the first observation."""
        if action is None:
            return Stepped(self._number, {group: value.numpy() for group, value in self.collector.obs.items()})
        step = self.collector.env.step(torch.tensor(action))  # a copy: Ray's memory cannot be written
        fields = {field.name: getattr(step, field.name) for field in dataclasses.fields(step)}
        arrays = tree_map_only(Tensor, lambda x: x.numpy(), fields)
        return Stepped(self._number, None, arrays, self._due_progress(), _WARNINGS.take())

    def _due_progress(self) -> dict[str, Any] | None:
        now = time.monotonic()
        if now - self._progress_at < PROGRESS_S:
            return None
        self._progress_at = now
        return self.collector.env.state_dict()


def step_of(arrays: Mapping[str, Any]) -> Step:
    """Makes the control step of the arrays of a `Stepped`."""
    return Step(**tree_map_only(np.ndarray, tensor_of, dict(arrays)))


def tensor_of(array: np.ndarray) -> Tensor:
    """Makes a tensor in the memory of an array. That may be of Ray's object store, which nobody may write."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is not writable
        return torch.from_numpy(array)


def _spec_of(job: ActorJob) -> RunSpec:
    config = {**job.config, **REPLACED, "seed": job.seed}
    refuse_classes_of_script(config)
    actors = config["actors"]
    config["actors"] = {**actors, "engine": None}
    config["sim"] = {**config["sim"], "num_threads": config["sim"]["num_threads"] or actors["threads"]}
    config["eval"] = {**config["eval"], "interval": 0}
    config["log"] = {**config["log"], "tensorboard": False}
    task_class = load_task_or_environment(config["task"].get("_target_"))
    algorithm_class = load_algorithm_class(config["algo"].get("_target_"))
    cfg = build_run(config, task_class=task_class, algorithm_class=algorithm_class)
    return RunSpec(cfg, task_class, algorithm_class, config, [])
