"""gpusim_rl: reinforcement learning on simulators that step thousands of envs at once.

Importing the package is cheap: torch and the simulators are imported on first use of a name that needs them.
"""

from __future__ import annotations

import importlib

from gpusim_rl.public import HOME, __version__

TYPE_CHECKING = False  # without `typing`: commands install their Ctrl-C handlers before slower imports
if TYPE_CHECKING:
    from typing import Any

    from gpusim_rl.api import make_env, train
    from gpusim_rl.env.task import Task, TaskConfig
    from gpusim_rl.learn.algorithm import Algorithm
    from gpusim_rl.sim.scene import Scene

__all__ = ["Algorithm", "Scene", "Task", "TaskConfig", "__version__", "make_env", "train"]


def __getattr__(name: str) -> Any:
    if name not in HOME:
        raise AttributeError(f"module 'gpusim_rl' has no attribute {name!r}")
    value = getattr(importlib.import_module(HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
