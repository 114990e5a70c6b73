"""Environments of a run, and their description for the algorithm."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from gpusim_rl.env import Environment, VecEnv
from gpusim_rl.env.encoded_env import EncodedEnv
from gpusim_rl.env.mirrors import mirrored
from gpusim_rl.env.observations import number_names
from gpusim_rl.learn.algorithm import EnvSpec
from gpusim_rl.learn.pretrained import load_frozen
from gpusim_rl.run.held_objects import devices_checked
from gpusim_rl.run.run_dir import encoder_for
from gpusim_rl.run.run_spec import RunSpec
from gpusim_rl.run.start import RunStart
from gpusim_rl.sim import make_sim

RESUMES_APART = 7_919  # seed offset per iteration of a resumed run


def resumed_seed(seed: int, iteration: int) -> int:
    """Return the env seed of a run that starts after `iteration`, so that a resumed run draws new random numbers."""
    return (seed + iteration * RESUMES_APART) % 2**31


def evaluation_seed(seed: int) -> int:
    """Return an evaluation seed for another library's envs, different from the training seed."""
    return (seed + 2**30) % 2**31


def make_env(start: RunStart) -> Environment:
    """Make the environments of a run, with raw images."""
    cfg, task_class, task_cfg = start.cfg, start.spec.task_class, start.cfg.task
    if start.spec.envs is not None:
        return start.spec.envs
    if issubclass(task_class, Environment):
        seed = evaluation_seed(start.process_seed) if cfg.test else resumed_seed(start.process_seed, start.iteration)
        return task_class.from_settings(cfg.env, num_envs=cfg.num_envs, seed=seed, device=start.device)
    if cfg.test:  # whole episodes only
        task_cfg = task_cfg.whole_episodes()
    sim = make_sim(task_class.built_scene(task_cfg), start.sim, cfg.num_envs, cfg.sim)
    return VecEnv(task_class, task_cfg, sim, start.process_seed, check=cfg.debug.check_task)


def observed(env: Environment, spec: RunSpec, device: torch.device) -> Environment:
    """Wrap envs so that the policy sees features of a frozen encoder instead of images (`pretrained.freeze`)."""
    cfg, name = spec.cfg.pretrained, encoder_for(spec)
    if not cfg.freeze or name is None:
        return env
    return EncodedEnv(env, partial(load_frozen, name, device=device), cfg.frames)


def make_started_env(start: RunStart) -> tuple[Environment, dict[str, Tensor]]:
    """Make, wrap and reset the environments; return them and observations on the learner's device."""
    env = observed(make_env(start), start.spec, start.device)
    with devices_checked(("the environment", env, env.device), enabled=start.cfg.debug.check_device):
        return env, {group: value.to(start.device, copy=True) for group, value in env.reset().items()}


def env_spec(start: RunStart, env: Environment) -> EnvSpec:
    """Describe environments for an algorithm."""
    inside = env.unwrapped
    return EnvSpec(
        env.num_envs,
        dict(env.obs_sizes),
        env.action_space,
        env.steps_between_truncations,
        dt=inside.task.dt if isinstance(inside, VecEnv) else 1.0,
        task=start.task_name,
        obs_names=number_names(env.obs_sizes, env.obs_terms) if isinstance(env, VecEnv) else {},
        images=dict(env.images),
        final_images=env.final_images,
        mirrored=partial(mirrored, env),
    )
