"""How much memory a simulator will need. The factors are fits to the resident memory of real runs."""

from __future__ import annotations

import mujoco

from gpusim_rl.config import SimConfig
from gpusim_rl.sim.choose import SimChoice
from gpusim_rl.sim.mujoco import is_persistent
from gpusim_rl.simulators import SIMULATORS

# What a process needs anyway [B]: torch and MuJoCo; besides Warp and its kernels, or a CUDA context and workspaces.
_PROCESS, _WARP, _CUDA = 0.38e9, 0.25e9, 1.0e9
_MJDATA = 175e3  # an MjData of an empty model [B]


def simulator_bytes(model: mujoco.MjModel, cfg: SimConfig, choice: SimChoice, num_envs: int) -> float:
    """Memory of process and simulator, from the sizes of the model."""
    nv = model.nv
    simulator = SIMULATORS[choice.name]
    if simulator.cpu_threads:
        per_env = 8 * (model.nq + 8 * nv + 6 * model.nbody + model.nu) + 12 * model.nsensordata
        if is_persistent(cfg, num_envs):
            per_env += _MJDATA + 2 * mujoco.MjData(model).nbuffer
        return _PROCESS + per_env * num_envs
    from gpusim_rl.sim.mjwarp import estimate_buffers

    rows, contacts = estimate_buffers(model)
    rows, contacts = cfg.njmax or rows, cfg.nconmax or contacts
    numbers = rows * (nv + 14) + 45 * contacts + 120 * model.nbody + 6 * nv**2 + 40 * nv + 3 * model.nsensordata
    per_env = 4 * numbers * simulator.memory_factor
    return (_CUDA if choice.device.type == "cuda" else _PROCESS + _WARP) + per_env * num_envs
