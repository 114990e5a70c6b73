"""Adapters: our environments in the interfaces of other libraries, so that their trainers run on our tasks.

    from gpusim_rl.connect import RslRlEnv     # rsl_rl 5.5     pip install 'gpusim-rl[rsl-rl]'
    from gpusim_rl.connect import SkrlEnv      # skrl 2.1       pip install 'gpusim-rl[skrl]'
    from gpusim_rl.connect import RlGamesEnv   # rl_games 1.6   pip install 'gpusim-rl[rl-games]'
    from gpusim_rl.connect import Sb3Env       # SB3 2.9        pip install 'gpusim-rl[sb3]'

They change the interface and nothing else. docs/connect.md says how each library treats time limits, diverged envs and
staggered starts. Adapters of libraries that learn from tensors never copy to the host.

A module is imported when its name above is first used. A missing library is a ConfigError with the pip command.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gpusim_rl.errors import import_extra

if TYPE_CHECKING:
    from gpusim_rl.connect.rl_games import RlGamesEnv
    from gpusim_rl.connect.rsl_rl import RslRlEnv
    from gpusim_rl.connect.sb3 import Sb3Env
    from gpusim_rl.connect.skrl import SkrlEnv

__all__ = ["RlGamesEnv", "RslRlEnv", "Sb3Env", "SkrlEnv"]

# Our module, which is the name of our extra but for hyphens, and the library's module, by class.
_MODULES = {
    "RlGamesEnv": ("rl_games", "rl_games"),
    "RslRlEnv": ("rsl_rl", "rsl_rl"),
    "Sb3Env": ("sb3", "stable_baselines3"),
    "SkrlEnv": ("skrl", "skrl"),
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, library = _MODULES[name]
    import_extra(library, module.replace("_", "-"), f"gpusim_rl.connect.{name}")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
