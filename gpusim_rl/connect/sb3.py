"""Our environments for Stable-Baselines3; docs/connect.md has a script that trains."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from stable_baselines3.common.vec_env import VecEnv as Sb3VecEnv

from gpusim_rl.connect.gymnasium_spaces import action_space, observation_space
from gpusim_rl.env import VecEnv

Indices = int | Iterable[int] | None


class Sb3Env(Sb3VecEnv):
    """One of our environments as Stable-Baselines3's `VecEnv`: numpy in and out.

    SB3 takes one `info` dict per env. While an episode runs it is empty; at the end of an episode it has

    - `terminal_observation`: the last observation, before the reset; if the env diverged, the last one before that;
    - `TimeLimit.truncated`: the next state has the value of that observation;
    - `episode`: return `r` (not scaled), length `l` [control steps] and time `t` [s], as from a `Monitor`; only for
      complete episodes, which neither had a staggered start nor diverged.

    SB3's critic has no observations of its own: it sees the group `policy` only.

    Args:
        env: Environment; it is reset here.
        reward_scale: Factor on rewards, as `ppo.reward_scale`; SB3 has no such setting.
    """

    def __init__(self, env: VecEnv, *, reward_scale: float = 1.0) -> None:
        self.env = env
        self.reward_scale = reward_scale
        self._last = env.reset()["policy"]
        self._actions = torch.zeros(env.num_envs, env.num_actions, device=env.device)
        super().__init__(env.num_envs, observation_space(env), action_space(env))
        self._begin_episodes()

    def _begin_episodes(self) -> None:
        self._returns = np.zeros(self.num_envs)
        self._lengths = np.zeros(self.num_envs, dtype=np.int64)
        self._began_s = time.perf_counter()

    def reset(self) -> np.ndarray:
        """Resets all envs; returns the observation, shape [num_envs, size]."""
        if self._seeds[0] is not None:
            self.env.seed(self._seeds[0])
            self._reset_seeds()
        self._last = self.env.reset()["policy"]
        self._begin_episodes()
        return self._last.cpu().numpy()

    def step_async(self, actions: np.ndarray) -> None:
        """Keeps the actions of the next step, shape [num_envs, num_actions]."""
        self._actions = torch.as_tensor(actions, dtype=torch.float32).to(self.env.device)

    @torch.no_grad()
    def step_wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        """Advances all envs by one control step.

        Returns:
            Observation [num_envs, size], rewards [num_envs], dones [num_envs], and one info dict for each env.
        """
        previous, step = self._last, self.env.step(self._actions)
        self._last = step.obs["policy"]
        # One copy to the host for all that is one number per env.
        packed = torch.stack([step.reward, *(m.float() for m in (step.done, step.terminated, step.incomplete))])
        reward, *masks = packed.cpu().numpy()
        done, terminated, incomplete = (mask.astype(bool) for mask in masks)
        self._returns += reward
        self._lengths += 1
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        if done.any():
            final_obs = torch.where(step.diverged[:, None], previous, step.final_obs["policy"]).cpu().numpy()
            elapsed_s = round(time.perf_counter() - self._began_s, 6)
            for env in np.flatnonzero(done):
                infos[env] = {"terminal_observation": final_obs[env], "TimeLimit.truncated": not terminated[env]}
                if not incomplete[env]:
                    episode = {"r": float(self._returns[env]), "l": int(self._lengths[env]), "t": elapsed_s}
                    infos[env]["episode"] = episode
            self._returns[done] = 0.0
            self._lengths[done] = 0
        return self._last.cpu().numpy(), reward * np.float32(self.reward_scale), done, infos

    def close(self) -> None:
        """Frees the simulator."""
        self.env.close()

    def get_attr(self, attr_name: str, indices: Indices = None) -> list[Any]:
        """Returns an attribute of the environment, once per env; all envs share it."""
        value = None if attr_name == "render_mode" else getattr(self.env, attr_name)
        return [value for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: Indices = None) -> None:
        """Sets an attribute of the environment, for all envs."""
        setattr(self.env, attr_name, value)

    def env_method(
        self, method_name: str, *method_args: Any, indices: Indices = None, **method_kwargs: Any
    ) -> list[Any]:
        """Calls a method of the environment once; returns its result once per env."""
        result = getattr(self.env, method_name)(*method_args, **method_kwargs)
        return [result for _ in self._get_indices(indices)]

    def env_is_wrapped(self, wrapper_class: type, indices: Indices = None) -> list[bool]:
        """Returns False for every env; returns of episodes need no `Monitor` here."""
        return [False for _ in self._get_indices(indices)]
