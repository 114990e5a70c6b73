"""What starts actors and carries their answers: the same for processes of this machine and for Ray."""

from __future__ import annotations

import logging
import traceback
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from gpusim_rl.distributed.actor import EnvDescription, RolloutInfo
from gpusim_rl.errors import ConfigError, TaskError

logger = logging.getLogger("gpusim_rl")

MOST_DEATHS = 3
"""In a row, before an actor has answered anything."""


@dataclass(frozen=True, slots=True)
class Described:
    """An actor is ready, also after it was started again."""

    actor: int
    envs: EnvDescription


@dataclass(frozen=True, slots=True)
class SentRollout:
    """A rollout for the learner. Its tensors are good until it is released."""

    actor: int
    tensors: Sequence[Tensor]
    info: RolloutInfo
    place: Any
    """What is needed to release them."""


@dataclass(frozen=True, slots=True)
class Stepped:
    """Envs for which the learner acts: their first observation, or a control step."""

    actor: int
    obs: dict[str, np.ndarray] | None
    step: dict[str, Any] | None = None
    progress: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Lost:
    """An actor died, and what it was doing is lost. The engine starts it again; then it is `Described` anew."""

    actor: int


Answer = Described | SentRollout | Stepped | Lost


class Engine(ABC):
    """Actors that work beside each other. No call waits for one of them, except `get` for as long as it is told.

    An actor does what it is asked in order.
    """

    name: str
    """As in `actors=<name>`."""
    waits_for: str
    """What it may be that actors are not ready, in words."""

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
        """Asks for a `SentRollout`."""

    @abstractmethod
    def ask_for_step(self, actor: int, action: np.ndarray | None) -> None:
        """Asks for a `Stepped`; None asks for the first observation."""

    @abstractmethod
    def begin_from(self, actor: int, progress: dict[str, Any]) -> None:
        """Lets an actor begin new episodes where other envs had come."""

    @abstractmethod
    def get(self, timeout_s: float) -> list[Answer]:
        """What has come; waits at most so long for the first answer.

        Raises:
            ConfigError: An actor cannot work: an error in its task, say, which would come again.
        """

    def release(self, rollout: SentRollout) -> None:  # noqa: B027 (optional)
        """The tensors of a rollout have been copied."""

    def numbers(self) -> dict[str, float]:
        """For the log, by name."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Ends all actors."""

    def _answered(self, actor: int) -> None:
        self._deaths[actor] = 0

    def _died(self, actor: int, last_words: str) -> Lost:
        self._deaths[actor] += 1
        if self._deaths[actor] >= MOST_DEATHS:
            said = f": {last_words}" if last_words else ""
            raise ConfigError(f"actor {actor} died {MOST_DEATHS} times before it had done anything{said}")
        return Lost(actor)


def describe_error(error: BaseException) -> tuple[str, str, str]:
    """Kind, text and traceback of an error in an actor, for the learner."""
    if isinstance(error, (ConfigError, TaskError)):
        return type(error).__name__, str(error), ""
    text = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
    return "", text, "".join(traceback.format_exception(error))


def raise_error(actor: int, kind: str, text: str, trace: str) -> None:
    """Raises what `describe_error` has told; shows the traceback first."""
    if kind:
        raise {"ConfigError": ConfigError, "TaskError": TaskError}[kind](text)
    logger.error("%s", trace.rstrip())
    raise ConfigError(f"actor {actor}: {text}")
