"""Registry of simulators. Imports neither simulators nor torch.

To add one, write its class (`interface.Sim`), an entry here, and `cfg/sim/<name>.yaml`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpusim_rl.errors import ConfigError, import_optional


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulator:
    """Metadata of a simulator, available without importing it."""

    name: str  # name in `sim=<name>`; its file is `gpusim_rl/sim/<name>.py`
    cls: str  # an `interface.Sim` in that file, built from (scene, num_envs, cfg, device)
    library: str  # module imported by that file
    needs: tuple[str, ...] = ("mujoco>=3.17,<5",)  # required versions; our package metadata allows older versions
    extra: str | None = None  # extra that installs the library, if any
    devices: tuple[str, ...]  # supported `torch.device.type` values
    default_on: tuple[str, ...] = ()  # devices on which `sim=auto` selects it
    replay_sim: str = "mujoco"  # simulator with the same physics that replays its runs on any machine
    cpu_threads: bool = False  # physics on CPU threads in host memory; uses `sim.num_threads` and `sim.persistent`
    uses_warp: bool = False  # physics in Warp kernels; uses `sim.graph`; one thread on the CPU


WARP_PACKAGES = ("mujoco>=3.17,<5", "mujoco-warp>=4.0,<5")  # 3.17 has no SetConstGroup

_CPU = ("cpu",)
_ON_WARP: Mapping[str, Any] = {"needs": WARP_PACKAGES, "devices": ("cuda", "cpu"), "uses_warp": True}
_ALL = (
    Simulator(name="mujoco", cls="MujocoSim", library="mujoco", devices=_CPU, default_on=_CPU, cpu_threads=True),
    Simulator(name="mjwarp", cls="MjwarpSim", library="mujoco_warp", default_on=("cuda",), **_ON_WARP),
    Simulator(name="newton", cls="NewtonSim", library="newton", extra="newton", replay_sim="newton", **_ON_WARP),
)
SIMULATORS: Mapping[str, Simulator] = {simulator.name: simulator for simulator in _ALL}
WARP_PYTHON = (3, 11)  # oldest Python for MuJoCo Warp 4.0; older versions support only `sim=mujoco`
OLDER = ", in an environment without Isaac Lab and mjlab, which require older versions"  # suffix of installation hints
NO_SIMULATOR = "none"  # simulator name of another library's envs


def default_simulator(device: str) -> Simulator:
    """Return the simulator that `sim=auto` selects on a `torch.device.type`."""
    return next(simulator for simulator in SIMULATORS.values() if device in simulator.default_on)


def check_warp(user: str, hint: str = "") -> None:
    """Raise ConfigError unless MuJoCo Warp can be imported; `user` is the setting that needs it."""
    if sys.version_info < WARP_PYTHON:  # the pip command would fail
        raise ConfigError(key=user, expected="Python 3.11 or later", got=tuple(sys.version_info[:2]), hint=hint)
    import_optional("mujoco_warp", WARP_PACKAGES[1], user)
