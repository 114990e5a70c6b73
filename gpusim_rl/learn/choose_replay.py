"""Replay memory chosen by the settings: size checks and description."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from gpusim_rl.errors import ConfigError
from gpusim_rl.learn.algorithm import EnvSpec
from gpusim_rl.learn.host_replay import CPU, HostReplay
from gpusim_rl.learn.pixel_replay import BLOCK, PixelReplay
from gpusim_rl.learn.replay import STORAGE, Replay
from gpusim_rl.machine.hardware import memory_available_bytes
from gpusim_rl.settings.schema import OffPolicyConfig, ReplayConfig


def make_replay(
    cfg: OffPolicyConfig,
    env: EnvSpec,
    groups: Sequence[str],
    section: str,
    *,
    device: torch.device,
    seed: int,
    drawn: int,
) -> Replay | HostReplay:
    """Build the configured memory; one on the host draws `drawn` transitions per iteration.

    Raises:
        ConfigError: It is too small, does not fit, or lacks a requested feature.
    """
    steps, kind, more = cfg.replay.capacity // env.num_envs, Replay, {}
    if env.images:
        steps -= steps % BLOCK if cfg.replay.compress else 0
        kind, more = PixelReplay, {"stack": cfg.network.encoder.frames, "compress": cfg.replay.compress}
    _check_settings(cfg, env, section, steps, device)
    storage = STORAGE[cfg.replay.storage]
    make: Any = partial(kind, steps, env, groups, n_step=cfg.n_step, gamma=cfg.gamma, storage=storage, **more)
    if device.type == "meta":
        return make(device=device)
    on_host, memory = cfg.replay.device is not None, make(device=torch.device("meta"))
    if on_host and env.images and (needed := _drawn_ahead(cfg, memory)) > (free := _free_bytes(device)):
        raise ConfigError(
            f"{section}.replay.device=cpu draws the images of all updates of an iteration ahead:"
            f" {needed / 1e9:.3g} GB on {device}, {free / 1e9:.3g} GB are free. Try {section}.batch_size="
            f"{max(1, int(0.5 * cfg.batch_size * free / needed))}, or a smaller {section}.horizon"
        )
    size = memory.expected_bytes + (4 * steps * env.num_envs if cfg.replay.alpha > 0.0 else 0)  # priorities
    _check_room(cfg.replay, f"{section}.replay", size, torch.device(cfg.replay.device or device))
    memory = make(device=CPU if on_host else device)
    return HostReplay(memory, env, device=device, horizon=cfg.horizon, size=drawn, seed=seed) if on_host else memory


def _check_settings(cfg: OffPolicyConfig, env: EnvSpec, section: str, steps: int, device: torch.device) -> None:
    envs, alpha = env.num_envs, cfg.replay.alpha
    needed = max(cfg.n_step + 1 + (cfg.network.encoder.frames - 1 if env.images else 0), cfg.horizon)
    if cfg.replay.compress:
        needed = -(-needed // BLOCK) * BLOCK
        if cfg.replay.device is None or not env.images:
            raise ConfigError(
                f"{section}.replay.compress=true is for images in the memory of the host. Try"
                f" {section}.replay.{'device=cpu' if env.images else 'compress=false'}"
            )
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
    """Raise ConfigError if `size` bytes do not fit `device`, or the host if saved."""
    needs = {device: size}
    if cfg.save:
        needs[CPU] = needs.get(CPU, 0) + size
    for place, needed in needs.items():
        free = _free_bytes(place)
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


def _free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else memory_available_bytes()


def _drawn_ahead(cfg: OffPolicyConfig, memory: PixelReplay) -> int:
    """Return the bytes of images for the updates of this iteration and the next."""
    return 2 * cfg.horizon * cfg.updates * cfg.batch_size * memory.bytes_drawn


def describe_replay(cfg: OffPolicyConfig, replay: Replay | HostReplay, section: str, max_steps: int) -> str:
    """Describe the memory for the banner."""
    on_host = isinstance(replay, HostReplay)
    size = f"{replay.num_steps} x {replay.num_envs}, {replay.expected_bytes / 1e9:.3g} GB"
    size += " of the host" if on_host else ""
    memory = replay.memory if isinstance(replay, HostReplay) else replay
    if isinstance(memory, PixelReplay):
        size += f" ({replay.expected_bytes / (replay.num_steps * replay.num_envs) / 1e3:.3g} kB a transition"
        size += ", if LZ4 makes a third of it)" if cfg.replay.compress else ")"
        if on_host:
            size += f", {_drawn_ahead(cfg, memory) / 1e9:.3g} GB of the learner's device for images drawn ahead"
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
