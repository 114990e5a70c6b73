"""How much memory a run will need, before it takes any. Tests hold the estimate against real runs."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

import torch

from gpusim_rl.learn.algorithm import EnvSpec
from gpusim_rl.machine.hardware import memory_available_bytes
from gpusim_rl.settings.schema import RunSpec
from gpusim_rl.sim import Scene, SimChoice
from gpusim_rl.sim.memory import simulator_bytes
from gpusim_rl.spaces import Box

logger = logging.getLogger("gpusim_rl.run")

_MARGIN = 0.9  # of the free memory that a run may plan for


def warn_of_memory(spec: RunSpec, scene: Scene, choice: SimChoice, device: torch.device) -> int:
    """Warns of a number of envs that probably does not fit, before anything is built.

    How large observations are is not known yet; it is assumed that they are as large as the state.

    Args:
        spec: The run.
        scene: One env.
        choice: The simulator and its device.
        device: Where the learner lives.

    Returns:
        A number of envs that should fit: a power of two if the run's does not. The run's too if none does.
    """
    cfg, model = spec.cfg, scene.model
    physics = simulator_bytes(scene, cfg.sim, choice, cfg.task.decimation)

    def learner(num_envs: int) -> float:
        sizes = {"policy": model.nq + model.nv + model.nu}
        env = EnvSpec(num_envs, sizes, Box(model.nu), cfg.task.episode_length)
        return spec.algorithm_class.memory_bytes(cfg.algorithm, env, device)

    if choice.device == device:
        return _warn(cfg.num_envs, lambda num_envs: physics(num_envs) + learner(num_envs), device)
    return min(_warn(cfg.num_envs, physics, choice.device), _warn(cfg.num_envs, learner, device))


def warn_of_learner_memory(spec: RunSpec, env: EnvSpec, device: torch.device) -> int:
    """The same for the learner alone, when the simulator stands and the size of observations is known.

    Args:
        spec: The run.
        env: The environments.
        device: Where the learner lives.
    """

    def learner(num_envs: int) -> float:
        sized = dataclasses.replace(env, num_envs=num_envs)
        return spec.algorithm_class.memory_bytes(spec.cfg.algorithm, sized, device)

    return _warn(env.num_envs, learner, device)


def _warn(num_envs: int, need: Callable[[int], float], device: torch.device) -> int:
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else memory_available_bytes()
    if need(num_envs) <= free * _MARGIN:
        return num_envs
    powers = (1 << exponent for exponent in reversed(range((num_envs - 1).bit_length())))
    fits = next((number for number in powers if need(number) <= free * _MARGIN), None)
    logger.warning(
        "num_envs=%d probably does not fit: it needs about %.3g GB %s, %.3g GB are free; %s",
        num_envs,
        need(num_envs) / 1e9,
        f"on {device}" if device.type == "cuda" else "of RAM",
        free / 1e9,
        "free some memory" if fits is None else f"try num_envs={fits}",
    )
    return fits or num_envs
