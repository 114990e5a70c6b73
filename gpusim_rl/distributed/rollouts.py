"""Sources of actors' rollouts, and the collector that consumes them instead of stepping envs."""

from __future__ import annotations

import dataclasses
import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gpusim_rl.distributed.actor import EnvDescription, SentRollout
from gpusim_rl.distributed.engine import Answer, Engine, Lost
from gpusim_rl.env import Environment, Step
from gpusim_rl.env.environment import Observation
from gpusim_rl.learn.remote import remote_of
from gpusim_rl.run.collector import Collector, Pause, ignore_pause
from gpusim_rl.run.make_env import env_spec
from gpusim_rl.run.make_learner import make_algorithm, use_cpus
from gpusim_rl.run.metrics import Row
from gpusim_rl.run.start import RunStart

logger = logging.getLogger("gpusim_rl")

PATIENCE_S = 30.0  # interval of messages while waiting for actors or rollouts [s]
IN_FLIGHT = 2  # rollouts requested from an actor at a time, so that it records while the learner copies
POLL_S = 0.1  # interval at which the waiting learner checks for signals [s]
COPYING_S = 1e-3  # poll interval while copies are under way [s]


class Rollouts(ABC):
    """Source of the learner's rollouts.

    Attributes:
        envs: Description of the actors' envs; set by `start`.
        progress: Newest env state from an actor (such as curriculum levels); set by `start`.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.envs: EnvDescription
        self.progress: dict[str, Any] = {}
        self._restarts = self._lost_rollouts = 0  # since the start of the run
        self._continues = [False] * engine.num_actors  # whether each actor begins from `progress`
        self._early: list[Answer] = []  # received before the first `publish`

    def start(self) -> None:
        """Start the actors; wait until the first one is ready."""
        self.engine.start()
        began = patience = time.monotonic()
        while True:
            answers = self.engine.get(timeout_s=1.0)
            self._early += answers  # several actors may be ready at once
            for answer in answers:
                if isinstance(answer, EnvDescription):
                    self.envs, self.progress = answer, answer.progress
                    return
            if (now := time.monotonic()) - patience > PATIENCE_S:
                patience = now
                logger.warning("no actor is ready after %.0f s. %s", now - began, self.engine.waits_for)

    def begin_from(self, progress: dict[str, Any]) -> None:
        """Begin all actors' episodes from saved env state; call before the first `publish`."""
        self.progress, self._continues = progress, [True] * self.engine.num_actors

    def _begin(self, actor: int) -> None:
        if self._continues[actor]:
            self.engine.begin_from(actor, self.progress)

    def _lose(self, lost: Lost, rollouts: int) -> None:
        """Count and report a lost actor and its lost rollouts."""
        self._continues[lost.actor] = True
        self._restarts += 1
        self._lost_rollouts += rollouts
        how = "died" if lost.silent_s is None else f"was silent for {lost.silent_s:.0f} s (actors.timeout_s)"
        logger.warning("actor %d %s; restarting it (%d rollouts lost so far)", lost.actor, how, self._lost_rollouts)

    @abstractmethod
    def publish(self, version: int, state: Mapping[str, Tensor]) -> None:
        """Publish weights (host tensors) for the actors' next rollouts."""

    @abstractmethod
    def next(self, timeout_s: float) -> SentRollout | None:
        """Return the oldest rollout, waiting up to `timeout_s`; None on timeout."""

    @abstractmethod
    def release(self, rollout: SentRollout) -> None:
        """Hand the tensors of a copied rollout back to its actor."""

    def numbers(self) -> dict[str, float]:
        """Return metrics since the last call."""
        faults = {"actors/restarts": float(self._restarts), "actors/lost_rollouts": float(self._lost_rollouts)}
        return faults | self.engine.numbers()

    def close(self) -> None:
        """Stop the actors."""
        self.engine.close()


