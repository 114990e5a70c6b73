"""Physics: `num_envs` copies of one `Scene`, stepped together.

A task sees only the protocols of `interface.py`; `sim=` chooses the simulator behind them. Importing this package is
free: torch and the simulators load with the first name that needs them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpusim_rl.sim.choose import SimChoice, choose_sim, make_sim
    from gpusim_rl.sim.interface import Articulation, Bodies, Contacts, Dynamics, Rays, Sensor, Sim, Sites
    from gpusim_rl.sim.params import Param
    from gpusim_rl.sim.scene import Scene

__all__ = [
    "Articulation",
    "Bodies",
    "Contacts",
    "Dynamics",
    "Param",
    "Rays",
    "Scene",
    "Sensor",
    "Sim",
    "SimChoice",
    "Sites",
    "choose_sim",
    "make_sim",
]

_HOME = {
    **dict.fromkeys(("SimChoice", "choose_sim", "make_sim"), "gpusim_rl.sim.choose"),
    **dict.fromkeys(
        ("Articulation", "Bodies", "Contacts", "Dynamics", "Rays", "Sensor", "Sim", "Sites"), "gpusim_rl.sim.interface"
    ),
    "Param": "gpusim_rl.sim.params",
    "Scene": "gpusim_rl.sim.scene",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'gpusim_rl.sim' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
