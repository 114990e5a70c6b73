"""Detection of hung actors, which are alive but owe an answer."""

from __future__ import annotations

import time

PATIENT = 4.0  # time limit, as a multiple of the slowest actor's last response time
FIRST = 10.0  # factor on the time limit for creating envs and the first answer, which compile kernels
LOOK_S = 1.0  # minimum interval between checks [s]


class Silence:
    """Time for which each actor has owed an answer; `timeout_s` is the minimum time limit [s]; None: no limit.

    Each check adds at most a quarter of the limit: a learner that was busy or stopped must not mistake an unread
    answer for a hung actor.
    """

    def __init__(self, num_actors: int, timeout_s: float | None) -> None:
        self._timeout_s, self._looked = timeout_s, time.monotonic()
        self._owed = [0] * num_actors
        self._silent_s = [0.0] * num_actors
        self._first = [True] * num_actors
        self._took_s = [0.0] * num_actors  # duration of the last answer; long ones decay

    def begins(self, actor: int) -> None:
        """Reset the state of an actor that was restarted or has created its envs."""
        self._owed[actor], self._silent_s[actor], self._first[actor] = 0, 0.0, True

    def asked(self, actor: int) -> None:
        """Count one more owed answer."""
        self._owed[actor] += 1

    def answered(self, actor: int) -> None:
        """Record an answer."""
        self._took_s[actor] = max(self._silent_s[actor], self._took_s[actor] / 2)  # the first one compiles
        self._owed[actor], self._silent_s[actor], self._first[actor] = self._owed[actor] - 1, 0.0, False

    def look(self) -> list[tuple[int, float]]:
        """Return hung actors and how long they were silent [s]; call after reading all answers."""
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
