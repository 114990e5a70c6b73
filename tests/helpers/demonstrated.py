"""Random demonstrations."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpusim_rl.env.observations import number_names
from gpusim_rl.learn.algorithm import EnvSpec
from gpusim_rl.learn.demonstrations import Demonstrations
from gpusim_rl.spaces import MultiDiscrete


def random_demonstrations(
    env: EnvSpec, episodes: int = 10, length: int = 8, seed: int = 0, **changes: Any
) -> Demonstrations:
    """Return random episodes that end by the time limit; every second one also terminates."""
    rng, steps = np.random.default_rng(seed), episodes * length
    sizes, space = env.obs_sizes, env.action_space
    unnamed = number_names(sizes, {})
    ends = np.arange(1, steps + 1) % length == 0
    action = rng.uniform(-1.0, 1.0, (steps, space.size)).astype(np.float32)
    if isinstance(space, MultiDiscrete):
        action = np.stack([rng.integers(0, count, steps) for count in space.counts], axis=1)

    def numbers(rows: int, size: int) -> np.ndarray:
        return rng.normal(size=(rows, size)).astype(np.float32)

    values = {
        "task": env.task,
        "commit": "",
        "dt": env.dt,
        "episode_length": length,
        "num_envs": 1,
        "obs": {group: numbers(steps, size) for group, size in sizes.items()},
        "final_obs": {group: numbers(episodes, size) for group, size in sizes.items()},
        "obs_names": {group: np.array(env.obs_names.get(group) or unnamed[group]) for group in sizes},
        "action": action,
        "action_names": np.array([f"action[{n}]" for n in range(space.size)]),
        "executed": True,
        "reward": rng.normal(size=steps).astype(np.float32),
        "terminated": ends & (np.arange(steps) // length % 2 == 0),
        "truncated": ends,
        "diverged": np.zeros(steps, dtype=bool),
    }
    return Demonstrations(**{**values, **changes})
