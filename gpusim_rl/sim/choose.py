"""Choice of simulator and device."""

from __future__ import annotations

import importlib
import logging
from dataclasses import dataclass

import torch

from gpusim_rl.errors import ConfigError, TaskError
from gpusim_rl.files.provenance import check_versions
from gpusim_rl.settings.schema import SimConfig
from gpusim_rl.settings.simulators import NO_SIMULATOR, OLDER, SIMULATORS, check_warp, default_simulator
from gpusim_rl.sim.interface import Sim
from gpusim_rl.sim.scene import Scene

logger = logging.getLogger("gpusim_rl")


@dataclass(frozen=True, slots=True)
class SimChoice:
    """Chosen simulator and device, and the reason for the choice."""

    name: str
    device: torch.device
    reason: str

    def __str__(self) -> str:
        if self.name == NO_SIMULATOR:
            return f"{self.reason}, on {self.device}"
        return f"{self.name} on {self.device} ({self.reason})"


def choose_sim(name: str, device: torch.device) -> SimChoice:
    """Resolve `sim=auto`; raise ConfigError if a named simulator does not run on the device."""
    if name == "auto":
        reason = "auto: CUDA device" if device.type == "cuda" else "auto: no CUDA device in use"
        return SimChoice(default_simulator(device.type).name, device, reason)
    kinds = SIMULATORS[name].devices
    if device.type not in kinds:
        other = f"sim={default_simulator(device.type).name}, or sim_device={kinds[0]}"
        hint = f"Try {other}; the policy can run on another device"
        raise ConfigError(f"sim={name} runs on {' or '.join(kinds)} only, got device {device}", hint=hint)
    return SimChoice(name, device, "as configured")


def make_sim(scene: Scene, choice: SimChoice, num_envs: int, cfg: SimConfig) -> Sim:
    """Build the chosen simulator, importing only its own library; raise ConfigError if the scene is unsupported."""
    simulator = SIMULATORS[choice.name]
    if simulator.cpu_threads and (cfg.njmax or cfg.nconmax):
        logger.warning("sim.njmax and sim.nconmax have no effect: sim=%s sizes its buffers itself", choice.name)
    scene.choose(cfg.integrator, cfg.cone)
    if scene.model.nv == 0:
        raise TaskError("the scene has no joints: nothing in it can move")
    if simulator.uses_warp:
        check_warp(f"sim={choice.name}", "Try sim=mujoco sim_device=cpu")
    check_versions(f"sim={simulator.name}", simulator.needs, OLDER)
    module = importlib.import_module(f"gpusim_rl.sim.{simulator.name}")
    return getattr(module, simulator.cls)(scene, num_envs, cfg, choice.device)
