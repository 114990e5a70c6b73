"""Adapter to rsl_rl."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from rsl_rl.env import VecEnv as RslRlVecEnv
from tensordict import TensorDict
from torch import Tensor

from gpusim_rl.connect.gymnasium_spaces import action_space
from gpusim_rl.env import VecEnv


class RslRlEnv(RslRlVecEnv):
    """One of our environments as rsl_rl's `VecEnv`; observation groups keep their names for `obs_groups`.

    rsl_rl bootstraps truncated episodes (`extras["time_outs"]`) from the observation before the last step.
    `reward_scale` also scales the returns that rsl_rl logs. The adapter resets `env`.
    """

    def __init__(self, env: VecEnv, *, reward_scale: float = 1.0) -> None:
        action_space(env)  # raises for discrete actions
        self.env = env
        self.reward_scale = reward_scale
        self.num_envs = env.num_envs
        self.num_actions = env.num_actions
        self.max_episode_length = env.max_episode_length
        self.device = env.device
        self.cfg = env.cfg
        self._obs = env.reset()

    @property
    def episode_length_buf(self) -> Int[Tensor, " envs"]:
        """Control steps since the start of each episode, int64 [num_envs]."""
        return self.env.progress

    @episode_length_buf.setter
    def episode_length_buf(self, steps: Int[Tensor, " envs"]) -> None:  # type: ignore[override]
        self.env.progress.copy_(steps)
        self.env.staggered.fill_(True)  # these episodes are incomplete

    def get_observations(self) -> TensorDict:
        """Return the observation groups to act on, [num_envs, size] each."""
        return TensorDict(dict(self._obs), batch_size=[self.num_envs])

    def step(self, actions: Float[Tensor, "envs actions"]) -> tuple[TensorDict, Tensor, Tensor, dict[str, Any]]:
        """Advance all envs by one control step; return observations, rewards, dones and extras with `time_outs`."""
        with torch.no_grad():
            step = self.env.step(actions)
        self._obs = step.obs
        extras = {"time_outs": step.truncated | step.diverged}
        return self.get_observations(), step.reward * self.reward_scale, step.done, extras
