"""The observation and action spaces of an environment, as Gymnasium spaces."""

from __future__ import annotations

import numpy as np
from gymnasium.spaces import Box

from gpusim_rl.env import VecEnv


def observation_space(env: VecEnv, group: str = "policy") -> Box:
    """Returns the space of one observation group of one env, shape [size]; call it after the first reset."""
    limit = np.inf if env.cfg.clip_observations is None else env.cfg.clip_observations
    return Box(-limit, limit, (env.obs_sizes[group],), np.float32)


def action_space(env: VecEnv) -> Box:
    """Returns the space of the actions of one env, shape [num_actions]; the environment clamps to its limits."""
    limit = env.cfg.clip_actions
    return Box(-limit, limit, (env.num_actions,), np.float32)
