"""Isaac Lab 3 envs on Isaac Lab's own simulators; Newton physics does not need Kit."""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch

from gpusim_rl.connect import library_config
from gpusim_rl.connect.tensor_envs import Mask, TensorEnvs
from gpusim_rl.env.environment import Observation
from gpusim_rl.errors import ConfigError, did_you_mean, first_line, import_optional
from gpusim_rl.settings.schema import EnvConfig

logger = logging.getLogger(__name__)

REACHES, NEAREST_M = 3.5, 0.5  # camera distance: multiple of the robot's reach, and minimum [m]


class IsaacLabEnv(TensorEnvs):
    """IsaacLab: Isaac Lab envs, by their id in Gymnasium's registry or from your own configuration.

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
            problem = "final observations with a history lack their newest frame, so time-out values are one step old"
            logger.warning("%s: in Isaac Lab, %s", self.name, problem)
        self._to_camera: np.ndarray | None = None  # from the target to the camera [m]

    @classmethod
    def from_settings(cls, cfg: EnvConfig, *, num_envs: int, seed: int, device: torch.device) -> IsaacLabEnv:
        """Make envs from settings."""
        library_config.refuse_unused(
            cfg, cls.library, {"sim.device": "Set device instead", "compute_final_obs": "It is always true"}
        )
        with library_config.quietly(cls.library):
            env_cfg, make, name = find_cfg(cfg)
            _refuse_several_agents(env_cfg, name)
            env_cfg.scene.num_envs, env_cfg.sim.device, env_cfg.seed = num_envs, str(device), seed
            library_config.change(env_cfg, cfg.cfg, "env.cfg")
            if (render_mode := cfg.kwargs.get("render_mode")) is not None:
                _draw(env_cfg, in_window=render_mode == "human")
            if importlib.import_module("isaaclab.sim").SimulationContext.instance() is not None:
                raise ConfigError("this process already has a scene, and Isaac Lab allows only one", key=name)
            try:
                with library_config.in_one_line(name):
                    envs = make(cfg=env_cfg, **cfg.kwargs)
                return cls(envs, name)
            except FileNotFoundError as error:
                hint = "Isaac Lab downloads this file. Try a scene that uses local files (docs/connect.md#isaac-lab)"
                raise ConfigError(first_line(error), key=name, hint=hint) from None

    def _final_obs(self, obs: Observation, ended: Mask, extras: Mapping[str, Any]) -> Observation:
        if "final_obs" not in extras:  # no episode has ended yet
            self._steps_without_last += 1
            if self._steps_without_last == self.max_episode_length + 1:
                problem = "no 'final_obs' in extras for a whole episode; time limits use the next episode's observation"
                logger.warning("%s: %s", self.name, problem)
            return obs
        last = self._numbers(extras["final_obs"])
        return {group: torch.where(ended[:, None], last[group], value) for group, value in obs.items()}

    def _begin_episodes(self, obs: Observation, ended: Mask, diverged: Mask) -> tuple[Observation, Mask]:
        # Only the library can reset an env, so force a diverged env to its time limit in the next step.
        late = diverged & ~ended
        self._envs.episode_length_buf.masked_fill_(late, self.max_episode_length)
        return obs, ~late

    def render(self) -> list[Any]:
        """Return an image per env from Newton's viewer; needs `env.kwargs.render_mode=rgb_array`.

        The camera follows the first robot, from the direction of Isaac Lab's camera and at most at its distance.
        """
        sim, scene = self._envs.sim, self._envs.scene
        if not sim.visualizers:
            return super().render()
        viewer, robots = sim.visualizers[0], [*scene.articulations.values()]
        sim.forward()  # forward kinematics
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
    """Return the configuration, the constructor and the name of the envs."""
    import_optional("isaaclab", "isaaclab==3.0.0", "task=IsaacLab (Python 3.12)")
    library_config.require_id(cfg, "IsaacLab", "Isaac-Cartpole-Direct")
    presets = [] if cfg.physics is None else [cfg.physics]
    if cfg._target_ is not None:
        env_cfg = library_config.made_by_function(cfg._target_, "my_envs.MyEnvCfg")
        hydra = importlib.import_module("isaaclab_tasks.utils.hydra")
        known = {name for options in hydra.collect_presets(env_cfg).values() for name in options}
        for name in {*presets} - known:
            hint = did_you_mean(name, known)
            raise ConfigError(f"unknown preset of {cfg._target_}", key=f"env.physics={name}", hint=hint)
        env_cfg = hydra.resolve_presets(env_cfg, presets)
        envs = importlib.import_module("isaaclab.envs")
        if isinstance(env_cfg, envs.ManagerBasedRLEnvCfg):
            return env_cfg, envs.ManagerBasedRLEnv, cfg._target_
        # A direct configuration does not name its env class.
        hint = "Try gymnasium.register in your module, and env.id=my_module:My-Env"
        raise ConfigError(
            key=f"env._target_={cfg._target_}", expected="a ManagerBasedRLEnvCfg", got=type(env_cfg).__name__, hint=hint
        )
    import gymnasium

    importlib.import_module("isaaclab_tasks")  # registers the envs
    name = library_config.module_and_id(str(cfg.id))
    known = {key for key, spec in gymnasium.registry.items() if "env_cfg_entry_point" in (spec.kwargs or {})}
    if name not in known:
        raise ConfigError("not an Isaac Lab env", key=f"env.id={name}", hint=did_you_mean(name, sorted(known)))
    parse = importlib.import_module("isaaclab_tasks.utils.parse_cfg").parse_env_cfg
    try:
        env_cfg = parse(name, overrides=[f"physics={preset}" for preset in presets])
    except ValueError as error:
        raise ConfigError(first_line(error), key=f"env.physics={cfg.physics}") from None
    return env_cfg, lambda **kwargs: gymnasium.make(name, **kwargs), name


def _draw(env_cfg: Any, *, in_window: bool) -> None:
    """Enable Isaac Lab's Kit-free viewer."""
    try:
        viewers = importlib.import_module("isaaclab_visualizers.newton.newton_visualizer")
        importlib.import_module("pyglet.window")  # opens a window of one pixel
    except Exception as error:  # pyglet raises many types
        hint = "Try gpusim-rl record" if in_window else "On Debian or Ubuntu, try apt-get install libegl1 libgl1"
        raise ConfigError(f"Isaac Lab's viewer cannot render here: {first_line(error)}", hint=hint) from None
    viewer = viewers.NewtonGLVisualizerCfg(headless=not in_window, window_width=1280, window_height=720)
    env_cfg.sim.visualizer_cfgs = [viewer]
    if hasattr(env_cfg.sim.physics, "load_visual_shapes"):  # off by default without a window
        env_cfg.sim.physics.load_visual_shapes = True


def _refuse_several_agents(env_cfg: Any, name: str) -> None:
    if hasattr(env_cfg, "possible_agents"):
        raise ConfigError("multi-agent envs are not supported", key=name)
