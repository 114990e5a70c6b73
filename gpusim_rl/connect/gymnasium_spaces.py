"""The observation and action spaces of an environment, as Gymnasium spaces."""

from __future__ import annotations

import numpy as np
from gymnasium.spaces import Box

from gpusim_rl.env import VecEnv
from gpusim_rl.errors import ConfigError
from gpusim_rl.spaces import MultiDiscrete


def observation_space(env: VecEnv, group: str = "policy") -> Box:
    """Returns the space of one observation group of one env, shape [size]; call it after the first reset."""
    limit = np.inf if env.cfg.clip_observations is None else env.cfg.clip_observations
    return Box(-limit, limit, (env.obs_sizes[group],), np.float32)


def action_space(env: VecEnv) -> Box:
    """Returns the space of the actions of one env, shape [num_actions]; the environment clamps to its limits.

    Raises:
        ConfigError: The actions are discrete.
    """
    if isinstance(env.action_space, MultiDiscrete):
        raise ConfigError(
            f"{env.name} has discrete actions, and this adapter knows continuous ones; try python train.py"
        )
    limit = env.cfg.clip_actions
    return Box(-limit, limit, (env.num_actions,), np.float32)
