"""What a memory has recorded, by the names that errors have for it."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor


class RecordedTensor(NamedTuple):
    """A tensor from the task that a memory holds."""

    name: str
    """In words: `an observation`."""
    value: Tensor
    axes: tuple[str, ...]
    """What each dimension counts: step, env, column; empty for what a user cannot name."""
    group: str = ""
    """Observation group."""


@runtime_checkable
class Recorder(Protocol):
    """A memory that can be searched for what is not finite: an attribute of an algorithm."""

    def recorded(self, steps: int) -> list[RecordedTensor]:
        """Observations and rewards of the newest control steps.

        Args:
            steps: Number of control steps.
        """
        ...
