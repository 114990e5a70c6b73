"""Playback of a motion clip as a task, for all viewers and video tools."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mujoco
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gpusim_rl.api import load_spec
from gpusim_rl.env import Task, TaskConfig, VecEnv
from gpusim_rl.env.clip import Clip
from gpusim_rl.env.robot_clip import fit, scene_of
from gpusim_rl.errors import ConfigError, did_you_mean
from gpusim_rl.files.paths import assets_dir, robot_file
from gpusim_rl.settings.compose import compose
from gpusim_rl.settings.discover import tasks
from gpusim_rl.sim import Scene, Sim, choose_sim
from gpusim_rl.view.player import Player


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipPlaybackConfig(TaskConfig):
    """Settings of a playback, created in Python, not from yaml."""

    clip: Clip
    robot: str
    config_dir: str | None


class ClipPlayback(Task[ClipPlaybackConfig]):
    """ClipPlayback: replay the frames of a clip on a robot, without actions or forces.

    The reward is the root speed [m/s], for display. An episode is one pass through the clip.
    """

    Config = ClipPlaybackConfig

    @classmethod
    def scene(cls, cfg: ClipPlaybackConfig) -> Scene:
        scene = scene_by_name(cfg.robot, cfg.config_dir)
        off = mujoco.mjtDisableBit
        scene.spec.option.disableflags |= off.mjDSBL_GRAVITY | off.mjDSBL_CONSTRAINT | off.mjDSBL_ACTUATION
        return scene

    def __init__(self, cfg: ClipPlaybackConfig, sim: Sim) -> None:
        super().__init__(cfg, sim)
        self.num_actions = 1  # tasks need at least one
        name = sim.scene.articulation_names[0]
        self.robot, clip = sim.articulation(name), fit(cfg.clip, sim.scene, name)
        frames = {"joint_pos": clip.joint_pos, "joint_vel": clip.joint_vel}
        if self.robot.free_root:
            frames |= {"root_pos": clip.body_pos_w[:, 0], "root_quat": clip.body_quat_w[:, 0]}
            frames |= {"root_lin_vel": clip.body_lin_vel_w[:, 0], "root_ang_vel": clip.body_ang_vel_w[:, 0]}
        self.frames = {key: torch.tensor(value, device=self.device) for key, value in frames.items()}

    def reset(self, where: Bool[Tensor, " envs"]) -> None:
        self._show(where, torch.zeros_like(self.progress))

    def apply_action(self, action: Float[Tensor, "envs actions"]) -> None:
        pass

    def advance(self, done: Bool[Tensor, " envs"]) -> None:
        self._show(torch.ones_like(done), self.progress.clamp(max=len(self.frames["joint_pos"]) - 1))

    def _show(self, where: Bool[Tensor, " envs"], frame: Tensor) -> None:
        self.robot.set_state(where, **{key: value[frame] for key, value in self.frames.items()})

    def observe(self) -> Float[Tensor, "envs obs"]:
        return self.robot.joint_pos

    def rewards(self) -> dict[str, Float[Tensor, " envs"]]:
        return {"root_speed": self.robot.root_lin_vel.norm(dim=1)}

    def terminated(self) -> Bool[Tensor, " envs"]:
        return torch.zeros_like(self.progress, dtype=torch.bool)


def scene_by_name(robot: str, config_dir: str | None = None) -> Scene:
    """Return a task's scene, or a robot on the ground: an asset, MJCF, URDF or `menagerie:<robot>`.

    Raise ConfigError for an unknown name, and TaskError for an invalid file.
    """
    known = tasks(config_dir, outside=True)
    if robot in known:
        spec = load_spec(compose([f"task={robot}"], config_dir), [])
        if not issubclass(spec.task_class, Task):
            problem = f"{robot!r} has no scene: its envs come from another library"
            raise ConfigError(problem, hint="Try another task or a robot")
        return spec.task_class.built_scene(spec.cfg.task)
    files = {file.stem: file for file in assets_dir().rglob("*.xml")}
    if robot not in files and not robot.startswith("menagerie:") and not robot.endswith((".xml", ".urdf")):
        hint = f"{did_you_mean(robot, [*known, *files])} Try a path or menagerie:<robot>"
        raise ConfigError(f"no task or robot named {robot!r}", hint=hint)
    return scene_of(files.get(robot) or robot_file(robot))


def open_playback(clip: Clip, robot: str, *, name: str = "clip", config_dir: str | None = None) -> Player:
    """Return a player that loops a clip on a robot (see `scene_by_name`); raise ConfigError if they do not fit."""
    own = {"clip": clip, "robot": robot, "config_dir": config_dir}
    return open_replayed(ClipPlayback, name, clip.fps, len(clip.joint_pos), **own)


def open_replayed(task: type[Task[Any]], name: str, hz: float, steps: int, num_envs: int = 1, **own: Any) -> Player:
    """Return a player of a task that writes states itself, `hz` times per second; `own`: its own settings."""
    common = {"physics_hz": hz, "control_hz": hz, "episode_length": steps, "clip_actions": 1.0}
    cfg = task.Config(**common, clip_observations=None, randomize_episode_start=False, **own)
    choice, sim = choose_sim("mujoco", torch.device("cpu")), load_spec(compose(["sim=mujoco"]), []).cfg.sim
    env = VecEnv.make(task, cfg, num_envs=num_envs, choice=choice, sim=sim, seed=0)
    env.name = name
    return Player(env, seed=0)
