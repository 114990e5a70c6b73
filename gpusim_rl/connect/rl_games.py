"""Our environments for rl_games' runner; docs/connect.md has a script and a yaml that train."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from rl_games.common import env_configurations, vecenv
from rl_games.common.ivecenv import IVecEnv
from torch import Tensor

from gpusim_rl.connect.gymnasium_spaces import action_space, observation_space
from gpusim_rl.env import VecEnv

Obs = Float[Tensor, "envs obs"] | dict[str, Tensor]


class RlGamesEnv(IVecEnv):
    """One of our environments as rl_games' `IVecEnv`.

    If the task has a group `critic`, it becomes rl_games' states, which `central_value_config` uses. With
    `value_bootstrap` (its default) rl_games bootstraps a truncated episode (`infos["time_outs"]`) with the value of the
    observation before the last step; its interface has no place for the last one. If the task's `clip_actions` is not
    1, set rl_games' `clip_actions: False`: otherwise rl_games scales [-1, 1] to the limit. The environment clamps in
    both cases.

    Args:
        env: Environment; it is reset here.
        device: Device on which rl_games learns (its `config.device`); None takes that of the physics.
    """

    def __init__(self, env: VecEnv, *, device: torch.device | None = None) -> None:
        self.env = env
        self.device = env.device if device is None else device
        env.reset()

    def get_env_info(self) -> dict[str, Any]:  # type: ignore[override]
        """Returns the spaces of one env, and the numbers of agents and values."""
        return {
            "observation_space": observation_space(self.env),
            "action_space": action_space(self.env),
            "state_space": observation_space(self.env, "critic") if "critic" in self.env.obs_sizes else None,
            "agents": self.get_number_of_agents(),
            "value_size": 1,
        }

    def reset(self) -> Obs:
        """Resets all envs; returns observations [num_envs, size], with a critic group a dict of `obs` and `states`."""
        return self._observation(self.env.reset())

    def step(
        self, actions: Float[Tensor, "envs actions"]
    ) -> tuple[Obs, Float[Tensor, " envs"], Bool[Tensor, " envs"], dict[str, Tensor]]:
        """Advances all envs by one control step; returns observations as `reset` does, and a dict with `time_outs`."""
        step = self.env.step(actions.to(self.env.device))
        infos = {"time_outs": (step.truncated | step.diverged).to(self.device)}
        return self._observation(step.obs), step.reward.to(self.device), step.done.to(self.device), infos

    def _observation(self, obs: dict[str, Tensor]) -> Obs:
        policy = obs["policy"].to(self.device)
        return {"obs": policy, "states": obs["critic"].to(self.device)} if "critic" in obs else policy


def register(env: VecEnv, name: str = "gpusim_rl", *, device: torch.device | None = None) -> RlGamesEnv:
    """Registers an environment in rl_games, as `config.env_name: <name>`.

    Args:
        env: Environment; `config.num_actors` must be its number of envs.
        name: Name of the environment in rl_games; an earlier one of the same name is replaced.
        device: Device on which rl_games learns, as for `RlGamesEnv`.
    """
    adapter = RlGamesEnv(env, device=device)
    vecenv.register(name, lambda config_name, num_actors, **kwargs: adapter)
    env_configurations.register(name, {"vecenv_type": name, "env_creator": lambda **kwargs: adapter})
    return adapter
