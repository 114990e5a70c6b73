"""Adapter to rl_games."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from rl_games.common import env_configurations, vecenv
from rl_games.common.ivecenv import IVecEnv
from torch import Tensor

from gpusim_rl.connect.gymnasium_spaces import action_space, observation_space
from gpusim_rl.env import VecEnv

Obs = Float[Tensor, "envs obs"] | dict[str, Tensor]


class RlGamesEnv(IVecEnv):
    """One of our environments as rl_games' `IVecEnv`; a `critic` group becomes the states for `central_value_config`.

    `value_bootstrap` (on by default) bootstraps truncated episodes from the observation before the last step.
    If the task's `clip_actions` is not 1, set `clip_actions: False` in rl_games, which would otherwise scale
    actions from [-1, 1] to that limit. `device` is the learning device. The adapter resets `env`.
    """

    def __init__(self, env: VecEnv, *, device: torch.device | None = None) -> None:
        self.env = env
        self.device = env.device if device is None else device
        env.reset()

    def get_env_info(self) -> dict[str, Any]:  # type: ignore[override]
        """Return the spaces of one env, the number of agents and the value size."""
        return {
            "observation_space": observation_space(self.env),
            "action_space": action_space(self.env),
            "state_space": observation_space(self.env, "critic") if "critic" in self.env.obs_sizes else None,
            "agents": self.get_number_of_agents(),
            "value_size": 1,
        }

    def reset(self) -> Obs:
        """Reset all envs; return observations [num_envs, size], or `obs` and `states` with a `critic` group."""
        return self._observation(self.env.reset())

    def step(self, actions: Float[Tensor, "envs actions"]) -> tuple[Obs, Tensor, Tensor, dict[str, Tensor]]:
        """Advance all envs by one control step; return observations, rewards, dones and infos with `time_outs`."""
        step = self.env.step(actions.to(self.env.device))
        infos = {"time_outs": (step.truncated | step.diverged).to(self.device)}
        return self._observation(step.obs), step.reward.to(self.device), step.done.to(self.device), infos

    def _observation(self, obs: dict[str, Tensor]) -> Obs:
        policy = obs["policy"].to(self.device)
        return {"obs": policy, "states": obs["critic"].to(self.device)} if "critic" in obs else policy


def register(env: VecEnv, name: str = "gpusim_rl", *, device: torch.device | None = None) -> RlGamesEnv:
    """Register an environment as `config.env_name: <name>`; `config.num_actors` must equal its number of envs."""
    adapter = RlGamesEnv(env, device=device)
    vecenv.register(name, lambda config_name, num_actors, **kwargs: adapter)
    env_configurations.register(name, {"vecenv_type": name, "env_creator": lambda **kwargs: adapter})
    return adapter
