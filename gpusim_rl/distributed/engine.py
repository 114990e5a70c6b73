"""Engines start actors and carry their answers: an interface for processes of this machine, and for Ray."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from gpusim_rl.distributed.actor import EnvDescription, Failed, SentRollout, Stepped
from gpusim_rl.errors import ConfigError

logger = logging.getLogger("gpusim_rl")

MOST_DEATHS = 3
"""Deaths in a row of an actor that has not done anything, at most."""


@dataclass(frozen=True, slots=True)
class Lost:
    """An actor died, and what it was doing is lost. The engine starts it again; then it is described anew."""

    actor: int


Answer = EnvDescription | SentRollout | Stepped | Lost


class Engine(ABC):
    """Actors that work beside each other. No call waits for one of them, except `get` up to its timeout.

    An actor does what it is asked in order.
    """

    waits_for: str
    """Why actors may not be ready yet, in words."""

    def __init__(self, num_actors: int) -> None:
        self.num_actors = num_actors
        self._deaths = [0] * num_actors

    @abstractmethod
    def start(self) -> None:
        """Starts all actors."""

    @abstractmethod
    def publish(self, version: int, state: Mapping[str, Tensor]) -> None:
        """Makes weights, on the host, known to all actors: their next rollouts are by these."""

    @abstractmethod
    def ask_for_rollout(self, actor: int) -> None:
        """Asks an actor for a `SentRollout`."""

    def ask_for_step(self, actor: int, action: np.ndarray | None) -> None:
        """Asks an actor for a `Stepped`; None asks for the first observation."""
        self._ask(actor, "step", action)

    def begin_from(self, actor: int, progress: dict[str, Any]) -> None:
        """Lets an actor begin new episodes at the progress of other envs."""
        self._ask(actor, "begin", progress)

    @abstractmethod
    def _ask(self, actor: int, request: str, argument: Any) -> None:
        """Sends a request to an actor."""

    @abstractmethod
    def get(self, timeout_s: float) -> list[Answer]:
        """Returns the answers that have come; waits at most so long for the first one.

        Raises:
            ConfigError: An actor cannot work: an error in its task, say, which would come again.
        """

    def release(self, rollout: SentRollout) -> None:  # noqa: B027 (optional)
        """Lets the actor write the tensors of a rollout again: they have been copied."""

    def numbers(self) -> dict[str, float]:
        """Returns numbers for the log, by name."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Ends all actors."""

    def _received(self, answer: Answer | Failed) -> Answer:
        """Raises what an actor could not do; else notes that the actor works."""
        if isinstance(answer, Failed):
            if answer.trace:
                logger.error("%s", answer.trace.rstrip())
            raise answer.error
        if isinstance(answer, SentRollout) or (isinstance(answer, Stepped) and answer.step is not None):
            self._deaths[answer.actor] = 0
        return answer

    def _died(self, actor: int, last_words: str) -> Lost:
        self._deaths[actor] += 1
        if self._deaths[actor] >= MOST_DEATHS:
            reason = f": {last_words}" if last_words else ""
            raise ConfigError(f"actor {actor} died {MOST_DEATHS} times before it had done anything{reason}")
        return Lost(actor)
