"""Envs of our tasks on CPU physics."""

from __future__ import annotations

from typing import Any

import mujoco
import torch

import gpusim_rl
from gpusim_rl.api import prepare
from gpusim_rl.env import VecEnv
from gpusim_rl.sim import SimChoice
from helpers.scenes import make

SETTINGS: dict[str, Any] = {
    "physics_hz": 200.0,
    "control_hz": 50.0,
    "episode_length": 30,
    "clip_actions": 1.0,
    "clip_observations": None,
    "randomize_episode_start": False,
}


def task_env(name: str, num_envs: int = 4, **settings: Any) -> VecEnv:
    """Return a task's env after `reset`, with full first episodes."""
    settings = {"randomize_episode_start": False, **settings}
    env = gpusim_rl.make_env(name, num_envs=num_envs, sim="mujoco", device="cpu", task=settings)
    env.reset()
    return env


def class_env(
    task: str, num_envs: int, task_class: type | None = None, *, sim: str = "mujoco", seed: int = 1, **settings: Any
) -> VecEnv:
    """Return an env of a class, by default the task's, with the task's settings."""
    spec = prepare(task, num_envs=num_envs, sim=sim, device="cpu", task=settings)
    choice, cls = SimChoice(sim, torch.device("cpu"), "test"), task_class or spec.task_class
    return VecEnv.make(cls, spec.cfg.task, num_envs=num_envs, choice=choice, sim=spec.cfg.sim, seed=seed)


def plain_env(
    task: Any, num_envs: int, seed: int = 0, *, sim: str = "mujoco", check: bool = False, **settings: Any
) -> VecEnv:
    """Return an env of a class without a yaml, with `SETTINGS`."""
    cfg = task.Config(**{**SETTINGS, **settings})
    return VecEnv(task, cfg, make(sim, task.scene(cfg), num_envs, graph=False), seed, check=check)


def task_model(task: str) -> mujoco.MjModel:
    """Model of a task's scene with its settings."""
    spec = prepare(task)
    return spec.task_class.scene(spec.cfg.task).model  # type: ignore[attr-defined]
