"""gpusim_rl: reinforcement learning on simulators that step thousands of envs at once.

Importing the package is free: torch and the simulators load with the first name that needs them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpusim_rl.api import make_env, train
    from gpusim_rl.env.task import Task, TaskConfig
    from gpusim_rl.learn.algorithm import Algorithm
    from gpusim_rl.sim.scene import Scene

__version__ = "0.1.0"
__all__ = ["Algorithm", "Scene", "Task", "TaskConfig", "__version__", "make_env", "train"]

_HOME = {
    "Algorithm": "gpusim_rl.learn.algorithm",
    "Scene": "gpusim_rl.sim.scene",
    "Task": "gpusim_rl.env.task",
    "TaskConfig": "gpusim_rl.env.task",
    "make_env": "gpusim_rl.api",
    "train": "gpusim_rl.api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'gpusim_rl' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
