"""Envs of mjlab on its own simulator, MuJoCo Warp, on CUDA or a CPU."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, ClassVar

import mujoco
import torch
from jaxtyping import Bool
from torch import Tensor

from gpusim_rl.connect.library_config import (
    change,
    in_one_line,
    made_by_function,
    module_and_id,
    quietly,
    refuse_gymnasiums,
    refuse_ours,
    require,
    require_id,
)
from gpusim_rl.connect.tensor_envs import TensorEnvs
from gpusim_rl.env.environment import Observation
from gpusim_rl.errors import ConfigError, did_you_mean, first_line
from gpusim_rl.settings.schema import EnvConfig
from gpusim_rl.sim.warp import start_warp


class MjLabEnv(TensorEnvs):
    """MjLab: envs of mjlab, by their id in its registry or from a configuration of yours.

    `envs` is a `ManagerBasedRlEnv`. We reset it, to keep the true last observation. mjlab takes env indices, so each
    step synchronises with the device.
    """

    library = "mjlab"
    groups: ClassVar = {"policy": "actor", "critic": "critic"}
    keeps_last_obs = ("auto_reset", False)
    counts_ends = True

    @classmethod
    def from_settings(cls, cfg: EnvConfig, *, num_envs: int, seed: int, device: torch.device) -> MjLabEnv:
        """Make the envs of the settings; raise ConfigError if the env, mjlab or its renderer is missing."""
        if cfg.physics is not None:
            raise ConfigError("env.physics has no effect on envs of mjlab: they have one simulator. Try without it")
        refuse_gymnasiums(cfg, cls.library)
        refuse_ours(cfg.cfg, {"auto_reset": "the envs are reset here"})
        if unknown := cfg.kwargs.keys() - {"render_mode"}:
            raise ConfigError(f"env.kwargs.{min(unknown)}: envs of mjlab take render_mode alone. Try env.cfg")
        start_warp(device)
        with quietly(cls.library):
            env_cfg, name = find_cfg(cfg)
            env_cfg.scene.num_envs, env_cfg.seed = num_envs, seed
            change(env_cfg, cfg.cfg, "env.cfg")
            make = importlib.import_module("mjlab.envs").ManagerBasedRlEnv
            try:
                with in_one_line(name):
                    envs = make(env_cfg, device=str(device), **cfg.kwargs)
            except mujoco.FatalError as error:  # its renderer's, which takes the OpenGL that was chosen at the start
                raise ConfigError(f"{name}: {first_line(error)}. Try with the variable MUJOCO_GL=egl") from None
            return cls(envs, name)

    def _final_obs(self, obs: Observation, ended: Bool[Tensor, " envs"], extras: Mapping[str, Any]) -> Observation:
        return obs

    def _begin_episodes(
        self, obs: Observation, ended: Bool[Tensor, " envs"], diverged: Bool[Tensor, " envs"]
    ) -> tuple[Observation, Bool[Tensor, " envs"]]:
        where = ended | diverged
        env_ids = where.nonzero().flatten()
        if env_ids.numel():
            first = self._numbers(self._envs.reset(env_ids=env_ids)[0])
            obs = {group: torch.where(where[:, None], first[group], value) for group, value in obs.items()}
        return obs, torch.ones_like(where)

    def _reward_terms(self) -> Tensor:
        rewards = self._envs.reward_manager
        return rewards._step_reward * (self._envs.step_dt if self._envs.cfg.scale_rewards_by_dt else 1.0)

    def render(self) -> list[Any]:
        """Return the picture of mjlab's camera; needs `env.kwargs.render_mode=rgb_array`."""
        picture = self._envs.render()
        if picture is None:
            raise ConfigError(f"{self.name} draws no pictures (render_mode rgb_array)")
        return [picture]


def find_cfg(cfg: EnvConfig) -> tuple[Any, str]:
    """Return configuration and name of the envs of the settings."""
    require("mjlab", "mjlab", "pip install mjlab==1.6.0, in an environment of its own")
    require_id(cfg, "MjLab", "Mjlab-Velocity-Flat-Unitree-Go1")
    if cfg._target_ is not None:
        made, expected = made_by_function(cfg._target_, "my_envs.my_env_cfg"), "expected a ManagerBasedRlEnvCfg"
        if not isinstance(made, importlib.import_module("mjlab.envs").ManagerBasedRlEnvCfg):
            raise ConfigError(f"env._target_={cfg._target_} returns a {type(made).__name__}, {expected}")
        return made, cfg._target_
    importlib.import_module("mjlab.tasks")  # it registers them
    registry = importlib.import_module("mjlab.tasks.registry")
    name = module_and_id(str(cfg.id))
    if name not in registry.list_tasks():
        raise ConfigError(f"env.id={name}: mjlab has no such env.{did_you_mean(name, registry.list_tasks())}")
    return registry.load_env_cfg(name), name
