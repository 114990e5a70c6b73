"""Action spaces, image shapes, maps of actions and observations. Algorithms read them; no torch is needed here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Box:
    """Continuous actions: `size` numbers for each env, nominally in [-1, 1].

    The numbers are not limited here: envs clamp them, so an algorithm may sample beyond the limit. Each task
    scales its actions to forces, torques or targets by itself.
    """

    size: int
    """Numbers in the action vector of one env."""
    limit: float | None = None
    """Limit that envs clamp them to, `clip_actions` of a task's settings (1 in most tasks); None where unknown."""
    bounds: tuple[tuple[float, float], ...] | None = None
    """Lower and upper bound of each number of another library's own action; None for actions of our tasks."""


@dataclass(frozen=True, slots=True)
class MultiDiscrete:
    """One choice or several, independent of each other: `size` indices for each env, int64."""

    counts: tuple[int, ...]
    """Options of each choice: the k-th index is in [0, counts[k])."""

    @property
    def size(self) -> int:
        """Numbers in the action vector of one env."""
        return len(self.counts)


ActionSpace = Box | MultiDiscrete

ImageShape = tuple[int, int, int]
"""Height, width and channels of an image."""


class SignedPermutation(NamedTuple):
    """A map of vectors: number i of the result is `signs[i]` times number `sources[i]` of the vector."""

    sources: list[int]
    signs: list[float]
    terms: list[tuple[int, int, float]] = []  # noqa: RUF012  it is never changed
    """Row, source and factor of what is added: numbers of the vector, each times its factor."""
