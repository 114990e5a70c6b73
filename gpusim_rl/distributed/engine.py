"""Engine interface: starts actors and delivers their answers."""

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

MOST_DEATHS = 3  # maximum deaths of an actor that has never worked
MOST_DEATHS_PROVEN = 20  # maximum consecutive deaths at startup of an actor that has worked before, if no actor works
NO_ANSWER = "no answer"  # reported as the last output of an actor that hung


@dataclass(frozen=True, slots=True)
class Lost:
    """Loss of an actor that died or hung; the engine restarts it and sends a new description."""

    actor: int
    silent_s: float | None = None  # time without an answer, if the actor hung [s]


Answer = EnvDescription | SentRollout | Stepped | Lost


class Engine(ABC):
    """Pool of concurrent actors, each of which handles its requests in order.

    Every call is non-blocking except `get`, which waits up to its timeout.
    """

    waits_for: str  # reason why actors may not be ready yet

    def __init__(self, num_actors: int, timeout_s: float | None = None) -> None:
        self.num_actors = num_actors
        self._silence = Silence(num_actors, timeout_s)
        self._works = [False] * num_actors  # whether each actor has sent a result since its start
        self._proven = set[int]()  # actors that have ever sent a result
        self._deaths = [0] * num_actors  # consecutive deaths at startup
        self._logged = set[str]()  # templates of actors' warnings

    @abstractmethod
    def start(self) -> None:
        """Start all actors."""

    @abstractmethod
    def publish(self, version: int, state: Mapping[str, Tensor]) -> None:
        """Publish weights (host tensors) for the actors' next rollouts."""

    def ask_for_rollout(self, actor: int) -> None:
        """Request a `SentRollout` from an actor."""
        self._silence.asked(actor)
        self._ask(actor, "rollout", None)

    def ask_for_step(self, actor: int, action: np.ndarray | None) -> None:
        """Request a `Stepped` from an actor: a control step with `action` or, if None, the first observation."""
        self._silence.asked(actor)
        self._ask(actor, "step", action)

    def begin_from(self, actor: int, progress: dict[str, Any]) -> None:
        """Begin an actor's episodes from saved env state (such as curriculum levels)."""
        self._ask(actor, "begin", progress)

    @abstractmethod
    def _ask(self, actor: int, request: str, argument: Any) -> None: ...

    def get(self, timeout_s: float) -> list[Answer]:
        """Return answers, waiting up to `timeout_s` for the first one; replace hung actors.

        Raises actor errors that would recur after a restart.
        """
        return self._get(timeout_s) + [self._replace(actor, silent_s) for actor, silent_s in self._silence.look()]

    @abstractmethod
    def _get(self, timeout_s: float) -> list[Answer]: ...

    @abstractmethod
    def _replace(self, actor: int, silent_s: float | None) -> Lost:
        """Kill and restart an actor that hangs; return the loss."""

    def release(self, rollout: SentRollout) -> None:  # noqa: B027 (optional)
        """Hand the tensors of a copied rollout back to its actor."""

    def numbers(self) -> dict[str, float]:
        """Return metrics by name."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Stop all actors."""

    def _received(self, answer: Answer | Failed) -> Answer:
        """Return an answer after logging its warnings; raise an actor's error."""
        if isinstance(answer, Failed):
            if answer.trace:
                logger.error("%s", answer.trace.rstrip())
            raise answer.error
        if isinstance(answer, EnvDescription):
            self._silence.begins(answer.actor)
        elif isinstance(answer, (SentRollout, Stepped)):
            self._silence.answered(answer.actor)
            for template, text in answer.warnings:
                if template not in self._logged:
                    self._logged.add(template)
                    logger.warning("actor %d: %s", answer.actor, text)
            if isinstance(answer, SentRollout) or answer.step is not None:
                self._works[answer.actor], self._deaths[answer.actor] = True, 0
                self._proven.add(answer.actor)
        return answer

    def _died(self, actor: int, last_words: str, silent_s: float | None = None) -> Lost:
        self._silence.begins(actor)
        self._deaths[actor] += not self._works[actor]
        self._works[actor] = False
        # Preemptible nodes may kill an actor several times, but one that has worked can work again.
        proven, deaths = actor in self._proven, self._deaths[actor]
        if deaths >= (MOST_DEATHS_PROVEN if proven else MOST_DEATHS) and not (proven and any(self._works)):
            when = "in a row at startup, and no actor works any more" if proven else "before doing any work"
            reason = f": {last_words}" if last_words else ""
            raise ConfigError(f"died {deaths} times {when}{reason}", key=f"actor {actor}")
        return Lost(actor, silent_s)
