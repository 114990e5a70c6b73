"""How much memory a run will need, before it takes any.

The factors are fits to the resident memory of real runs; tests hold the estimate against such runs.
"""

from __future__ import annotations

from collections.abc import Callable

import mujoco
import torch

from gpusim_rl.config import RunConfig, SimConfig
from gpusim_rl.errors import ConfigError
from gpusim_rl.learn.chunks import most_workers
from gpusim_rl.learn.ppo import chunk_samples
from gpusim_rl.run.system import memory_available_bytes
from gpusim_rl.sim import SimChoice
from gpusim_rl.sim.mujoco import is_persistent
from gpusim_rl.sim.registry import SIMULATORS

# What a process needs anyway [B]: torch and MuJoCo; besides Warp and its kernels, or a CUDA context and workspaces.
_PROCESS, _WARP, _CUDA = 0.38e9, 0.25e9, 1.0e9
_MARGIN = 0.9  # of the free memory that a run may plan for
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


def learner_bytes(
    cfg: RunConfig, obs_size: int, num_actions: int, num_envs: int, device: torch.device, *, bf16: bool
) -> float:
    """Memory of rollout and training.

    Args:
        cfg: The run.
        obs_size: Numbers in all observation groups together.
        num_actions: Size of the action vector.
        num_envs: N.
        device: Where the learner lives.
        bf16: Networks run in bfloat16.
    """
    ppo, net = cfg.ppo, cfg.ppo.network
    columns = 4 * (3 * num_actions + 5)
    # Rollout, its copy arranged for training, advantages and returns, observations in float64 for their statistics.
    sample = (4 * obs_size + columns + 4) + (4 * obs_size + columns) + 48 + 12 * obs_size
    per_env = ppo.horizon * sample + 40 * obs_size
    # Activations of a minibatch and their gradients.
    trunks = 2 if net.separate else 1
    units = 6.5 * trunks * sum(net.hidden) + obs_size
    parameters = trunks * sum(a * b for a, b in zip([obs_size, *net.hidden], net.hidden, strict=False))
    if net.rnn is not None:
        cells = trunks * net.rnn_layers * net.rnn_size
        units += (36 if net.rnn == "lstm" else 20) * cells
        parameters += 4 * cells * (net.rnn_size + obs_size)
        per_env += 8 * cells * (2 + ppo.horizon / min(ppo.sequence_length, ppo.horizon))
    samples = min(ppo.minibatch_size, num_envs * ppo.horizon)
    gradients = 0
    if device.type == "cpu":
        chunk = chunk_samples(samples)
        gradients = -(-samples // chunk)  # of every chunk, until they are added up
        samples = min(samples, chunk * most_workers())  # the activations of so many samples exist at a time
    activations = samples * ((2 if bf16 else 4) * units + 2 * columns)
    return per_env * num_envs + activations + (20 + 4 * gradients) * parameters


def check_memory(model: mujoco.MjModel, cfg: RunConfig, choice: SimChoice, device: torch.device, *, bf16: bool) -> None:
    """Refuses a number of envs that cannot fit, before anything is built.

    How large observations are is not known yet; it is assumed that they are as large as the state.

    Args:
        model: One env.
        cfg: The run.
        choice: The simulator and its device.
        device: Where the learner lives.
        bf16: Networks run in bfloat16.

    Raises:
        ConfigError: With the estimate, what is free, and a number that fits.
    """

    def physics(num_envs: int) -> float:
        return simulator_bytes(model, cfg.sim, choice, num_envs)

    def learner(num_envs: int) -> float:
        return learner_bytes(cfg, model.nq + model.nv + model.nu, model.nu, num_envs, device, bf16=bf16)

    if choice.device == device:
        _check(cfg.num_envs, lambda num_envs: physics(num_envs) + learner(num_envs), device)
    else:
        _check(cfg.num_envs, physics, choice.device)
        _check(cfg.num_envs, learner, device)


def check_learner_memory(cfg: RunConfig, obs_size: int, num_actions: int, device: torch.device, *, bf16: bool) -> None:
    """The same for the learner alone, when the simulator stands and the observations are known.

    Raises:
        ConfigError: With the estimate, what is free, and a number that fits.
    """
    _check(cfg.num_envs, lambda n: learner_bytes(cfg, obs_size, num_actions, n, device, bf16=bf16), device)


def _check(num_envs: int, need: Callable[[int], float], device: torch.device) -> None:
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else memory_available_bytes()
    if need(num_envs) <= free * _MARGIN:
        return
    powers = (1 << exponent for exponent in reversed(range((num_envs - 1).bit_length())))
    fits = next((number for number in powers if need(number) <= free * _MARGIN), None)
    raise ConfigError(
        f"num_envs={num_envs} does not fit: it needs about {need(num_envs) / 1e9:.3g} GB"
        f" {f'on {device}' if device.type == 'cuda' else 'of RAM'}, {free / 1e9:.3g} GB are free; "
        + ("free some memory" if fits is None else f"try num_envs={fits}")
    )
