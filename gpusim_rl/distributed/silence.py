"""Finds actors that hang: their process is there, and an answer that they owe does not come."""

from __future__ import annotations

import time

PATIENT = 4.0
"""Time that an actor has, as a multiple of the longest of the actors' last answers. Envs may be slow."""
FIRST = 10.0
"""Factor of the time for its envs, and for its first answer after that: kernels are compiled before both."""
LOOK_S = 1.0
"""Time between two looks, at least [s]: answers of steps come by the thousand."""


class Silence:
    """Measures how long each actor owes an answer.

    From one look to the next a quarter of an actor's time passes at most. So a learner that updates for long, or was
    stopped itself, takes nobody for hung whose answer may be there already. `timeout_s` is the least time
    that an actor has; None for ever [s].
    """

    def __init__(self, num_actors: int, timeout_s: float | None) -> None:
        self._timeout_s, self._looked = timeout_s, time.monotonic()
        self._owed = [0] * num_actors
        self._silent_s = [0.0] * num_actors
        self._first = [True] * num_actors
        self._took_s = [0.0] * num_actors  # the last answer; a long one counts for some more

    def begins(self, actor: int) -> None:
        """Notes that an actor is started again, or has made its envs: it owes nothing, and a first answer follows."""
        self._owed[actor], self._silent_s[actor], self._first[actor] = 0, 0.0, True

    def asked(self, actor: int) -> None:
        """Notes that an actor owes one more answer."""
        self._owed[actor] += 1

    def answered(self, actor: int) -> None:
        """Notes an answer."""
        self._took_s[actor] = max(self._silent_s[actor], self._took_s[actor] / 2)  # the first one has compiled
        self._owed[actor], self._silent_s[actor], self._first[actor] = self._owed[actor] - 1, 0.0, False

    def look(self) -> list[tuple[int, float]]:
        """Returns actors that hang, and how long they were silent [s]; all that has come must have been read."""
        now = time.monotonic()
        if self._timeout_s is None or now - self._looked < min(LOOK_S, self._timeout_s / PATIENT):
            return []
        passed_s, self._looked = now - self._looked, now
        limit_s, hung = max(self._timeout_s, PATIENT * max(self._took_s)), []
        for actor, owed in enumerate(self._owed):
            if owed:
                has_s = limit_s * (FIRST if self._first[actor] else 1.0)
                self._silent_s[actor] += min(passed_s, limit_s / PATIENT)
                if self._silent_s[actor] >= has_s:
                    hung.append((actor, self._silent_s[actor]))
        return hung