class ActorsRollouts(Rollouts):
    """Rollouts of actors that run the policy with the newest weights at rollout start (with Ray: at request time)."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._asked = [0] * engine.num_actors  # pending rollouts
        self._alive = [False] * engine.num_actors
        self._arrived: deque[SentRollout] = deque()
        self._waited_s = self._worked_s = 0.0

    def publish(self, version: int, state: Mapping[str, Tensor]) -> None:
        self.engine.publish(version, state)
        early, self._early = self._early, []  # with weights, the actors can begin
        for answer in early:
            self._take(answer)

    def next(self, timeout_s: float) -> SentRollout | None:
        if not self._arrived:
            for answer in self.engine.get(timeout_s):
                self._take(answer)
        return self._arrived.popleft() if self._arrived else None

    def release(self, rollout: SentRollout) -> None:
        self.engine.release(rollout)
        self._ask(rollout.actor)

    def _ask(self, actor: int) -> None:
        while self._alive[actor] and self._asked[actor] < IN_FLIGHT:
            self._asked[actor] += 1
            self.engine.ask_for_rollout(actor)

    def _take(self, answer: Answer) -> None:
        actor = answer.actor
        if isinstance(answer, EnvDescription):
            self._alive[actor] = True
            self._begin(actor)
            self._ask(actor)
        elif isinstance(answer, Lost):
            self._lose(answer, min(1, self._asked[actor]))  # at most one of them has begun
            self._asked[actor], self._alive[actor] = 0, False
        elif isinstance(answer, SentRollout):
            self._asked[actor] -= 1
            self._arrived.append(answer)
            self._waited_s, self._worked_s = self._waited_s + answer.waited_s, self._worked_s + answer.worked_s
            self.progress = answer.progress or self.progress

    def numbers(self) -> dict[str, float]:
        total = self._waited_s + self._worked_s
        wait = self._waited_s / total if total else 0.0
        self._waited_s = self._worked_s = 0.0
        alive, active = float(sum(self._alive)), float(self.engine.num_actors)
        return super().numbers() | {"actors/alive": alive, "actors/active": active, "actors/wait": wait}


class RemoteEnvs(Environment):
    """Description of all actors' envs for the learner; `num_envs` is `per_actor` x rollouts per batch."""

    resumable = False
    physics_evaluations = 0  # none on the learner's device

    def __init__(self, rollouts: Rollouts, *, num_envs: int, per_actor: int, threads: int) -> None:
        self.num_envs, self.num_threads, self.device = num_envs, threads, torch.device("cpu")
        self._rollouts, self._per_actor, envs = rollouts, per_actor, rollouts.envs
        self.obs_sizes, self.images, self.action_space = dict(envs.obs_sizes), dict(envs.images), envs.action_space
        self.num_actions, self.summary = envs.action_space.size, envs.summary
        self.max_episode_length = envs.max_episode_length
        self.steps_between_truncations = envs.steps_between_truncations

    def reset(self) -> Observation:
        numbers = {group: torch.zeros(self._per_actor, size) for group, size in self.obs_sizes.items()}
        images = {g: torch.zeros(self._per_actor, *x, dtype=torch.uint8) for g, x in self.images.items()}
        return numbers | images  # only the shapes are used

    def step(self, action: Tensor) -> Step:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        return self._rollouts.progress

    def begin_from(self, state: dict[str, Any]) -> Observation:
        self._rollouts.begin_from(state)
        return self.reset()

    def close(self) -> None:
        self._rollouts.close()


