"""Actors on a Ray cluster: `actors=ray`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from torch import Tensor

from gpusim_rl.distributed.actor import Actor, ActorJob, Failed, SentRollout, tensor_of
from gpusim_rl.distributed.engine import NO_ANSWER, Answer, Engine, Lost
from gpusim_rl.distributed.ray_cluster import ray_cluster
from gpusim_rl.errors import first_line

STORE = "object_store_memory"
UP = "up"


class RemoteActor:
    """Ray actor; creates its envs on a `describe` request, also after a restart."""

    def __init__(self, job: ActorJob) -> None:
        self._job = job
        self._actor: Actor | None = None

    def is_up(self) -> str:
        """Return `UP`, which shows that the process is running."""
        return UP

    def call(self, request: str, attempt: int, argument: Any) -> Answer | Failed | None:
        """Handle a request; errors are returned, since a raised error would restart the actor."""
        try:
            if request == "describe":
                self._actor = Actor(replace(self._job, attempt=attempt))
                return self._actor.describe()
            if self._actor is None:  # Ray has restarted the process
                return Lost(self._job.number)
            if request == "rollout":
                version, weights = argument
                rollout = self._actor.rollout(version, {name: tensor_of(x) for name, x in weights.items()})
                return replace(rollout, tensors=[x.numpy() for x in rollout.tensors])
            return self._actor.do(request, argument)
        except Exception as error:
            return Failed.of(self._job.number, error)


class RayEngine(Engine):
    """Ray actors on this machine or on cluster nodes, which may disappear (spot instances).

    Ray restarts actors without limit, but does not repeat calls: a dead actor's work is lost.
    """

    waits_for = "Actors are still creating their envs, or the cluster has no free resources: see ray status"

    def __init__(self, jobs: Sequence[ActorJob], *, address: str | None) -> None:
        super().__init__(len(jobs), jobs[0].config["actors"]["timeout_s"])
        self._jobs, self._threads = jobs, jobs[0].config["actors"]["threads"]
        self._stack = ExitStack()
        cpus = self._threads * len(jobs)
        self._ray = self._stack.enter_context(ray_cluster("actors=ray", address=address, num_cpus=cpus))
        self._actors: list[Any] = []
        self._attempts = [0] * len(jobs)  # `ActorJob.attempt`; answers of earlier attempts are ignored
        self._calls: dict[Any, tuple[int, int]] = {}  # actor and attempt of each pending call
        self._weights: Any = None

    def start(self) -> None:
        remote = self._ray.remote(RemoteActor).options(
            num_cpus=self._threads,
            max_restarts=-1,
            max_task_retries=0,
            runtime_env={"env_vars": {"CUDA_VISIBLE_DEVICES": ""}},
        )
        self._actors = [remote.remote(job) for job in self._jobs]  # each starts when the cluster has room
        self._calls = {actor.is_up.remote(): (number, 0) for number, actor in enumerate(self._actors)}

    def _ask(self, actor: int, request: str, argument: Any) -> None:
        attempt, argument = self._attempts[actor], self._weights if request == "rollout" else argument
        self._calls[self._actors[actor].call.remote(request, attempt, argument)] = actor, attempt

    def publish(self, version: int, state: Mapping[str, Tensor]) -> None:
        self._weights = self._ray.put((version, {name: x.numpy() for name, x in state.items()}))

    def _get(self, timeout_s: float) -> list[Answer]:
        calls = [*self._calls]
        if not calls:  # all actors wait for the learner; ray.wait would return immediately
            time.sleep(timeout_s)
        ready, _ = self._ray.wait(calls, num_returns=1, timeout=timeout_s)
        if ready:
            ready, _ = self._ray.wait(calls, num_returns=len(calls), timeout=0)
        return [answer for call in ready if (answer := self._read(call)) is not None]

    def _read(self, call: Any) -> Answer | None:
        actor, attempt = self._calls.pop(call)
        if attempt != self._attempts[actor]:  # a call of a dead actor
            return None
        try:
            answer = self._ray.get(call)
        except self._ray.exceptions.RayError as error:
            return self._restarts(actor, None, first_line(error))
        if isinstance(answer, Lost):
            return self._restarts(actor, None, "")
        if answer is None:
            return None
        if answer == UP:  # from here on, the actor creates its envs
            self._silence.asked(actor)
            self._ask(actor, "describe", None)
            return None
        if isinstance(answer, SentRollout):
            answer = replace(answer, tensors=[tensor_of(x) for x in answer.tensors])
        return self._received(answer)

    def _replace(self, actor: int, silent_s: float | None) -> Lost:
        self._ray.kill(self._actors[actor], no_restart=False)
        return self._restarts(actor, silent_s, NO_ANSWER)

    def _restarts(self, actor: int, silent_s: float | None, last_words: str) -> Lost:
        """Drop a lost actor's pending calls, and request an answer from the restarted actor; return the loss."""
        lost = self._died(actor, last_words, silent_s)
        self._attempts[actor] += 1
        # Calls without retries fail until Ray has restarted the actor, which would look like deaths.
        up = self._actors[actor].is_up.options(max_task_retries=-1).remote()
        self._calls[up] = actor, self._attempts[actor]
        return lost

    def numbers(self) -> dict[str, float]:
        """Return the fill level of the object store (0 to 1)."""
        whole = self._ray.cluster_resources().get(STORE, 0.0)
        free = self._ray.available_resources().get(STORE, 0.0)
        return {"actors/object_store": 1.0 - free / whole} if whole else {}

    def close(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor)
        self._actors.clear()
        self._calls.clear()
        self._stack.close()
