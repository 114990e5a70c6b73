"""Envs of Isaac Lab 3 on its own simulators, on a CPU or CUDA; with Newton physics Kit is not needed."""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
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

logger = logging.getLogger(__name__)

REACHES, NEAREST_M = 3.5, 0.5  # how far the camera is: times the reach of the robot, and at least


class IsaacLabEnv(TensorEnvs):
    """IsaacLab: envs of Isaac Lab, by their id in Gymnasium's registry or from a configuration of yours.

    `envs` is a `DirectRLEnv` or `ManagerBasedRLEnv`, which resets in the same step and keeps the last observation.
    """

    library = "Isaac Lab"
    groups: ClassVar = {"policy": "policy", "critic": "critic"}
    keeps_last_obs = ("compute_final_obs", True)

    def __init__(self, envs: Any, name: str = "") -> None:
        _refuse_several_agents(envs.unwrapped.cfg, name or type(envs.unwrapped).__name__)
        super().__init__(envs, name)
        self._steps_without_last = 0
        observations = getattr(self._envs, "observation_manager", None)
        if any(getattr(observations, "_group_obs_term_history_buffer", {}).values()):
            logger.warning(
                "%s: some observations have a history, of which Isaac Lab gives the last one of an episode without its"
                " newest frame: time-outs are valued at a state that is a step old",
                self.name,
            )
        self._to_camera: np.ndarray | None = None  # from what it looks at [m]

    @classmethod
    def from_settings(cls, cfg: EnvConfig, *, num_envs: int, seed: int, device: torch.device) -> IsaacLabEnv:
        """Make the envs of the settings; raise ConfigError if the env, Isaac Lab or its assets are missing."""
        refuse_gymnasiums(cfg, cls.library)
        ours = {"sim.device": "device is a setting of its own", "compute_final_obs": "it is needed, and switched on"}
        refuse_ours(cfg.cfg, ours)
        with quietly(cls.library):
            env_cfg, make, name = find_cfg(cfg)
            _refuse_several_agents(env_cfg, name)
            env_cfg.scene.num_envs, env_cfg.sim.device, env_cfg.seed = num_envs, str(device), seed
            change(env_cfg, cfg.cfg, "env.cfg")
            if (render_mode := cfg.kwargs.get("render_mode")) is not None:
                _draw(env_cfg, in_window=render_mode == "human")
            if importlib.import_module("isaaclab.sim").SimulationContext.instance() is not None:
                raise ConfigError(f"{name}: Isaac Lab simulates one scene in a process, and there is one already")
            try:
                with in_one_line(name):
                    envs = make(cfg=env_cfg, **cfg.kwargs)
                return cls(envs, name)
            except FileNotFoundError as error:
                advice = "try a scene whose files are on the disk (docs/connect.md#isaac-lab)"
                raise ConfigError(f"{name}: {first_line(error)}. Isaac Lab loads it from a server; {advice}") from None

    def _final_obs(self, obs: Observation, ended: Bool[Tensor, " envs"], extras: Mapping[str, Any]) -> Observation:
        if "final_obs" not in extras:  # no episode has ended yet
            self._steps_without_last += 1
            if self._steps_without_last == self.max_episode_length + 1:
                logger.warning(
                    "%s: step() has given no extras['final_obs'] for a whole episode. Where a time limit ends one, its"
                    " value is that of the next one's first observation",
                    self.name,
                )
            return obs
        last = self._numbers(extras["final_obs"])
        return {group: torch.where(ended[:, None], last[group], value) for group, value in obs.items()}

    def _begin_episodes(
        self, obs: Observation, ended: Bool[Tensor, " envs"], diverged: Bool[Tensor, " envs"]
    ) -> tuple[Observation, Bool[Tensor, " envs"]]:
        # The library alone knows how to reset: the next step of a diverged env is the last one of its time limit.
        late = diverged & ~ended
        self._envs.episode_length_buf.masked_fill_(late, self.max_episode_length)
        return obs, ~late

    def _reward_terms(self) -> Tensor:
        return self._envs.reward_manager._step_reward * self._envs.step_dt

    def render(self) -> list[Any]:
        """Return a picture per env from Newton's viewer; needs `env.kwargs.render_mode=rgb_array`.

        The camera follows the root of the first robot, from the direction of Isaac Lab's camera and at most as far.
        """
        sim, scene = self._envs.sim, self._envs.scene
        if not sim.visualizers:
            return super().render()
        viewer, robots = sim.visualizers[0], [*scene.articulations.values()]
        sim.forward()  # moves the bodies to where the joints are
        targets = robots[0].data.root_pos_w.torch if robots else scene.env_origins
        if self._to_camera is None:
            distance_m = math.inf
            if robots:
                reach_m = (robots[0].data.body_pos_w.torch - targets[:, None]).norm(dim=-1).max().item()
                distance_m = max(NEAREST_M, REACHES * reach_m)
            offset = np.array(viewer.cfg.eye) - np.array(viewer.cfg.lookat)
            self._to_camera = offset * min(1.0, distance_m / float(np.linalg.norm(offset)))
        pictures = []
        for env_id, target in enumerate(targets.cpu().numpy()):
            viewer._viewer.set_visible_worlds([env_id])
            viewer.set_camera_view(target + self._to_camera, target)
            pictures.append(viewer.render_rgb_array())
        return pictures


