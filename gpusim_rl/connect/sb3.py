"""Adapter to Stable-Baselines3."""

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
    """One of our environments as Stable-Baselines3's `VecEnv`: numpy in and out, group `policy` only.

    An env's `info` is empty until its episode ends. Then it contains

    - `terminal_observation`: last observation before the reset; for a diverged env, the previous one;
    - `TimeLimit.truncated`: whether to bootstrap from the value of that observation;
    - `episode`: unscaled return `r`, length `l` [control steps] and time `t` [s], as in SB3's `Monitor`, unless the
      start was staggered or the env diverged.

    The adapter resets `env`.
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
        """Reset all envs; return observations [num_envs, size]."""
        if self._seeds[0] is not None:
            self.env.seed(self._seeds[0])
            self._reset_seeds()
        self._last = self.env.reset()["policy"]
        self._begin_episodes()
        return self._last.cpu().numpy()

    def step_async(self, actions: np.ndarray) -> None:
        """Store the actions of the next step."""
        self._actions = torch.as_tensor(actions, dtype=torch.float32).to(self.env.device)

    @torch.no_grad()
    def step_wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        """Advance all envs by one control step; return observations, rewards, dones and infos."""
        previous, step = self._last, self.env.step(self._actions)
        self._last = step.obs["policy"]
        # A single copy to the host for all per-env scalars.
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
        """Close the simulator."""
        self.env.close()

    def get_attr(self, attr_name: str, indices: Indices = None) -> list[Any]:
        """Return an attribute of the environment, repeated for each env."""
        value = None if attr_name == "render_mode" else getattr(self.env, attr_name)
        return [value for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: Indices = None) -> None:
        """Set an attribute of the environment."""
        setattr(self.env, attr_name, value)

    def env_method(self, method_name: str, *args: Any, indices: Indices = None, **kwargs: Any) -> list[Any]:
        """Call a method of the environment once; return the result, repeated for each env."""
        result = getattr(self.env, method_name)(*args, **kwargs)
        return [result for _ in self._get_indices(indices)]

    def env_is_wrapped(self, wrapper_class: type, indices: Indices = None) -> list[bool]:
        """Return False for every env."""
        return [False for _ in self._get_indices(indices)]
