"""Rollouts that actors record by themselves: the policy is in each of them."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gpusim_rl.distributed.actor import EnvDescription
from gpusim_rl.distributed.engine import Answer, Described, Engine, Lost, SentRollout

logger = logging.getLogger("gpusim_rl")

PATIENCE_S = 30.0
"""For the first actor, or for a rollout, before a message tells that it is waited for [s]."""
IN_FLIGHT = 2
"""Rollouts that an actor is asked for at a time: while the learner takes one over, it records the next one."""


@dataclass(slots=True)
class Faults:
    """What was lost since the run began."""

    restarts: int = 0
    lost_rollouts: int = 0


class Rollouts(ABC):
    """Where the learner gets rollouts from.

    Attributes:
        engine: What has the actors.
        envs: What they step; known after `start`.
        faults: What was lost.
        progress: Newest state of envs that an actor has told (levels of a curriculum, say); known after `start`.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.envs: EnvDescription
        self.faults = Faults()
        self.progress: dict[str, Any] = {}
        self._continues = [False] * engine.num_actors  # the actor begins from `progress`
        self._early: list[Answer] = []  # before the learner asked for rollouts

    def start(self) -> None:
        """Starts the actors, and waits for the first one."""
        self.engine.start()
        began = patience = time.monotonic()
        while True:
            answers = self.engine.get(timeout_s=1.0)
            self._early += answers  # all of them: several actors may be ready at the same moment
            if described := [answer for answer in answers if isinstance(answer, Described)]:
                self.envs, self.progress = described[0].envs, described[0].envs.progress
                return
            if (now := time.monotonic()) - patience > PATIENCE_S:
                patience = now
                logger.warning("no actor is ready after %.0f s. %s", now - began, self.engine.waits_for)

    def begin_from(self, progress: dict[str, Any]) -> None:
        """Lets all actors begin where other envs had come; to be called before the first `publish`."""
        self.progress, self._continues = progress, [True] * self.engine.num_actors

    def _begin(self, actor: int) -> None:
        """An actor is ready."""
        if self._continues[actor]:
            self.engine.begin_from(actor, self.progress)

    def _lose(self, actor: int, rollouts: int) -> None:
        """An actor died, and with it so many rollouts."""
        self._continues[actor] = True  # when it is started again
        self.faults.restarts += 1
        self.faults.lost_rollouts += rollouts
        logger.warning(
            "actor %d died, and is started again; rollouts lost so far: %d", actor, self.faults.lost_rollouts
        )

    @abstractmethod
    def publish(self, version: int, state: Mapping[str, Tensor]) -> None:
        """Lets actors act with other weights from their next rollout on; they must be on the host."""

    @abstractmethod
    def next(self, timeout_s: float) -> SentRollout | None:
        """A rollout that has come; waits for it at most so long."""

    @abstractmethod
    def release(self, rollout: SentRollout) -> None:
        """The tensors of a rollout have been copied."""

    @abstractmethod
    def numbers(self) -> dict[str, float]:
        """For the log, since the last call."""

    def close(self) -> None:
        """Ends the actors."""
        self.engine.close()


class ActorsRollouts(Rollouts):
    """Rollouts that actors record, each with the newest policy: at its begin, with Ray when it is asked for.

    Args:
        engine: What has the actors.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._asked = [0] * engine.num_actors  # rollouts that are not here yet
        self._alive = [False] * engine.num_actors
        self._arrived: deque[SentRollout] = deque()
        self._waited_s = self._worked_s = 0.0

    def publish(self, version: int, state: Mapping[str, Tensor]) -> None:
        """Tells the actors; the first time lets them begin."""
        self.engine.publish(version, state)
        early, self._early = self._early, []
        for answer in early:
            self._take(answer)

    def next(self, timeout_s: float) -> SentRollout | None:
        """A rollout, the oldest one first."""
        if not self._arrived:
            for answer in self.engine.get(timeout_s):
                self._take(answer)
        return self._arrived.popleft() if self._arrived else None

    def release(self, rollout: SentRollout) -> None:
        """Asks the actor for another one."""
        self.engine.release(rollout)
        self._ask(rollout.actor)

    def _ask(self, actor: int) -> None:
        while self._alive[actor] and self._asked[actor] < IN_FLIGHT:
            self._asked[actor] += 1
            self.engine.ask_for_rollout(actor)

    def _take(self, answer: Answer) -> None:
        if isinstance(answer, Described):
            self._alive[answer.actor] = True
            self._begin(answer.actor)
            self._ask(answer.actor)
        elif isinstance(answer, Lost):
            self._lose(answer.actor, min(1, self._asked[answer.actor]))  # the other one has not begun
            self._asked[answer.actor], self._alive[answer.actor] = 0, False
        elif isinstance(answer, SentRollout):
            self._asked[answer.actor] -= 1
            self._arrived.append(answer)
            info = answer.info
            self._waited_s, self._worked_s = self._waited_s + info.waited_s, self._worked_s + info.worked_s
            self.progress = info.progress or self.progress

    def numbers(self) -> dict[str, float]:
        """How many actors work, and for which part of the time they waited."""
        total = self._waited_s + self._worked_s
        wait = self._waited_s / total if total else 0.0
        self._waited_s = self._worked_s = 0.0
        alive = float(sum(self._alive))
        return {"actors/alive": alive, "actors/active": float(self.engine.num_actors), "actors/wait": wait}
