"""How much memory a simulator will need: on Warp as measured with few envs, else by fits to real runs."""

from __future__ import annotations

import dataclasses
import gc
import logging
from collections.abc import Callable

import mujoco

from gpusim_rl.settings.schema import SimConfig
from gpusim_rl.settings.simulators import SIMULATORS
from gpusim_rl.sim.choose import SimChoice, make_sim
from gpusim_rl.sim.mujoco import is_persistent
from gpusim_rl.sim.scene import Scene

# What a process needs anyway [B]: torch and MuJoCo; besides Warp and its kernels. On CUDA: kernels and workspaces. The
# context is not counted: it stands when free memory is asked for.
_PROCESS, _WARP, _CUDA = 0.38e9, 0.25e9, 0.5e9
_MJDATA = 175e3  # an MjData of an empty model [B]
_FEW = (16, 32)

logger = logging.getLogger("gpusim_rl")


def simulator_bytes(scene: Scene, cfg: SimConfig, choice: SimChoice, substeps: int) -> Callable[[int], float]:
    """Memory of process and simulator [B], by the number of envs.

    On Warp all arrays have a row for each env. So the arrays of two small simulators are measured, in a control step.
    Of a simulator that is neither on Warp nor on CPU threads nothing is known: 0.

    Args:
        scene: One env.
        cfg: Settings of the simulator.
        choice: The simulator and its device.
        substeps: Physics steps of a control step.
    """
    if SIMULATORS[choice.name].cpu_threads:
        return lambda num_envs: _PROCESS + _bytes_per_env(scene.model, cfg, num_envs) * num_envs
    if not SIMULATORS[choice.name].uses_warp:
        return lambda num_envs: 0.0
    on_cuda = choice.device.type == "cuda"
    if on_cuda:  # a CUDA graph uses memory again that a physics step has freed, as eager code does; Warp's do not
        cfg = dataclasses.replace(cfg, graph=False)
    try:
        fewer, more = (_bytes_on_warp(scene, cfg, choice, substeps, num_envs) for num_envs in _FEW)
    except Exception as error:  # an estimate is no reason to end a run; what is wrong shows when the run's own is made
        logger.debug("the memory of the simulator cannot be estimated: %s", error)
        return lambda num_envs: 0.0
    gc.collect()  # the small simulators hold themselves
    per_env = (more - fewer) / (_FEW[1] - _FEW[0])
    fixed = (_CUDA if on_cuda else _PROCESS + _WARP) + fewer - per_env * _FEW[0]
    return lambda num_envs: fixed + per_env * num_envs


def _bytes_per_env(model: mujoco.MjModel, cfg: SimConfig, num_envs: int) -> float:
    per_env = 8 * (model.nq + 8 * model.nv + 6 * model.nbody + model.nu) + 12 * model.nsensordata
    return per_env + (_MJDATA + 2 * mujoco.MjData(model).nbuffer if is_persistent(cfg, num_envs) else 0)


def _bytes_on_warp(scene: Scene, cfg: SimConfig, choice: SimChoice, substeps: int, num_envs: int) -> int:
    from gpusim_rl.sim.warp import peak_bytes

    def step() -> None:
        sim = make_sim(scene, choice, num_envs, cfg)
        sim.step(substeps)
        sim.close()

    return peak_bytes(choice.device, step)
