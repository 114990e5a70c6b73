"""Adapter to skrl."""

from __future__ import annotations

from typing import Any

import torch
from gymnasium.spaces import Box
from jaxtyping import Float
from skrl import config
from skrl.agents.torch.ppo import PPO
from skrl.envs.wrappers.torch import Wrapper
from torch import Tensor

from gpusim_rl.connect.gymnasium_spaces import action_space, observation_space
from gpusim_rl.env import VecEnv


class SkrlEnv(Wrapper):
    """One of our environments as skrl's `Wrapper`; a `critic` group becomes skrl's states.

    The envs are reset only at construction, not by `reset()`. With `time_limit_bootstrap=True`, skrl's
    PPO bootstraps a truncated episode from the next episode's first observation; `FinalObsPPO` uses the true last one.
    With False (skrl's default), advantages leak between episodes. `device` is the learning device.
    """

    def __init__(self, env: VecEnv, *, device: torch.device | None = None) -> None:
        super().__init__(env)
        self._device = config.torch.parse_device(env.device if device is None else device)
        self._obs = self._moved(env.reset())
        self._spaces = {group: observation_space(env, group) for group in env.obs_sizes}

    @property
    def observation_space(self) -> Box:
        """Observation space of one env."""
        return self._spaces["policy"]

    @property
    def state_space(self) -> Box | None:
        """Space of one env's critic observation; None without a `critic` group."""
        return self._spaces.get("critic")

    @property
    def action_space(self) -> Box:
        """Action space of one env."""
        return action_space(self._env)

    def reset(self) -> tuple[Float[Tensor, "envs obs"], dict[str, Any]]:
        """Return the current observation without resetting the envs."""
        return self._obs["policy"], {}

    def state(self) -> Float[Tensor, "envs states"] | None:
        """Return the critic observation; None without a `critic` group."""
        return self._obs.get("critic")

    @torch.no_grad()
    def step(self, actions: Float[Tensor, "envs actions"]) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Advance all envs by one control step; rewards and flags are [num_envs, 1], and the info has `final_obs`."""
        previous, step = self._obs, self._env.step(actions.to(self._env.device))
        self._obs = self._moved(step.obs)
        diverged = step.diverged.to(self._device)[:, None]
        final_obs = self._moved(step.final_obs)
        final_obs = {group: torch.where(diverged, previous[group], value) for group, value in final_obs.items()}
        truncated = (step.truncated | step.diverged).to(self._device)[:, None]
        reward, terminated = step.reward.to(self._device)[:, None], step.terminated.to(self._device)[:, None]
        return self._obs["policy"], reward, terminated, truncated, {"final_obs": final_obs}

    def render(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing; rendering is not supported."""

    def close(self) -> None:
        """Close the simulator."""
        self._env.close()

    def _moved(self, obs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {group: value.to(self._device) for group, value in obs.items()}


class FinalObsPPO(PPO):
    """skrl's PPO with a time-limit bootstrap from `infos["final_obs"]`; needs `time_limit_bootstrap=True`."""

    def record_transition(self, **transition: Any) -> None:  # type: ignore[override]
        """Record a transition of all envs, with the true last observation of truncated episodes."""
        truncated, final_obs = transition["truncated"], transition["infos"]["final_obs"]
        pairs = {"next_observations": "policy", "next_states": "critic"}
        for name, group in pairs.items():
            if transition[name] is not None:
                transition[name] = torch.where(truncated, final_obs[group], transition[name])
        super().record_transition(**transition)
