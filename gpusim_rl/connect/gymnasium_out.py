"""Our tasks as Gymnasium environments, numpy in and out.

    import gymnasium as gym
    import gpusim_rl.connect.gymnasium_out  # registers gpusim_rl/<task>-v0

    env = gym.make("gpusim_rl/Cartpole-v0")
    envs = gym.make_vec("gpusim_rl/Ant-v0", num_envs=64)

See docs/connect.md.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.error import ResetNeeded
from gymnasium.spaces import Discrete, MultiDiscrete
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from gpusim_rl import api, spaces
from gpusim_rl.connect.gymnasium_spaces import action_space, observation_space
from gpusim_rl.env import Task, VecEnv
from gpusim_rl.settings.discover import tasks
from gpusim_rl.view.renderer import Renderer, make_renderer

PICTURE = 480  # width and height of rendered images [pixels]
Reset = tuple[np.ndarray, dict[str, Any]]
METADATA = {"render_modes": ["rgb_array"], "render_fps": 60}


class TaskVectorEnv(VectorEnv):
    """Vectorised envs of one task.

    Args:
        task_name: Name or class of a task.
        num_envs: Number of envs.
        autoreset_mode: Gymnasium's autoreset mode.
        render_mode: None or `rgb_array`.
        **settings: Arguments of `gpusim_rl.make_env`; by default, episode starts are not staggered.
    """

    def __init__(
        self,
        task_name: type[Task[Any]] | str,
        num_envs: int = 1,
        *,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        render_mode: str | None = None,
        **settings: Any,
    ) -> None:
        if render_mode not in (None, "rgb_array"):
            raise ValueError(f"render_mode must be None or 'rgb_array', got {render_mode!r}")
        if settings.get("config") is None:
            settings["task"] = {"randomize_episode_start": False, **settings.get("task", {})}
        self.env: VecEnv = api.make_env(task_name, num_envs=num_envs, **settings)
        self.env.reset()
        self.num_envs, self.render_mode, self.spec = num_envs, render_mode, None
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        frames_per_s = round(self.env.cfg.control_hz)
        self.metadata = {**METADATA, "render_fps": frames_per_s, "autoreset_mode": self.autoreset_mode}
        self.single_observation_space = observation_space(self.env)
        self.single_action_space = _action_space(self.env)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._last = np.zeros((num_envs, self.env.obs_sizes["policy"]), np.float32)
        self._ended = np.ones(num_envs, dtype=bool)  # reset() has not been called yet
        self._renderer: Renderer | None = None

    def reset(self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None) -> Reset:
        """Begin an episode in every env, or in those selected by `options["reset_mask"]`, bool [num_envs].

        Of a list of seeds, only the first is used. Returns observations [num_envs, size] and an empty dict.
        """
        seed = seed[0] if isinstance(seed, list) else seed
        if seed is not None:
            self.env.seed(seed)
        where = (options or {}).get("reset_mask", np.ones(self.num_envs, dtype=bool))
        if not isinstance(where, np.ndarray) or where.shape != (self.num_envs,) or where.dtype != bool:
            raise ValueError(f"options['reset_mask'] must be a NumPy bool array of shape ({self.num_envs},)")
        self._begin(where)
        return self._last.copy(), {}

    def _begin(self, where: np.ndarray) -> None:
        obs = self.env.begin_episodes(torch.as_tensor(where, device=self.env.device))["policy"].cpu().numpy()
        self._last[where] = obs[where]
        self._ended[where] = False

    @torch.no_grad()
    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Advance all envs by one control step; raise ResetNeeded if an ended episode was not reset.

        A diverged env is truncated with reward 0 and its previous observation. With `SAME_STEP`, the info has the
        `final_obs` of ended episodes.
        """
        waiting = self._ended.copy()
        if waiting.any() and self.autoreset_mode is not AutoresetMode.NEXT_STEP:
            raise ResetNeeded(f"envs {np.flatnonzero(waiting).tolist()} need reset()")
        dtype = self.env.task.actions.dtype
        action = torch.as_tensor(np.asarray(actions), dtype=dtype).reshape(self.num_envs, -1).to(self.env.device)
        step = self.env.step(action)
        packed = torch.stack([step.reward, *(mask.float() for mask in (step.terminated, step.done, step.diverged))])
        reward, *masks = packed.cpu().numpy()
        terminated, done, diverged = (mask.astype(bool) for mask in masks)
        final = step.final_obs["policy"].cpu().numpy()
        final = np.where(diverged[:, None], self._last, final)
        reward, info = reward.astype(np.float64), {}
        if self.autoreset_mode is AutoresetMode.SAME_STEP:
            self._last = step.obs["policy"].cpu().numpy()
            for env_id in np.flatnonzero(done):
                info = self._add_info(info, {"final_obs": final[env_id], "final_info": {}}, int(env_id))
            return self._last.copy(), reward, terminated, done & ~terminated, info
        self._last, self._ended = final, done
        if waiting.any():  # NEXT_STEP: this step resets them
            self._begin(waiting)
            done = done & ~waiting
            reward[waiting], terminated = 0.0, terminated & ~waiting
            self._ended = done
        return self._last.copy(), reward, terminated, done & ~terminated, info

    def render(self) -> tuple[np.ndarray, ...] | None:
        """Return an image per env, uint8 [480, 480, 3]; None without a `render_mode`."""
        if self.render_mode is None:
            return None
        qpos = self.env.sim.poses.cpu().numpy()
        if self._renderer is None:
            self._renderer = make_renderer(self.env.sim.scene, qpos[:1], PICTURE, PICTURE)
        return tuple(self._renderer.render(qpos[i : i + 1]).copy() for i in range(self.num_envs))

    def close_extras(self, **kwargs: Any) -> None:
        """Close the simulator and the renderer."""
        if self._renderer is not None:
            self._renderer.close()
        self.env.close()


