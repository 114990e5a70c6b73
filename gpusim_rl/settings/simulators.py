"""The simulators, each declared once: where it is, and where it runs.

This file imports no simulator and no torch: the command line, the configuration and the tools read it. To add a
simulator, write a file with its class (`interface.Sim`), an entry here, and `cfg/sim/<name>.yaml`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulator:
    """Facts about a simulator that the rest of the package knows without importing it."""

    name: str
    """Name, as in `sim=<name>`; its file is `gpusim_rl/sim/<name>.py`."""
    cls: str
    """Class in that file: made with (scene, num_envs, cfg, device), it follows `interface.Sim`."""
    library: str
    """Module that this file imports."""
    needs: tuple[str, ...] = ("mujoco>=3.17,<5",)
    """Versions of packages. The package's own metadata admit older ones, which Isaac Lab and mjlab pin."""
    extra: str | None = None
    """Our extra that installs the library; None if it is always installed."""
    devices: tuple[str, ...]
    """Kinds of device it runs on, as `torch.device.type`."""
    default_on: tuple[str, ...] = ()
    """Kinds of device on which `sim=auto` takes it."""
    plays_on: str = "mujoco"
    """Simulator that shows its runs: it runs on every machine where this one does, and has the same physics."""
    cpu_threads: bool = False
    """Physics runs on CPU threads, in host memory: `sim.num_threads` and `sim.persistent` act on it."""
    uses_warp: bool = False
    """Physics is Warp kernels: `sim.graph` acts on it, and on the CPU it runs on one thread."""


WARP_PACKAGES = ("mujoco>=3.17,<5", "mujoco-warp>=4.0,<5")  # 3.17 has no SetConstGroup

SIMULATORS: Mapping[str, Simulator] = {
    simulator.name: simulator
    for simulator in (
        Simulator(
            name="mujoco",
            cls="MujocoSim",
            library="mujoco",
            devices=("cpu",),
            default_on=("cpu",),
            cpu_threads=True,
        ),
        Simulator(
            name="mjwarp",
            cls="MjwarpSim",
            library="mujoco_warp",
            needs=WARP_PACKAGES,
            devices=("cuda", "cpu"),
            default_on=("cuda",),
            uses_warp=True,
        ),
        Simulator(
            name="newton",
            cls="NewtonSim",
            library="newton",
            needs=WARP_PACKAGES,
            extra="newton",
            devices=("cuda", "cpu"),
            plays_on="newton",
            uses_warp=True,
        ),
    )
}

WARP_PYTHON = (3, 11)
"""Oldest Python that MuJoCo Warp 4.0 supports: on an older one there is `sim=mujoco` alone."""

NO_SIMULATOR = "none"
"""In place of a name, where the envs are of another library."""


def default_simulator(device: str) -> Simulator:
    """Returns what `sim=auto` takes on a kind of device, as `torch.device.type`."""
    return next(simulator for simulator in SIMULATORS.values() if device in simulator.default_on)
