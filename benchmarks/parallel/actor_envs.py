"""Dummy envs with a configurable step time, for benchmarks/parallel/actors.py."""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box

OBS, ACTIONS, EPISODE = 16, 2, 1000


class TimedEnv(gymnasium.Env[np.ndarray, np.ndarray]):
    """Dummy env whose step takes a given time.

    Args:
        wait_ms: Sleep per step [ms], like an env that waits for a robot, a browser or a server.
        spin_ms: Busy loop per step [ms of CPU time].
        obs: Size of an observation.
    """

    def __init__(self, wait_ms: float = 0.0, spin_ms: float = 0.0, obs: int = OBS) -> None:
        self.observation_space = Box(-1.0, 1.0, (obs,), np.float32)
        self.action_space = Box(-1.0, 1.0, (ACTIONS,), np.float32)
        self._wait_s, self._spin_s = wait_ms / 1e3, spin_ms / 1e3
        self._obs = np.zeros(obs, np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Return the constant observation."""
        return self._obs, {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Sleep or compute; return the constant observation and a reward of 1."""
        if self._wait_s:
            time.sleep(self._wait_s)
        until = time.thread_time() + self._spin_s
        while time.thread_time() < until:
            pass
        return self._obs, 1.0, False, False, {}


def make(num_envs: int, **kwargs: Any) -> gymnasium.vector.VectorEnv:
    """Make `num_envs` envs that step one at a time; use as `env._target_=actor_envs.make`."""
    one = lambda: gymnasium.wrappers.TimeLimit(TimedEnv(**kwargs), EPISODE)  # noqa: E731
    return gymnasium.vector.SyncVectorEnv([one] * num_envs)
