"""Engine: interface that starts actors and carries their answers, for processes of this machine and for Ray."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from gpusim_rl.distributed.actor import EnvDescription, Failed, SentRollout, Stepped
from gpusim_rl.distributed.silence import Silence
from gpusim_rl.errors import ConfigError

logger = logging.getLogger("gpusim_rl")

MOST_DEATHS = 3
"""Deaths of an actor that has never done anything, after which the run ends."""
MOST_DEATHS_PROVEN = 20
"""Deaths in a row, at its start, of an actor that has worked before, after which the run ends if no actor works."""

NO_ANSWER = "it did not answer"
"""Last words of an actor that hung."""


@dataclass(frozen=True, slots=True)
class Lost:
    """An actor died or hung, and what it was doing is lost. The engine starts it again; then it is described anew."""

    actor: int
    silent_s: float | None = None  # of one that hung [s]


Answer = EnvDescription | SentRollout | Stepped | Lost


class Engine(ABC):
    """Pool of concurrent actors, each of which does what it is asked in order.

    Every call is non-blocking except `get`, which waits up to its timeout.
    """

    waits_for: str
    """Why actors may not be ready yet, in words."""

    def __init__(self, num_actors: int, timeout_s: float | None = None) -> None:
        self.num_actors = num_actors
        self._silence = Silence(num_actors, timeout_s)
        self._works = [False] * num_actors  # it has done something since its start
        self._told = set[str]()  # warnings of actors
        self._proven = set[int]()  # actors that have ever done something
        self._deaths = [0] * num_actors  # at starts in a row

    @abstractmethod
    def start(self) -> None:
        """Starts all actors."""

    @abstractmethod
    def publish(self, version: int, state: Mapping[str, Tensor]) -> None:
        """Makes weights, on the host, known to all actors: their next rollouts are by these."""

    def ask_for_rollout(self, actor: int) -> None:
        """Asks an actor for a `SentRollout`."""
        self._silence.asked(actor)
        self._ask_for_rollout(actor)

    @abstractmethod
    def _ask_for_rollout(self, actor: int) -> None:
        """Sends the request."""

    def ask_for_step(self, actor: int, action: np.ndarray | None) -> None:
        """Asks an actor for a `Stepped`; None asks for the first observation."""
        self._silence.asked(actor)
        self._ask(actor, "step", action)

    def begin_from(self, actor: int, progress: dict[str, Any]) -> None:
        """Lets an actor begin new episodes at the progress of other envs."""
        self._ask(actor, "begin", progress)

    @abstractmethod
    def _ask(self, actor: int, request: str, argument: Any) -> None:
        """Sends a request to an actor."""

    def get(self, timeout_s: float) -> list[Answer]:
        """Returns the answers that have come; waits at most so long for the first one. An actor that hangs is replaced.

        Raises:
            ConfigError: An actor cannot work: an error in its task, say, which would come again.
        """
        return self._get(timeout_s) + [self._replace(actor, silent_s) for actor, silent_s in self._silence.look()]

    @abstractmethod
    def _get(self, timeout_s: float) -> list[Answer]:
        """Does `get`, for the actors that do not hang."""

    @abstractmethod
    def _replace(self, actor: int, silent_s: float) -> Lost:
        """Kills an actor that hangs, and has it started again."""

    def release(self, rollout: SentRollout) -> None:  # noqa: B027 (optional)
        """Lets the actor write the tensors of a rollout again: they have been copied."""

    def numbers(self) -> dict[str, float]:
        """Returns numbers for the log, by name."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Ends all actors."""

    def _received(self, answer: Answer | Failed) -> Answer:
        """Raises what an actor could not do; else notes that the actor works, and passes its warnings on."""
        if isinstance(answer, Failed):
            if answer.trace:
                logger.error("%s", answer.trace.rstrip())
            raise answer.error
        if isinstance(answer, EnvDescription):
            self._silence.begins(answer.actor)
        elif isinstance(answer, (SentRollout, Stepped)):
            self._silence.answered(answer.actor)
            for template, text in answer.warnings:
                if template not in self._told:  # by no other actor either
                    self._told.add(template)
                    logger.warning("actor %d: %s", answer.actor, text)
            if isinstance(answer, SentRollout) or answer.step is not None:
                self._works[answer.actor], self._deaths[answer.actor] = True, 0
                self._proven.add(answer.actor)
        return answer

    def _died(self, actor: int, last_words: str, silent_s: float | None = None) -> Lost:
        self._silence.begins(actor)
        self._deaths[actor] += not self._works[actor]
        self._works[actor] = False
        # Nodes that come and go may take an actor several times. One that has worked can work again.
        proven, deaths = actor in self._proven, self._deaths[actor]
        if deaths >= (MOST_DEATHS_PROVEN if proven else MOST_DEATHS) and not (proven and any(self._works)):
            when = "in a row at its start, and no actor works any more" if proven else "before it had done anything"
            reason = f": {last_words}" if last_words else ""
            raise ConfigError(f"actor {actor} died {deaths} times {when}{reason}")
        return Lost(actor, silent_s)
