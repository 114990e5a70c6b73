"""MDP layer: `Task`, the template that users subclass, and `VecEnv`, which runs it."""

from gpusim_rl.env.command import Commands, Curriculum, CurriculumConfig, Levels, Steerable, VelocityCommands
from gpusim_rl.env.environment import Environment, Step, Terms
from gpusim_rl.env.mirrors import AtSite, PerBody
from gpusim_rl.env.ray_sensors import RayCaster
from gpusim_rl.env.stateful import Stateful
from gpusim_rl.env.task import Task, TaskConfig, control_steps
from gpusim_rl.env.vec_env import VecEnv

__all__ = [
    "AtSite",
    "Commands",
    "Curriculum",
    "CurriculumConfig",
    "Environment",
    "Levels",
    "PerBody",
    "RayCaster",
    "Stateful",
    "Steerable",
    "Step",
    "Task",
    "TaskConfig",
    "Terms",
    "VecEnv",
    "VelocityCommands",
    "control_steps",
]
