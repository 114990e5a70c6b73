"""What an actor does: it steps envs of its own on a CPU, for a learner in another process."""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from gpusim_rl.env import Step
from gpusim_rl.env.task import load_task_or_environment
from gpusim_rl.learn.algorithm import load_algorithm_class
from gpusim_rl.learn.collective import Collective
from gpusim_rl.learn.remote import remote_of
from gpusim_rl.run.metrics import Taken
from gpusim_rl.run.run_spec import RunSpec
from gpusim_rl.run.start import begin, env_spec, make_collector
from gpusim_rl.settings.checks import build_run
from gpusim_rl.settings.trust import refuse_classes_of_script
from gpusim_rl.spaces import ActionSpace

PROGRESS_S = 10.0
"""The first actor tells so often how far its envs are (levels of a curriculum, say), for checkpoints [s]."""
ALONE: Mapping[str, Any] = {
    "device": "cpu",
    "sim_device": None,
    "rl_device": None,
    "graph": "off",
    "compile": "off",
    "checkpoint": None,
    "num_actors": None,
}
"""Settings of an actor in place of the run's."""


@dataclass(frozen=True, slots=True)
class ActorJob:
    """What an actor is made from. It holds plain data, for a process on another machine.

    Attributes:
        config: Composed settings of the run.
        number: Of the actor, from 0.
        num_actors: Of the run.
        seed: Of the run.
        attempt: How often the actor has been started before.
    """

    config: dict[str, Any]
    number: int
    num_actors: int
    seed: int
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class EnvDescription:
    """The envs of an actor."""

    obs_sizes: dict[str, int]
    action_space: ActionSpace
    max_episode_length: int
    steps_between_truncations: int
    summary: str
    recording: list[tuple[tuple[int, ...], torch.dtype]]
    """Shape and type of each tensor of a rollout."""
    progress: dict[str, Any]
    """State of the envs at their start."""


@dataclass(frozen=True, slots=True)
class RolloutInfo:
    """What belongs to a rollout beside its tensors."""

    version: int
    """Of the weights that acted: updates of the learner."""
    taken: Taken
    """Its metrics."""
    worked_s: float
    """How long it took [s]."""
    waited_s: float
    """How long the actor had waited before [s]."""
    progress: dict[str, Any] | None
    """State of the envs, from the first actor, now and then."""


class _OneOfActors(Collective):
    """An actor: it learns nothing, and has a seed of its own."""

    def __init__(self, job: ActorJob) -> None:
        self.rank = 1 + job.number + job.attempt * job.num_actors


class Actor:
    """Envs, and a policy that acts in them as a learner elsewhere says.

    Args:
        job: What to do.

    Raises:
        ConfigError: The envs cannot be made here.

    Attributes:
        collector: Envs, and what acts in them.
    """

    def __init__(self, job: ActorJob) -> None:
        spec = _spec_of(job)
        envs = spec.cfg.num_envs
        start, _ = begin(spec, _OneOfActors(job))
        self.collector = make_collector(
            start,
            role="acts",
            first_env=job.number * envs,
            all_envs=job.num_actors * envs,
        )
        self._remote = remote_of(self.collector.algorithm, env_spec(start, self.collector.env))
        self._idle_since = time.monotonic()
        self._progress_at = 0.0 if job.number == 0 else float("inf")

    def describe(self) -> EnvDescription:
        """The envs, for the learner."""
        env = self.collector.env
        return EnvDescription(
            dict(env.obs_sizes),
            env.action_space,
            env.max_episode_length,
            env.steps_between_truncations,
            env.summary,
            [(tuple(x.shape), x.dtype) for x, _ in self._remote.recording()],
            env.state_dict(),
        )

    def begin_from(self, progress: dict[str, Any]) -> None:
        """Begins new episodes where other envs had come: `RolloutInfo.progress`."""
        self.collector.begin_from(progress)
        self._remote.begin_episodes()

    def acting_state(self) -> dict[str, Tensor]:
        """What `rollout` acts by, to be written in place: its shapes and types are the learner's."""
        return self._remote.acting_state()

    def rollout(self, version: int, state: Mapping[str, Tensor]) -> tuple[list[Tensor], RolloutInfo]:
        """Acts for a rollout in all envs.

        Args:
            version: Of the weights.
            state: The learner's `Remote.acting_state`.

        Returns:
            Its tensors, which the next rollout overwrites, and what belongs to it.
        """
        began = time.monotonic()
        waited_s = began - self._idle_since
        self._remote.load_acting_state(state)
        self.collector.collect()
        self._idle_since = time.monotonic()
        taken, worked_s = self.collector.metrics.take(), self._idle_since - began
        info = RolloutInfo(version, taken, worked_s, waited_s, self._due_progress())
        return [tensor for tensor, _ in self._remote.recording()], info

    def _due_progress(self) -> dict[str, Any] | None:
        now = time.monotonic()
        if now - self._progress_at < PROGRESS_S:
            return None
        self._progress_at = now
        return self.collector.env.state_dict()

    def first_obs(self) -> dict[str, np.ndarray]:
        """The observation to act on first."""
        return {group: value.numpy() for group, value in self.collector.obs.items()}

    def step(self, action: np.ndarray) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """One control step, for a learner that acts: the fields of `Step` as arrays, and now and then the progress."""
        return arrays_of(self.collector.env.step(torch.from_numpy(action))), self._due_progress()


def arrays_of(step: Step) -> dict[str, Any]:
    """The fields of a control step, as arrays."""
    fields = {field.name: getattr(step, field.name) for field in dataclasses.fields(step)}
    return tree_map_only(Tensor, lambda x: x.numpy(), fields)


def step_of(arrays: Mapping[str, Any]) -> Step:
    """Undoes `arrays_of`."""
    return Step(**tree_map_only(np.ndarray, tensor_of, dict(arrays)))


def tensor_of(array: np.ndarray) -> Tensor:
    """A tensor in the memory of an array. That may be of Ray's object store, which nobody may write."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is not writable
        return torch.from_numpy(array)


def _spec_of(job: ActorJob) -> RunSpec:
    config = {**job.config, **ALONE, "seed": job.seed}
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
