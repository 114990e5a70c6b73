"""Envs in processes of their own, in a process of pytest that had simulators."""

from __future__ import annotations

import gc
from typing import Any

from gymnasium.vector import AsyncVectorEnv


def async_envs(makers: Any, **options: Any) -> AsyncVectorEnv:
    """Make the envs; a simulator that a child collects as garbage would wait for threads that only the parent has."""
    gc.collect()
    return AsyncVectorEnv(makers, **options)