class TaskEnv(gymnasium.Env):
    """Single env of a task; arguments as for `TaskVectorEnv`."""

    metadata = METADATA

    def __init__(self, task_name: type[Task[Any]] | str, *, render_mode: str | None = None, **settings: Any) -> None:
        settings |= {"autoreset_mode": AutoresetMode.DISABLED, "render_mode": render_mode}
        self.envs = TaskVectorEnv(task_name, 1, **settings)
        self.metadata = {**METADATA, "render_fps": self.envs.metadata["render_fps"]}
        self.observation_space = self.envs.single_observation_space
        self.action_space = self.envs.single_action_space
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        """Begin an episode; return its first observation and an empty dict."""
        super().reset(seed=seed)
        obs, info = self.envs.reset(seed=seed)
        return obs[0], info

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Advance the env by one control step; return observation, reward, terminated, truncated and info."""
        obs, reward, terminated, truncated, info = self.envs.step(np.asarray(action)[None])
        return obs[0], float(reward[0]), bool(terminated[0]), bool(truncated[0]), info

    def render(self) -> np.ndarray | None:
        """Return an image, uint8 [480, 480, 3]; None without a `render_mode`."""
        pictures = self.envs.render()
        return None if pictures is None else pictures[0]

    def close(self) -> None:
        """Close the simulator and the renderer."""
        self.envs.close()


def _action_space(env: VecEnv) -> gymnasium.Space:
    if not isinstance(env.action_space, spaces.MultiDiscrete):
        return action_space(env)
    counts = env.action_space.counts
    return Discrete(counts[0]) if len(counts) == 1 else MultiDiscrete(list(counts))


def register() -> None:
    """Register `gpusim_rl/<task>-v0` for our tasks, and `gpusim_rl/Task-v0`, which takes a `task_name`."""
    for name in [*tasks(), "Task"]:
        env_id = f"gpusim_rl/{name}-v0"
        if env_id not in gymnasium.registry:
            kwargs = {} if name == "Task" else {"task_name": name}
            gymnasium.register(
                env_id, f"{__name__}:TaskEnv", vector_entry_point=f"{__name__}:TaskVectorEnv", kwargs=kwargs
            )


register()