def find_cfg(cfg: EnvConfig) -> tuple[Any, Any, str]:
    """Return configuration, constructor and name of the envs of the settings."""
    require("isaaclab", "Isaac Lab", "pip install isaaclab==3.0.0, with Python 3.12")
    require_id(cfg, "IsaacLab", "Isaac-Cartpole-Direct")
    presets = [] if cfg.physics is None else [cfg.physics]
    if cfg._target_ is not None:
        env_cfg = made_by_function(cfg._target_, "my_envs.MyEnvCfg")
        hydra = importlib.import_module("isaaclab_tasks.utils.hydra")
        there = {name for options in hydra.collect_presets(env_cfg).values() for name in options}
        for name in {*presets} - there:
            raise ConfigError(f"env.physics={name}: {cfg._target_} has no such preset.{did_you_mean(name, there)}")
        env_cfg = hydra.resolve_presets(env_cfg, presets)
        return env_cfg, _class_of(env_cfg, cfg._target_), cfg._target_
    import gymnasium

    importlib.import_module("isaaclab_tasks")  # it registers them
    name = module_and_id(str(cfg.id))
    known = sorted(key for key, spec in gymnasium.registry.items() if "env_cfg_entry_point" in (spec.kwargs or {}))
    if name not in known:
        raise ConfigError(f"env.id={name}: Isaac Lab has no such env.{did_you_mean(name, known)}")
    parse = importlib.import_module("isaaclab_tasks.utils.parse_cfg").parse_env_cfg
    try:
        env_cfg = parse(name, overrides=[f"physics={preset}" for preset in presets])
    except ValueError as error:
        raise ConfigError(f"env.physics={cfg.physics}: {first_line(error)}") from None
    return env_cfg, lambda **kwargs: gymnasium.make(name, **kwargs), name


def _draw(env_cfg: Any, *, in_window: bool) -> None:
    """Enable Isaac Lab's Kit-free viewer, in a window or headless."""
    try:
        viewers = importlib.import_module("isaaclab_visualizers.newton.newton_visualizer")
        importlib.import_module("pyglet.window")  # opens one of a pixel
    except Exception as error:  # pyglet has many
        fix = "the tool record" if in_window else "on Debian or Ubuntu: apt-get install libegl1 libgl1"
        reason = first_line(error).rstrip(".")
        raise ConfigError(f"Isaac Lab's viewer cannot draw here: {reason}. Try {fix}") from None
    viewer = viewers.NewtonGLVisualizerCfg(headless=not in_window, window_width=1280, window_height=720)
    env_cfg.sim.visualizer_cfgs = [viewer]
    if hasattr(env_cfg.sim.physics, "load_visual_shapes"):  # Isaac Lab leaves them out where it opens no window
        env_cfg.sim.physics.load_visual_shapes = True


def _refuse_several_agents(env_cfg: Any, name: str) -> None:
    if hasattr(env_cfg, "possible_agents"):
        raise ConfigError(f"{name} has several agents, and the algorithms here train one")


def _class_of(env_cfg: Any, target: str) -> Any:
    """Return the env class for a user's configuration; a direct configuration does not name its class."""
    envs = importlib.import_module("isaaclab.envs")
    if isinstance(env_cfg, envs.ManagerBasedRLEnvCfg):
        return envs.ManagerBasedRLEnv
    raise ConfigError(
        f"env._target_={target} makes a {type(env_cfg).__name__}, expected a ManagerBasedRLEnvCfg. Try"
        " gymnasium.register in your module, and env.id=my_module:My-Env"
    )