class InFlight:
    """Non-blocking copies of weights and rollouts between the learner's device and the host."""

    def __init__(self, rollouts: Rollouts, device: torch.device) -> None:
        self._rollouts, self._device, self._cuda = rollouts, device, device.type == "cuda"
        self._pinned: dict[str, Tensor] = {}
        self._leaving: tuple[torch.cuda.Event, int] | None = None  # weights, and their version
        self._arriving: deque[tuple[torch.cuda.Event, SentRollout]] = deque()

    def publish(self, version: int, state: Mapping[str, Tensor]) -> None:
        """Publish weights: immediately on a CPU, else by `poll` once they are on the host."""
        if not self._cuda:
            self._rollouts.publish(version, state)
            return
        first = not self._pinned
        if first:
            self._pinned = {name: torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for name, x in state.items()}
        if self._leaving is not None:  # the host may be one update ahead
            self._leaving[0].synchronize()
            self.poll()
        for name, x in state.items():
            self._pinned[name].copy_(x, non_blocking=True)
        self._leaving = (self._event(), version)
        if first:  # the actors wait for the first weights
            self._leaving[0].synchronize()
        self.poll()

    def release(self, rollout: SentRollout) -> None:
        """Release a rollout once it is copied."""
        if self._cuda:
            self._arriving.append((self._event(), rollout))
        else:
            self._rollouts.release(rollout)

    def poll(self) -> bool:
        """Handle finished copies; return whether others are under way."""
        if self._leaving is not None and self._leaving[0].query():
            (_, version), self._leaving = self._leaving, None
            self._rollouts.publish(version, self._pinned)
        while self._arriving and self._arriving[0][0].query():
            self._rollouts.release(self._arriving.popleft()[1])
        return self._leaving is not None or bool(self._arriving)

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event


class ActorsCollector(Collector):
    """Collector of actors' rollouts.

    A batch holds `actors.rollouts` rollouts of whichever actors finish first. Rollouts that are too old are dropped.
    """

    def __init__(self, start: RunStart, rollouts: Rollouts) -> None:
        cfg = start.cfg
        self.num_actors, self._rollouts = rollouts.engine.num_actors, rollouts
        self._num_rollouts = cfg.actors.rollouts or max(1, self.num_actors // 2)
        self._in_flight = InFlight(rollouts, start.device)
        self._version = 0  # updates since the start of this process
        self._lags: list[int] = []  # in this log interval
        self._dropped = 0
        columns = cfg.num_envs * self._num_rollouts
        env = RemoteEnvs(rollouts, num_envs=columns, per_actor=cfg.num_envs, threads=cfg.actors.threads)
        obs = {group: value.to(start.device) for group, value in env.reset().items()}
        spec = env_spec(start, env)
        longest = min(spec.max_episode_length, cfg.algorithm.horizon)  # the next rollout may be another actor's
        algorithm = make_algorithm(start, dataclasses.replace(spec, max_episode_length=longest))
        self._remote = remote_of(algorithm)
        use_cpus(start, columns)
        super().__init__(start, env, algorithm, obs)

    def collect(self, pause: Pause = ignore_pause) -> None:
        """Collect the rollouts of an update; call `pause` while waiting."""
        with self.timer("actors"):
            self._in_flight.publish(self._version, self._remote.acting_state())
            for number in range(self._num_rollouts):
                self._take(self._next(number, pause), number * self._cfg.num_envs)
            self._remote.end_receiving()

    def update(self) -> None:
        super().update()
        self._version += 1

    def _next(self, number: int, pause: Pause) -> SentRollout:
        """Wait for and return a rollout within the maximum policy lag; drop older rollouts."""
        waiting_since = time.monotonic()
        while True:
            rollout = self._rollouts.next(COPYING_S if self._in_flight.poll() else POLL_S)
            pause(f"rollout {number + 1}/{self._num_rollouts}")
            if rollout is None:
                if time.monotonic() - waiting_since > PATIENCE_S:
                    waiting_since = time.monotonic()
                    logger.warning("no rollout from any actor for %.0f s", PATIENCE_S)
                continue
            lag = self._version - rollout.version
            if lag <= self._remote.max_policy_lag:
                self._lags.append(lag)
                return rollout
            self._dropped += 1
            self.metrics.add(rollout.taken)
            self._rollouts.release(rollout)

    def _take(self, rollout: SentRollout, first: int) -> None:
        self._remote.receive(slice(first, first + self._cfg.num_envs), rollout.tensors)
        self.metrics.add(rollout.taken)
        self._in_flight.release(rollout)

    def numbers(self) -> Row:
        lags, dropped = self._lags, self._dropped
        self._lags, self._dropped = [], 0
        policy = {"lag_min": min(lags), "lag_mean": sum(lags) / len(lags), "lag_max": max(lags)}
        policy["dropped"] = dropped / (dropped + len(lags))
        return {f"policy/{name}": value for name, value in policy.items()} | self._rollouts.numbers()
