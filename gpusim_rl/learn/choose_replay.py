"""Selection, size checks and description of the configured replay buffer."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from gpusim_rl.errors import ConfigError
from gpusim_rl.learn.algorithm import EnvSpec
from gpusim_rl.learn.host_replay import CPU, HostReplay
from gpusim_rl.learn.pixel_replay import BLOCK, PixelReplay
from gpusim_rl.learn.replay import STORAGE, Replay, Trajectory
from gpusim_rl.machine.hardware import memory_available_bytes
from gpusim_rl.settings.schema import OffPolicyConfig, ReplayConfig


def make_replay(
    cfg: OffPolicyConfig,
    env: EnvSpec,
    rollout: Trajectory,
    section: str,
    *,
    device: torch.device,
    seed: int,
    drawn: int,
) -> Replay | HostReplay:
    """Build the configured replay buffer; on the host, it prefetches `drawn` transitions per iteration.

    Raises:
        ConfigError: The buffer is too small, does not fit, or lacks a requested feature.
    """
    steps, kind, more = cfg.replay.capacity // env.num_envs, Replay, {}
    if env.images:
        steps -= steps % BLOCK if cfg.replay.compress else 0
        kind, more = PixelReplay, {"stack": cfg.network.encoder.frames, "compress": cfg.replay.compress}
    _check_settings(cfg, env, section, steps, device)
    storage = STORAGE[cfg.replay.storage]
    make: Any = partial(kind, steps, env, rollout.acted_on, n_step=cfg.n_step, gamma=cfg.gamma, storage=storage, **more)
    if device.type == "meta":
        return make(device=device)
    on_host, memory = cfg.replay.device is not None, make(device=torch.device("meta"))
    if on_host and env.images and (needed := _prefetched_bytes(cfg, memory)) > (free := _free_bytes(device)):
        smaller = max(1, int(0.5 * cfg.batch_size * free / needed))
        raise ConfigError(
            f"prefetched images need {needed / 1e9:.3g} GB on {device}, but only {free / 1e9:.3g} GB is free",
            key=f"{section}.replay.device=cpu",
            hint=f"Try {section}.batch_size={smaller}, or a smaller {section}.horizon",
        )
    size = memory.expected_bytes + (4 * steps * env.num_envs if cfg.replay.alpha > 0.0 else 0)  # priorities
    _check_room(cfg.replay, f"{section}.replay", size, torch.device(cfg.replay.device or device))
    memory = make(device=CPU if on_host else device)
    return HostReplay(memory, rollout, device=device, size=drawn, seed=seed) if on_host else memory


def _check_settings(cfg: OffPolicyConfig, env: EnvSpec, section: str, steps: int, device: torch.device) -> None:
    envs, alpha, key = env.num_envs, cfg.replay.alpha, f"{section}.replay"
    needed = max(cfg.n_step + 1 + (cfg.network.encoder.frames - 1 if env.images else 0), cfg.horizon)
    if cfg.replay.compress:
        needed = -(-needed // BLOCK) * BLOCK
        if cfg.replay.device is None or not env.images:
            hint = f"Try {key}.{'device=cpu' if env.images else 'compress=false'}"
            raise ConfigError("only images in host memory can be compressed", key=f"{key}.compress=true", hint=hint)
    if steps < needed:
        problem = f"holds only {steps} control steps with num_envs={envs}, but {needed} are needed"
        hint = f"Try {key}.capacity={needed * envs}"
        raise ConfigError(problem, key=f"{key}.capacity", got=cfg.replay.capacity, hint=hint)
    if cfg.learning_starts > steps * envs:
        limit, key = f"at most {steps * envs} (size of the replay buffer)", f"{section}.learning_starts"
        hint = f"Try {key}={max(cfg.batch_size, steps * envs // 10)}"
        raise ConfigError("no update would ever run", key=key, expected=limit, got=cfg.learning_starts, hint=hint)
    problem = ""
    if alpha > 0.0 and cfg.replay.device is not None:
        problem = f"prioritised replay is not supported with {key}.device=cpu, which prefetches samples"
    elif alpha > 0.0 and device.type == "cuda" and torch.are_deterministic_algorithms_enabled():
        problem = "not supported with torch_deterministic=true: CUDA has no deterministic cumulative sum"
    if problem:
        raise ConfigError(problem, key=f"{key}.alpha", got=alpha, hint=f"Try {key}.alpha=0")


def _check_room(cfg: ReplayConfig, key: str, size: int, device: torch.device) -> None:
    """Raise ConfigError if `size` bytes do not fit on `device`, or on the host if checkpoints include the replay."""
    needs = {device: size}
    if cfg.save:
        needs[CPU] = needs.get(CPU, 0) + size
    for place, needed in needs.items():
        free = _free_bytes(place)
        if needed <= free:
            continue
        hint = f"Try {key}.capacity={int(0.5 * cfg.capacity * free / needed)}"
        if place.type == "cuda" and cfg.alpha == 0.0:
            hint += f" or {key}.device=cpu"
        elif place.type == "cpu" and cfg.save:
            hint += f" or {key}.save=false"
        problem = f"the replay buffer needs {needed / 1e9:.3g} GB on {place}, but only {free / 1e9:.3g} GB is free"
        raise ConfigError(problem, key=f"{key}.capacity", got=cfg.capacity, hint=hint)


def _free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else memory_available_bytes()


def _prefetched_bytes(cfg: OffPolicyConfig, memory: PixelReplay) -> int:
    """Return the size [bytes] of the images prefetched for the updates of this and the next iteration."""
    return 2 * cfg.horizon * cfg.updates * cfg.batch_size * memory.bytes_drawn


def describe_replay(cfg: OffPolicyConfig, replay: Replay | HostReplay, section: str, max_steps: int) -> str:
    """Describe the replay buffer for the banner."""
    on_host, memory = (True, replay.memory) if isinstance(replay, HostReplay) else (False, replay)
    size = f"{memory.num_steps} x {memory.num_envs}, {memory.expected_bytes / 1e9:.3g} GB{' on the host' * on_host}"
    if isinstance(memory, PixelReplay):
        size += f" ({memory.expected_bytes / (memory.num_steps * memory.num_envs) / 1e3:.3g} kB per transition"
        size += ", assuming an LZ4 ratio of 3)" if cfg.replay.compress else ")"
        size += f", {_prefetched_bytes(cfg, memory) / 1e9:.3g} GB of prefetched images" * on_host
    kept = f"saved in checkpoints ({section}.replay.save=false shrinks them, but a resumed run refills it)"
    if not cfg.replay.save:
        kept = "not in checkpoints: a resumed run refills it before learning"
    samples = memory.num_envs * cfg.horizon
    first, last = -(-cfg.learning_starts // samples), max_steps // cfg.horizon
    start = f"random actions for the first {cfg.learning_starts:,} transitions, until iteration {first}"
    if first + on_host > last:  # prefetching lags by one rollout
        fewest = max(cfg.batch_size, samples * last // 10)
        advice = f"{section}.learning_starts={fewest}"
        if -(-fewest // samples) + on_host > last:  # not even one batch is stored
            advice = f"max_iterations={10 * first}"
        start += f" of {last}: nothing will be learned. Try {advice}"
    return f"replay of {size}, {kept}; {start}"
