"""Actors on a Ray cluster: `actors=ray`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from gpusim_rl.distributed.actor import Actor, ActorJob, tensor_of
from gpusim_rl.distributed.engine import (
    Answer,
    Described,
    Engine,
    SentRollout,
    Stepped,
    describe_error,
    raise_error,
)
from gpusim_rl.distributed.ray_cluster import ray_cluster

STORE = "object_store_memory"


@dataclass(frozen=True, slots=True)
class _Call:
    """What an actor was asked for."""

    actor: int
    attempt: int
    """Of the actor, counted as `ActorJob.attempt`: answers of one that is dead count no more."""


class RemoteActor:
    """An actor in a process of Ray. After a restart it is as new: it must be asked for its description first."""

    def __init__(self, job: ActorJob) -> None:
        self._job = job
        self._actor: Actor | None = None

    def is_up(self) -> tuple[str]:
        """Answers as soon as the process is there."""
        return ("up",)

    def call(self, kind: str, attempt: int, argument: Any = None, weights: Any = None) -> tuple[Any, ...]:
        """Does what the learner asks for; an error is an answer too, because it is no reason for a restart."""
        try:
            return self._call(kind, attempt, argument, weights)
        except Exception as error:
            return "error", *describe_error(error)

    def _call(self, kind: str, attempt: int, argument: Any, weights: Any) -> tuple[Any, ...]:
        if kind == "describe":
            self._actor = Actor(replace(self._job, attempt=attempt))
            return "described", self._actor.describe()
        actor = self._actor
        if actor is None:
            return ("restarted",)
        if kind == "rollout":
            version, arrays = weights
            tensors, info = actor.rollout(version, {name: tensor_of(x) for name, x in arrays.items()})
            return "recorded", [x.numpy() for x in tensors], info
        if kind == "begin":
            actor.begin_from(argument)
            return ("begun",)
        if argument is None:
            return "stepped", actor.first_obs()
        return "stepped", None, *actor.step(np.array(argument))


class RayEngine(Engine):
    """Actors of Ray: on this machine, or on the nodes of a cluster, which may go away (spot instances).

    Ray starts an actor again wherever there is room, for ever. A call is made once: what an actor was doing when it
    died is lost. Weights are put into Ray's object store once for each version.

    Args:
        jobs: What each actor is made from.
        address: Of a cluster; None is that of RAY_ADDRESS, else this machine.

    Raises:
        ConfigError: There is no Ray, or no cluster at the address.
    """

    name = "ray"
    waits_for = "It makes its envs, or the cluster has no room: see ray status"

    def __init__(self, jobs: list[ActorJob], *, address: str | None) -> None:
        super().__init__(len(jobs))
        self._jobs, self._threads = jobs, jobs[0].config["actors"]["threads"]
        self._stack = ExitStack()
        cpus = self._threads * len(jobs)
        self._ray = self._stack.enter_context(ray_cluster("actors=ray", address=address, num_cpus=cpus))
        self._actors: list[Any] = []
        self._attempts = [0] * len(jobs)
        self._calls: dict[Any, _Call] = {}
        self._weights: Any = None

    def start(self) -> None:
        """Starts all actors, as the cluster has room for them."""
        remote = self._ray.remote(RemoteActor).options(
            num_cpus=self._threads,
            max_restarts=-1,
            max_task_retries=0,
            runtime_env={"env_vars": {"CUDA_VISIBLE_DEVICES": ""}},
        )
        self._actors = [remote.remote(job) for job in self._jobs]
        for actor in range(self.num_actors):
            self._call(actor, "describe")

    def _call(self, actor: int, kind: str, argument: Any = None, weights: Any = None) -> None:
        attempt = self._attempts[actor]
        answer = self._actors[actor].call.remote(kind, attempt, argument, weights)
        self._calls[answer] = _Call(actor, attempt)

    def publish(self, version: int, state: Mapping[str, Tensor]) -> None:
        """Puts them into the object store."""
        self._weights = self._ray.put((version, {name: x.numpy() for name, x in state.items()}))

    def ask_for_rollout(self, actor: int) -> None:
        """With the newest weights."""
        self._call(actor, "rollout", None, self._weights)

    def ask_for_step(self, actor: int, action: np.ndarray | None) -> None:
        """Asks for it."""
        self._call(actor, "step", action)

    def begin_from(self, actor: int, progress: dict[str, Any]) -> None:
        """Tells it."""
        self._call(actor, "begin", progress)

    def get(self, timeout_s: float) -> list[Answer]:
        """What has come."""
        calls = [*self._calls]
        if not calls:  # all wait for the learner; Ray would return at once
            time.sleep(timeout_s)
        ready, _ = self._ray.wait(calls, num_returns=1, timeout=timeout_s)
        if ready:
            ready, _ = self._ray.wait(calls, num_returns=len(calls), timeout=0)
        return [answer for reference in ready if (answer := self._read(reference)) is not None]

    def _read(self, reference: Any) -> Answer | None:
        call = self._calls.pop(reference)
        try:
            kind, *message = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            return self._lost(call, str(error).strip().partition("\n")[0])
        if call.attempt != self._attempts[call.actor]:
            return None
        if kind == "error":
            raise_error(call.actor, *message)
        if kind == "restarted":
            return self._lost(call, "")
        if kind == "up":
            self._call(call.actor, "describe")
            return None
        if kind == "described":
            return Described(call.actor, *message)
        if kind == "begun":
            return None
        if kind == "recorded" or len(message) > 1:  # not by a first observation alone
            self._answered(call.actor)
        if kind == "recorded":
            arrays, info = message
            return SentRollout(call.actor, [tensor_of(x) for x in arrays], info, None)
        return Stepped(call.actor, *message)

    def _lost(self, call: _Call, last_words: str) -> Answer | None:
        if call.attempt != self._attempts[call.actor]:  # the other calls of an actor that died
            return None
        lost = self._died(call.actor, last_words)
        self._attempts[call.actor] += 1
        # Until Ray has started it again, a call that may be made only once fails at once. It is no death.
        up = self._actors[call.actor].is_up.options(max_task_retries=-1).remote()
        self._calls[up] = _Call(call.actor, self._attempts[call.actor])
        return lost

    def numbers(self) -> dict[str, float]:
        """How full the object store is."""
        whole = self._ray.cluster_resources().get(STORE, 0.0)
        free = self._ray.available_resources().get(STORE, 0.0)
        return {"actors/object_store": 1.0 - free / whole} if whole else {}

    def close(self) -> None:
        """Ends all actors, and a cluster of its own."""
        for actor in self._actors:
            self._ray.kill(actor)
        self._actors.clear()
        self._calls.clear()
        self._stack.close()
