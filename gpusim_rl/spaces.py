"""Action spaces, image shapes, and linear maps of vectors. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Box:
    """Continuous actions, nominally in [-1, 1]; envs clamp and scale them, so algorithms may sample beyond."""

    size: int
    """Action values per env."""
    limit: float | None = None
    """Clamping limit of the envs, `task.clip_actions`; None if unknown."""
    bounds: tuple[tuple[float, float], ...] | None = None
    """Lower and upper bound of each value for another library's envs; None for our tasks."""


@dataclass(frozen=True, slots=True)
class MultiDiscrete:
    """Independent discrete actions, as int64 indices."""

    counts: tuple[int, ...]
    """Values per action: the k-th index is in [0, counts[k])."""

    @property
    def size(self) -> int:
        """Discrete actions per env."""
        return len(self.counts)


ActionSpace = Box | MultiDiscrete

ImageShape = tuple[int, int, int]
"""Height, width and channels of an image."""


class SignedPermutation(NamedTuple):
    """Linear map of vectors: result[i] = signs[i] * vector[sources[i]]."""

    sources: list[int]
    signs: list[float]
    terms: list[tuple[int, int, float]] = []  # noqa: RUF012  never modified
    """Added terms (row, source, factor): result[row] += factor * vector[source]."""
