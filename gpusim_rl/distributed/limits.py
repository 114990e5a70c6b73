"""Tries numbers of actors and sizes of batches while a run goes on."""

from __future__ import annotations

from dataclasses import dataclass, replace

BETTER = 1.03
"""Least gain in speed, as a factor, for which a change is kept."""
INTERVAL_S = 5.0
"""Time for which limits are measured [s]."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Numbers on which the speed of a run with `actors.inference=learner` depends."""

    actors: int
    """Actors that work; the others wait."""
    batch: int
    """Actors that are answered together, at most."""


class Tuner:
    """Climbs uphill: changes one limit, and keeps the change if the run is faster with it.

    GA3C adapts its numbers of agents, predictors and trainers in the same way (Babaeizadeh et al. 2017, arXiv
    1611.06256, section 4.3). The kept setting is measured again before every try, because a run does not stay equally
    fast.

    Attributes:
        limits: Limits that hold now.
    """

    def __init__(self, limits: Limits, most_actors: int) -> None:
        self.limits = limits
        self._kept, self._kept_speed = limits, 0.0
        self._most = most_actors
        self._tries = False
        self._change = 0  # which one is tried
        self._steps = 0
        self._since: float | None = None

    def observe(self, steps: int, now_s: float) -> Limits:
        """Counts control steps until a time [s], and changes the limits after an interval; returns those that hold."""
        if self._since is None:  # what came so far may be of other limits
            self._since = now_s
            return self.limits
        self._steps += steps
        if now_s - self._since < INTERVAL_S:
            return self.limits
        speed = self._steps / (now_s - self._since)
        self._steps, self._since = 0, None
        if self._tries and speed <= BETTER * self._kept_speed:
            self.limits, self._tries, self._change = self._kept, False, self._change + 1
        else:  # on, in the same direction where a change has just been kept
            self._kept, self._kept_speed, self._tries = self.limits, speed, True
            self.limits = self._changed()
        return self.limits

    def _changed(self) -> Limits:
        """Returns the kept limits with the change that is next in turn, of those that change anything."""
        kept, part = self._kept, max(1, self._kept.actors // 4)
        changes = [
            replace(kept, actors=min(self._most, kept.actors + part)),
            replace(kept, batch=min(kept.actors, 2 * kept.batch)),
            replace(kept, actors=kept.actors - part, batch=min(kept.batch, kept.actors - part)),
            replace(kept, batch=kept.batch // 2),
        ]
        for number in range(self._change, self._change + len(changes)):
            limits = changes[number % len(changes)]
            if limits != kept and min(limits.actors, limits.batch) > 0:
                self._change = number
                return limits
        return kept
