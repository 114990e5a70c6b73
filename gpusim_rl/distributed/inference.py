"""Rollouts of actors that only step envs: the learner's device chooses their actions, for several actors at a time."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gpusim_rl.distributed.actor import RolloutInfo, step_of, tensor_of
from gpusim_rl.distributed.engine import Answer, Described, Engine, Lost, SentRollout, Stepped
from gpusim_rl.distributed.rollouts import Rollouts
from gpusim_rl.distributed.tuner import Limits, Tuner
from gpusim_rl.env.device_env import moved
from gpusim_rl.learn.algorithm import Algorithm
from gpusim_rl.learn.remote import Remote
from gpusim_rl.run.metrics import Metrics

BACKLOG = 2
"""Finished rollouts of an actor for which there is room: an actor that has no room gets no answer."""
POLL_S = 5e-3
"""Room becomes free without an answer of an actor [s]."""
CPU = torch.device("cpu")


@dataclass(slots=True)
class _ServedActor:
    """What the learner's side keeps of an actor."""

    number: int
    remote: Remote
    """Acts and records: its noise, recurrent state and rollout are of this actor."""
    metrics: Metrics
    free: deque[list[Tensor]]
    """Room for rollouts that are finished; without it the actor gets no answer."""
    alive: bool = False
    obs: dict[str, Tensor] = field(default_factory=dict)
    action: Tensor | None = None
    ready_since: float | None = None
    """It waits for actions since then; None: it steps."""
    t: int = 0
    version: int = 0

    @property
    def algorithm(self) -> Algorithm:
        """What acts and records."""
        return self.remote.algorithm


