"""mjlab envs on mjlab's own simulator, MuJoCo Warp, on CUDA or the CPU."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, ClassVar

import mujoco
import torch

from gpusim_rl.connect import library_config
from gpusim_rl.connect.tensor_envs import Mask, TensorEnvs
from gpusim_rl.env.environment import Observation
from gpusim_rl.errors import ConfigError, did_you_mean, first_line, import_optional
from gpusim_rl.settings.schema import EnvConfig
from gpusim_rl.sim.warp import start_warp


class MjLabEnv(TensorEnvs):
    """MjLab: mjlab envs, by their id in mjlab's registry or from your own configuration.

    `envs` is a `ManagerBasedRlEnv`. We reset it ourselves to keep the true last observation; this synchronises with the
    device in each step.
    """

    library = "mjlab"
    groups: ClassVar = {"policy": "actor", "critic": "critic"}
    keeps_last_obs = ("auto_reset", False)
    counts_ends = True

    @classmethod
    def from_settings(cls, cfg: EnvConfig, *, num_envs: int, seed: int, device: torch.device) -> MjLabEnv:
        """Make envs from settings."""
        if cfg.physics is not None:
            raise ConfigError("has no effect on mjlab envs", key="env.physics", hint="Remove this setting")
        library_config.refuse_unused(cfg, cls.library, {"auto_reset": "It is always false"})
        if unknown := cfg.kwargs.keys() - {"render_mode"}:
            raise ConfigError("not an argument of mjlab's envs", key=f"env.kwargs.{min(unknown)}", hint="Try env.cfg")
        start_warp(device)
        with library_config.quietly(cls.library):
            env_cfg, name = find_cfg(cfg)
            env_cfg.scene.num_envs, env_cfg.seed = num_envs, seed
            library_config.change(env_cfg, cfg.cfg, "env.cfg")
            make = importlib.import_module("mjlab.envs").ManagerBasedRlEnv
            try:
                with library_config.in_one_line(name):
                    envs = make(env_cfg, device=str(device), **cfg.kwargs)
            except mujoco.FatalError as error:  # raised by its renderer
                raise ConfigError(first_line(error), key=name, hint="Try setting MUJOCO_GL=egl") from None
            return cls(envs, name)

    def _final_obs(self, obs: Observation, ended: Mask, extras: Mapping[str, Any]) -> Observation:
        return obs

    def _begin_episodes(self, obs: Observation, ended: Mask, diverged: Mask) -> tuple[Observation, Mask]:
        where = ended | diverged
        env_ids = where.nonzero().flatten()
        if env_ids.numel():
            first = self._numbers(self._envs.reset(env_ids=env_ids)[0])
            obs = {group: torch.where(where[:, None], first[group], value) for group, value in obs.items()}
        return obs, torch.ones_like(where)

    def render(self) -> list[Any]:
        """Return an image from mjlab's camera; needs `env.kwargs.render_mode=rgb_array`."""
        picture = self._envs.render()
        if picture is None:
            raise ConfigError("the envs do not render", key=self.name, hint="Try env.kwargs.render_mode=rgb_array")
        return [picture]


def find_cfg(cfg: EnvConfig) -> tuple[Any, str]:
    """Return the configuration and the name of the envs."""
    import_optional("mjlab", "mjlab==1.6.0", "task=MjLab (in a separate Python environment)")
    library_config.require_id(cfg, "MjLab", "Mjlab-Velocity-Flat-Unitree-Go1")
    if cfg._target_ is not None:
        made = library_config.made_by_function(cfg._target_, "my_envs.my_env_cfg")
        if not isinstance(made, importlib.import_module("mjlab.envs").ManagerBasedRlEnvCfg):
            key = f"env._target_={cfg._target_}"
            raise ConfigError(key=key, expected="a function that returns a ManagerBasedRlEnvCfg", got=type(made))
        return made, cfg._target_
    importlib.import_module("mjlab.tasks")  # registers the envs
    registry = importlib.import_module("mjlab.tasks.registry")
    name = library_config.module_and_id(str(cfg.id))
    if name not in registry.list_tasks():
        hint = did_you_mean(name, registry.list_tasks())
        raise ConfigError("not an mjlab env", key=f"env.id={name}", hint=hint)
    return registry.load_env_cfg(name), name
