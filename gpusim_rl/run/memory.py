"""How much memory a run will need, before it takes any."""

from __future__ import annotations

import mujoco
import torch

from gpusim_rl.config import RunConfig
from gpusim_rl.errors import ConfigError
from gpusim_rl.run.system import memory_available_bytes
from gpusim_rl.sim import SimChoice
from gpusim_rl.sim.mujoco import is_persistent

_BASE = 1.0e9  # torch, MuJoCo or Warp, and what a process needs anyway [B]
_MARGIN = 0.9  # of the free memory that a run may plan for


def estimate_bytes(model: mujoco.MjModel, cfg: RunConfig, sim: str) -> tuple[float, float]:
    """Fixed bytes, and bytes per world.

    An estimate from the sizes of the model and the settings: state and derived arrays of the simulator, the rollout,
    its copy arranged for training, and the activations of a minibatch.
    """
    obs = model.nq + model.nv + model.nu + model.nsensordata + 16
    sample = 4 * (obs + 3 * model.nu + 8)
    per_env = cfg.ppo.horizon * sample * 2.5 + 40 * obs
    if sim == "mujoco":
        row = 8 * (model.nq + 8 * model.nv + 6 * model.nbody + model.nu) + 12 * model.nsensordata
        persistent = is_persistent(cfg.sim, cfg.num_envs)
        per_env += row + (model.narena + 400 * model.nv**2 if persistent else 0)
    else:
        rows = 8 * model.nv + 64
        per_env += 4.0 * (rows * (model.nv + 20) + 120 * model.nbody + 4 * model.nv**2) + 12 * model.nsensordata
    units = sum(cfg.ppo.network.hidden) * (2 if cfg.ppo.network.separate else 1) + obs
    per_sample = 4 * 5 * units
    fixed = _BASE + min(cfg.ppo.minibatch_size, 2**18) * per_sample
    return fixed, per_env


def check_memory(model: mujoco.MjModel, cfg: RunConfig, choice: SimChoice) -> None:
    """Refuses a number of worlds that cannot fit.

    Raises:
        ConfigError: With the estimate, what is free, and a number that fits.
    """
    fixed, per_env = estimate_bytes(model, cfg, choice.name)
    device = choice.device
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else memory_available_bytes()
    need = fixed + per_env * cfg.num_envs
    if need <= free * _MARGIN:
        return
    fits = int((free * _MARGIN - fixed) / per_env)
    power = 1 << (fits.bit_length() - 1) if fits > 0 else 0
    advice = f"try num_envs={power}" if power else "free some memory"
    where = f"on {device}" if device.type == "cuda" else "of RAM"
    raise ConfigError(
        f"num_envs={cfg.num_envs} does not fit: it needs about {need / 1e9:.3g} GB {where},"
        f" {free / 1e9:.3g} GB are free; {advice}"
    )