class InferenceRollouts(Rollouts):
    """Rollouts of actors that are told every action, as in GA3C (Babaeizadeh et al. 2017, arXiv 1611.06256).

    A thread answers actors in batches: as soon as `max_batch` of them wait, or the first one has waited for
    `max_wait_ms`. With 0 it answers all that wait by now, and batches grow by themselves where it is busy. An actor
    whose rollouts the learner has not copied yet gets no answer, so nothing piles up. The thread acts with copies of
    the weights of a version, so never with weights that are half updated.

    Args:
        engine: What has the actors.
        make: Makes what acts for an actor, by its number.
        num_envs: Of an actor.
        device: Where the policy acts.
        limits: How many actors work, and how many are answered together.
        max_wait_ms: See above.
        tune: Try other limits while the run goes on.
    """

    def __init__(
        self,
        engine: Engine,
        make: Callable[[int], Remote],
        *,
        num_envs: int,
        device: torch.device,
        limits: Limits,
        max_wait_ms: float,
        tune: bool,
    ) -> None:
        super().__init__(engine)
        self._make, self._num_envs, self._device = make, num_envs, device
        self._max_wait_s, self._first_limits = max_wait_ms / 1000.0, limits
        self._tuner = Tuner(limits, engine.num_actors) if tune else None
        self._actors: list[_ServedActor] = []
        self._finished: queue.SimpleQueue[SentRollout | BaseException] = queue.SimpleQueue()
        self._newest: tuple[int, Mapping[str, Tensor]] | None = None
        self._version = -1
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="inference", daemon=True)
        self._since, self._waited_s = time.monotonic(), 0.0
        self._batches = self._answered = 0

    def publish(self, version: int, state: Mapping[str, Tensor]) -> None:
        """Hands the weights over to the thread; the first time starts it."""
        self._newest = (version, {name: x.clone() for name, x in state.items()})
        if not self._actors:
            self._actors = [self._actor(number) for number in range(self.engine.num_actors)]
            for it in self._actors:
                it.algorithm.policy = self._actors[0].algorithm.policy
            self._thread.start()

    def _actor(self, number: int) -> _ServedActor:
        remote = self._make(number)
        room = [[torch.empty_like(x) for x, _ in remote.recording()] for _ in range(BACKLOG)]
        return _ServedActor(number, remote, Metrics(self._num_envs, CPU), deque(room))

    def next(self, timeout_s: float) -> SentRollout | None:
        """A rollout, the oldest one first."""
        try:
            found = self._finished.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(found, BaseException):
            raise found
        return found

    def release(self, rollout: SentRollout) -> None:
        """There is room for another one."""
        self._actors[rollout.actor].free.append(rollout.place)

    # The thread

    def _serve(self) -> None:
        try:
            early, self._early = self._early, []
            for answer in early:
                self._take(answer)
            while not self._ended.is_set():
                patience = self._answer_ready()
                for answer in self.engine.get(patience):
                    self._take(answer)
        except BaseException as error:  # the learner raises it
            self._finished.put(error)

    @property
    def _limits(self) -> Limits:
        return self._first_limits if self._tuner is None else self._tuner.limits

    def _answer_ready(self) -> float:
        """Answers actors that wait; returns how long the next look may be put off [s]."""
        limits, now = self._limits, time.monotonic()
        working = [it for it in self._actors[: limits.actors] if it.alive]
        ready = [it for it in working if it.ready_since is not None and it.free]
        ready.sort(key=lambda it: it.ready_since or 0.0)
        while ready:
            due = (ready[0].ready_since or 0.0) + self._max_wait_s
            if len(ready) < min(limits.batch, len(working)) and now < due:
                return due - now
            self._answer(ready[: limits.batch])
            ready = ready[limits.batch :]
        return POLL_S

    @torch.no_grad()
    def _answer(self, actors: Sequence[_ServedActor]) -> None:
        """Chooses actions for some actors, in one batch."""
        newest = self._newest
        assert newest is not None
        if newest[0] != self._version:
            self._version, state = newest
            first, *others = (it.remote for it in self._actors)
            first.load_acting_state(state)
            of_policy = first.algorithm.policy.state_dict().keys()  # which they share
            if rest := {name: x for name, x in state.items() if name not in of_policy}:
                for remote in others:
                    remote.load_acting_state(rest)
        for it in actors:
            if it.t == 0:
                it.version = self._version
                it.algorithm.begin_rollout()
                it.metrics.begin_rollout()
        actions = actors[0].remote.act_together([it.remote for it in actors], [it.obs for it in actors])
        host = torch.cat(actions).cpu()  # the envs are elsewhere: the one copy that this form of acting is made of
        now = time.monotonic()
        for it, action, sent in zip(actors, actions, host.split(self._num_envs), strict=True):
            self._waited_s += now - (it.ready_since or now)
            it.action, it.ready_since = action, None
            self.engine.ask_for_step(it.number, sent.numpy())
        self._batches, self._answered = self._batches + 1, self._answered + len(actors)

    def _take(self, answer: Answer) -> None:
        it = self._actors[answer.actor]
        if isinstance(answer, Described):
            it.alive = True
            self._begin(answer.actor)
            self.engine.ask_for_step(answer.actor, None)
        elif isinstance(answer, Lost):
            self._lose(answer.actor, int(it.t > 0))
            it.alive, it.ready_since, it.t = False, None, 0
            it.remote.begin_episodes()
            it.metrics = Metrics(self._num_envs, CPU)
        elif isinstance(answer, Stepped):
            self._record(it, answer)

    @torch.no_grad()
    def _record(self, it: _ServedActor, answer: Stepped) -> None:
        """Records a control step; at the end of a rollout it is handed over to the learner."""
        it.ready_since = time.monotonic()
        self.progress = answer.progress or self.progress
        if answer.step is None:  # it has just begun
            assert answer.obs is not None
            it.obs = {group: tensor_of(x).to(self._device) for group, x in answer.obs.items()}
            return
        assert it.action is not None
        step = step_of(answer.step)
        it.metrics.record_step(step)
        step = moved(step, self._device)
        it.algorithm.record(it.action, step)
        it.obs = step.obs
        it.t += 1
        if self._tuner is not None:
            self._tuner.observe(self._num_envs, it.ready_since)
        if it.t == it.algorithm.horizon:
            it.t = 0
            it.metrics.end_rollout()
            room = it.free.popleft()
            for own, (recorded, _) in zip(room, it.remote.recording(), strict=True):
                own.copy_(recorded)
            if self._device.type == "cuda":  # the learner reads it on another stream
                torch.cuda.current_stream(self._device).synchronize()
            self._finished.put(
                SentRollout(it.number, room, RolloutInfo(it.version, it.metrics.take(), 0.0, 0.0, None), room)
            )

    def numbers(self) -> dict[str, float]:
        """How many actors work, for which part of the time they waited, and how large batches were."""
        now = time.monotonic()
        alive, limits = sum(it.alive for it in self._actors), self._limits
        time_of_all = max(1, min(alive, limits.actors)) * (now - self._since)
        told = {
            "actors/alive": float(alive),
            "actors/active": float(limits.actors),
            "actors/wait": min(1.0, self._waited_s / time_of_all),
            "actors/inference_batch": self._answered / max(1, self._batches),
            "actors/max_batch": float(limits.batch),
        }
        self._since, self._waited_s, self._batches, self._answered = now, 0.0, 0, 0
        return told

    def close(self) -> None:
        """Ends the thread, then the actors."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        super().close()
