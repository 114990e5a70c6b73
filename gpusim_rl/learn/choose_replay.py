"""The choice of a replay memory by the settings, with checks of its size, and its description."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpusim_rl.errors import ConfigError
from gpusim_rl.learn.algorithm import EnvSpec
from gpusim_rl.learn.host_replay import CPU, HostReplay
from gpusim_rl.learn.replay import STORAGE, Replay
from gpusim_rl.machine.hardware import memory_available_bytes
from gpusim_rl.settings.schema import OffPolicyConfig, ReplayConfig


def make_replay(
    cfg: OffPolicyConfig, env: EnvSpec, groups: Sequence[str], *, device: torch.device, seed: int, drawn: int
) -> Replay | HostReplay:
    """Makes the replay memory that the settings ask for.

    One on the host draws by a seed of its own, and `drawn` transitions for an iteration.

    Raises:
        ConfigError: It is too small to learn from, there is no room for it, or it does not do what is asked of it.
    """
    steps, storage = cfg.replay.capacity // env.num_envs, STORAGE[cfg.replay.storage]
    _check_settings(cfg, env, steps, device)
    if device.type != "meta":
        size = Replay.bytes_of(steps, env, groups, storage)
        size += 4 * steps * env.num_envs if cfg.replay.alpha > 0.0 else 0  # priorities
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
    """Stops where a memory of `size` bytes does not fit its device, or its copy in a checkpoint the host."""
    needs = {device: size}
    if cfg.save:
        needs[CPU] = needs.get(CPU, 0) + size
    for place, needed in needs.items():
        free = torch.cuda.mem_get_info(place)[0] if place.type == "cuda" else memory_available_bytes()
        if needed <= free:
            continue
        advice = f"{section}.capacity={int(0.5 * cfg.capacity * free / needed)}"
        if place.type == "cuda" and cfg.alpha == 0.0:
            advice += f" or {section}.device=cpu"
        elif place.type == "cpu" and cfg.save:
            advice += f" or {section}.save=false"
        raise ConfigError(
            f"{section}.capacity={cfg.capacity} takes {needed / 1e9:.3g} GB on {place}, {free / 1e9:.3g} GB are free."
            f" Try {advice}"
        )


def describe_replay(cfg: OffPolicyConfig, replay: Replay | HostReplay, section: str, max_steps: int) -> str:
    """Returns what the start of a run, of so many control steps, tells of a replay memory."""
    on_host = isinstance(replay, HostReplay)
    size = f"{replay.num_steps} x {replay.num_envs}, {replay.num_bytes / 1e9:.3g} GB{' of the host' if on_host else ''}"
    kept = f"saved in checkpoints ({section}.replay.save=false: smaller ones, a resumed run fills it again)"
    if not cfg.replay.save:
        kept = "not in checkpoints: a resumed run fills it again before it learns"
    samples = replay.num_envs * cfg.horizon
    first, last = -(-cfg.learning_starts // samples), max_steps // cfg.horizon
    start = f"random actions until {cfg.learning_starts:,} transitions, in iteration {first}"
    if first + on_host > last:  # an update draws from the host before the newest rollout is there
        fewest = max(cfg.batch_size, samples * last // 10)
        advice = f"{section}.learning_starts={fewest}"
        if -(-fewest // samples) + on_host > last:  # not even a batch is stored
            advice = f"max_iterations={10 * first}"
        start += f" of {last}: nothing is learned. Try {advice}"
    return f"replay of {size}, {kept}; {start}"
