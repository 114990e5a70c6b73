"""Gymnasium envs for the tests of `connect`."""

from __future__ import annotations

import gc
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv

BOX = gym.spaces.Box(-9.0, 9.0, (2,), np.float32)
LENGTH = 3


def async_envs(makers: Any, **options: Any) -> AsyncVectorEnv:
    """Build async envs; a simulator garbage-collected in a child would wait for the parent's threads."""
    gc.collect()
    return AsyncVectorEnv(makers, **options)


class Fake(gym.Env):
    """Env that counts its steps and ends at the third; results are overridden by values or functions of the env."""

    def __init__(self, **changes: Any) -> None:
        self._changes = changes
        self.observation_space = changes.get("space", BOX)
        self.action_space = changes.get("action_space", gym.spaces.Discrete(2))
        self._buffer = np.zeros(2, np.float32)
        self._t = 0

    def _get(self, name: str, default: Any) -> Any:
        made = self._changes.get(name, default)
        return made(self) if callable(made) else made

    @property
    def count(self) -> int:
        return self._t

    def filled(self) -> np.ndarray:
        self._buffer[:] = self._t
        return self._buffer

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self._t = 0
        return self._get("reset", (self._get("obs", lambda env: np.full(2, env.count, np.float32)), {}))

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        self.action, self._t = action, self._t + 1
        ended = self._t == LENGTH
        obs = self._get("obs", lambda env: np.full(2, env.count, np.float32))
        reward, info = self._get("reward", float(self._t)), self._get("info", {})
        return self._get("step", (obs, reward, self._changes.get("flag", bool)(ended), False, info))
