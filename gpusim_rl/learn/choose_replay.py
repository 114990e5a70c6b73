"""Which replay memory an off-policy algorithm has, and whether it is large enough and there is room for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpusim_rl.errors import ConfigError
from gpusim_rl.learn.algorithm import EnvSpec
from gpusim_rl.learn.host_replay import CPU, HostReplay
from gpusim_rl.learn.prioritized import Priorities
from gpusim_rl.learn.replay import STORAGE, Replay
from gpusim_rl.machine.hardware import memory_available_bytes
from gpusim_rl.settings.schema import OffPolicyConfig, ReplayConfig


def make_replay(
    cfg: OffPolicyConfig, env: EnvSpec, groups: Sequence[str], *, device: torch.device, seed: int, drawn: int
) -> Replay | HostReplay:
    """Makes the replay memory that the settings ask for.

    Args:
        cfg: Settings of the algorithm.
        env: The environments.
        groups: Names of the observation groups to keep.
        device: Device of the learner.
        seed: Seed of a memory on the host, which draws by itself.
        drawn: Transitions of an iteration.

    Raises:
        ConfigError: It is too small to learn from, there is no room for it, or it does not do what is asked of it.
    """
    steps, storage = cfg.replay.capacity // env.num_envs, STORAGE[cfg.replay.storage]
    _check_settings(cfg, env, steps, device)
    if device.type != "meta":
        size = Replay.bytes_of(steps, env, groups, storage)
        size += Priorities.bytes_of(steps * env.num_envs, cfg.replay.alpha)
        _check_room(cfg.replay, f"{env.section}.replay", size, torch.device(cfg.replay.device or device))
    on_host = cfg.replay.device is not None and device.type != "meta"
    place = CPU if on_host else device
    memory = Replay(steps, env, groups, n_step=cfg.n_step, gamma=cfg.gamma, storage=storage, device=place)
    return HostReplay(memory, env, device=device, horizon=cfg.horizon, size=drawn, seed=seed) if on_host else memory


def _check_settings(cfg: OffPolicyConfig, env: EnvSpec, steps: int, device: torch.device) -> None:
    section, envs, alpha = env.section, env.num_envs, cfg.replay.alpha
    needed = max(cfg.n_step + 1, cfg.horizon)
    if steps < needed:
        raise ConfigError(
            f"{section}.replay.capacity={cfg.replay.capacity} holds {steps} control steps of num_envs={envs}, and"
            f" {needed} are needed. Try {section}.replay.capacity={needed * envs}"
        )
    if cfg.learning_starts > steps * envs:
        raise ConfigError(
            f"{section}.learning_starts={cfg.learning_starts} is beyond the {steps * envs} transitions that the replay"
            f" holds of num_envs={envs}: it would never learn. Try {section}.learning_starts={steps * envs // 10}"
        )
    if cfg.replay.device is not None and alpha > 0.0:
        raise ConfigError(
            f"{section}.replay.device={cfg.replay.device} with {section}.replay.alpha={alpha:g}: priorities change in"
            f" every update, and the host draws ahead of it. Try {section}.replay.alpha=0"
        )
    if alpha > 0.0 and device.type == "cuda" and torch.are_deterministic_algorithms_enabled():
        raise ConfigError(
            f"torch_deterministic=true with {section}.replay.alpha={alpha:g}: CUDA has no deterministic cumulative sum."
            f" Try {section}.replay.alpha=0"
        )


def _check_room(cfg: ReplayConfig, section: str, size: int, device: torch.device) -> None:
    """Stops where the memory does not fit its device, or its copy in a checkpoint the host.

    Args:
        cfg: Settings of the memory.
        section: Section of these settings, for the message.
        size: Size of the memory [bytes].
        device: Device of the memory.
    """
    takes = {device: size}
    if cfg.save:
        takes[CPU] = takes.get(CPU, 0) + size
    for where, taken in takes.items():
        free = torch.cuda.mem_get_info(where)[0] if where.type == "cuda" else memory_available_bytes()
        if taken <= free:
            continue
        other = ""
        if where.type == "cuda" and cfg.alpha == 0.0:
            other = f" or {section}.device=cpu"
        elif where.type == "cpu" and cfg.save:
            other = f" or {section}.save=false"
        raise ConfigError(
            f"{section}.capacity={cfg.capacity} takes {taken / 1e9:.3g} GB on {where}, {free / 1e9:.3g} GB are free."
            f" Try {section}.capacity={int(0.5 * cfg.capacity * free / taken)}{other}"
        )
