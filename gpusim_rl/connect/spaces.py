"""Gymnasium spaces of an environment."""

from __future__ import annotations

import numpy as np
from gymnasium.spaces import Box

from gpusim_rl.env import VecEnv


def observation_space(env: VecEnv, group: str = "policy") -> Box:
    """Space of one env's observation group, shape [size]; the environment has been reset once."""
    limit = np.inf if env.cfg.clip_observations is None else env.cfg.clip_observations
    return Box(-limit, limit, (env.obs_sizes[group],), np.float32)


def action_space(env: VecEnv) -> Box:
    """Space of one env's action, shape [num_actions]; the environment clips to it."""
    limit = env.cfg.clip_actions
    return Box(-limit, limit, (env.num_actions,), np.float32)
