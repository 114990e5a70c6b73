"""Rollouts with central inference: actors only step envs, and the learner's device chooses actions in batches."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from gpusim_rl.distributed.actor import EnvDescription, SentRollout, Stepped, tensor_of
from gpusim_rl.distributed.engine import Answer, Engine, Lost
from gpusim_rl.distributed.rollouts import Rollouts
from gpusim_rl.env import Step
from gpusim_rl.learn.algorithm import ActorPlace, EnvSpec
from gpusim_rl.learn.remote import Remote, remote_of
from gpusim_rl.run.make_learner import make_algorithm
from gpusim_rl.run.metrics import Metrics
from gpusim_rl.run.start import SEEDS_APART, RunStart

BACKLOG = 2  # buffers for finished rollouts per actor
POLL_S = 5e-3  # poll interval for freed buffers [s]
CPU = torch.device("cpu")


@dataclass(slots=True)
class _ServedActor:
    """Learner-side state of an actor."""

    number: int
    remote: Remote  # with the noise, recurrent state and rollout of this actor
    metrics: Metrics
    free: deque[list[Tensor]]  # buffers for finished rollouts; without one, the actor has to wait
    alive: bool = False
    obs: dict[str, Tensor] = field(default_factory=dict)
    action: Tensor | None = None
    ready_since: float | None = None  # start of the wait for actions; None while the actor steps
    t: int = 0
    version: int = 0


class InferenceRollouts(Rollouts):
    """Rollouts with central inference, as in GA3C (Babaeizadeh et al. 2017, arXiv 1611.06256).

    A thread answers actors in batches: once `max_batch` actors wait, or once the first has waited for `max_wait_ms` (0:
    no wait). The thread acts with a copy of the weights, never with half-updated weights.
    """

    def __init__(self, engine: Engine, start: RunStart, seed: int) -> None:
        super().__init__(engine)
        actors, self._num_envs = start.cfg.actors, start.cfg.num_envs
        self._start, self._seed, self._device = start, seed, start.device
        self._max_wait_s = actors.max_wait_ms / 1000.0
        self._max_batch = min(actors.max_batch or engine.num_actors, engine.num_actors)
        self._actors: list[_ServedActor] = []
        self._finished: queue.SimpleQueue[SentRollout | BaseException] = queue.SimpleQueue()
        self._newest: tuple[int, Mapping[str, Tensor]] | None = None
        self._version = -1
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="inference", daemon=True)
        self._since, self._waited_s = time.monotonic(), 0.0
        self._batches = self._answered = 0

    def publish(self, version: int, state: Mapping[str, Tensor]) -> None:
        self._newest = (version, {name: x.clone() for name, x in state.items()})
        if not self._actors:
            self._actors = [self._actor(number) for number in range(self.engine.num_actors)]
            for actor in self._actors:
                actor.remote.algorithm.policy = self._actors[0].remote.algorithm.policy
            self._thread.start()

    def _actor(self, number: int) -> _ServedActor:
        envs, num_envs = self.envs, self._num_envs
        env = EnvSpec(num_envs, envs.obs_sizes, envs.action_space, envs.steps_between_truncations, images=envs.images)
        place = ActorPlace(number * num_envs, self.engine.num_actors * num_envs)
        remote = remote_of(make_algorithm(self._start, env, place, self._seed + (1 + number) * SEEDS_APART))
        buffers = [[torch.empty_like(x) for x, _ in remote.recording()] for _ in range(BACKLOG)]
        return _ServedActor(number, remote, Metrics(self._num_envs, CPU), deque(buffers))

    def next(self, timeout_s: float) -> SentRollout | None:
        with suppress(queue.Empty):
            rollout = self._finished.get(timeout=timeout_s)
            if isinstance(rollout, BaseException):
                raise rollout
            return rollout
        return None

    def release(self, rollout: SentRollout) -> None:
        self._actors[rollout.actor].free.append(rollout.place)

    def _serve(self) -> None:
        try:
            for answer in self._early:
                self._take(answer)
            while not self._ended.is_set():
                for answer in self.engine.get(self._answer_ready()):
                    self._take(answer)
        except BaseException as error:  # the learner raises it
            self._finished.put(error)

    def _answer_ready(self) -> float:
        """Answer waiting actors; return the time until the next check [s]."""
        now = time.monotonic()
        working = [actor for actor in self._actors if actor.alive]
        ready = [actor for actor in working if actor.ready_since is not None and actor.free]
        ready.sort(key=lambda actor: actor.ready_since or 0.0)
        while ready:
            due = (ready[0].ready_since or 0.0) + self._max_wait_s
            if len(ready) < min(self._max_batch, len(working)) and now < due:
                return due - now
            self._answer(ready[: self._max_batch])
            ready = ready[self._max_batch :]
        return POLL_S

    @torch.no_grad()
    def _answer(self, actors: Sequence[_ServedActor]) -> None:
        newest = self._newest
        assert newest is not None
        if newest[0] != self._version:
            self._version, state = newest
            first, *others = (actor.remote for actor in self._actors)
            first.load_acting_state(state)
            shared = first.algorithm.policy.state_dict().keys()
            if rest := {name: x for name, x in state.items() if name not in shared}:
                for remote in others:
                    remote.load_acting_state(rest)
        for actor in actors:
            if actor.t == 0:
                actor.version = self._version
                actor.remote.algorithm.begin_rollout()
                actor.metrics.begin_rollout()
        remotes = [actor.remote for actor in actors]
        actions = remotes[0].act_together(remotes, [actor.obs for actor in actors])
        on_host = torch.cat(actions).cpu()  # waits for the device
        now = time.monotonic()
        for actor, action, sent in zip(actors, actions, on_host.split(self._num_envs), strict=True):
            self._waited_s += now - (actor.ready_since or now)
            actor.action, actor.ready_since = action, None
            self.engine.ask_for_step(actor.number, sent.numpy())
        self._batches, self._answered = self._batches + 1, self._answered + len(actors)

    def _take(self, answer: Answer) -> None:
        actor = self._actors[answer.actor]
        if isinstance(answer, EnvDescription):
            actor.alive = True
            self._begin(actor.number)
            self.engine.ask_for_step(actor.number, None)
        elif isinstance(answer, Lost):
            self._lose(answer, int(actor.t > 0))
            actor.alive, actor.ready_since, actor.t = False, None, 0
            actor.remote.begin_episodes()
            actor.metrics = Metrics(self._num_envs, CPU)
        elif isinstance(answer, Stepped):
            self._record(actor, answer)

    @torch.no_grad()
    def _record(self, actor: _ServedActor, answer: Stepped) -> None:
        """Record a control step; pass a finished rollout to the learner."""
        actor.ready_since = time.monotonic()
        self.progress = answer.progress or self.progress
        if answer.step is None:  # first observation
            assert answer.obs is not None
            actor.obs = {group: tensor_of(x).to(self._device) for group, x in answer.obs.items()}
            return
        assert actor.action is not None
        step, algorithm = Step(**tree_map_only(np.ndarray, tensor_of, answer.step)), actor.remote.algorithm
        actor.metrics.record_step(step)
        step = step.to(self._device)
        algorithm.record(actor.action, step)
        actor.obs = step.obs
        actor.t += 1
        if actor.t == algorithm.horizon:
            actor.t = 0
            actor.metrics.end_rollout()
            buffers = actor.free.popleft()
            for target, (recorded, _) in zip(buffers, actor.remote.recording(), strict=True):
                target.copy_(recorded)
            if self._device.type == "cuda":  # the learner reads it on another stream
                torch.cuda.current_stream(self._device).synchronize()
            self._finished.put(SentRollout(actor.number, buffers, actor.version, actor.metrics.take(), place=buffers))

    def numbers(self) -> dict[str, float]:
        now, alive = time.monotonic(), sum(actor.alive for actor in self._actors)
        wait = min(1.0, self._waited_s / (max(1, alive) * (now - self._since)))
        numbers = {"actors/alive": float(alive), "actors/wait": wait}
        numbers["actors/inference_batch"] = self._answered / max(1, self._batches)
        self._since, self._waited_s, self._batches, self._answered = now, 0.0, 0, 0
        return super().numbers() | numbers

    def close(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        super().close()
