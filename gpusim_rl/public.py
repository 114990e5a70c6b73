"""Package version, and the module of each public name. Imports nothing."""

from __future__ import annotations

__version__ = "0.1.0"

HOME = {
    "Algorithm": "gpusim_rl.learn.algorithm",
    "Scene": "gpusim_rl.sim.scene",
    "Task": "gpusim_rl.env.task",
    "TaskConfig": "gpusim_rl.env.task",
    "make_env": "gpusim_rl.api",
    "train": "gpusim_rl.api",
}
