"""Adapters: our environments in the interfaces of other libraries, so that their own trainers run on our tasks.

    from gpusim_rl.connect import RslRlEnv     # rsl_rl 5.5     pip install 'gpusim_rl[rsl_rl]'
    from gpusim_rl.connect import SkrlEnv      # skrl 2.1       pip install 'gpusim_rl[skrl]'
    from gpusim_rl.connect import RlGamesEnv   # rl_games 1.6   pip install 'gpusim_rl[rl_games]'
    from gpusim_rl.connect import Sb3Env       # SB3 2.9        pip install 'gpusim_rl[sb3]'

All of them keep what `VecEnv` promises:

- An env whose episode ends is reset in the same step; the observation that comes back is the next episode's first.
- The time limit is not the task's end: what follows is worth the value of the last observation. Each library is told
  where the limit struck, and gets the last observation if it can take it.
- A diverged env (its physics went bad) gives reward 0 and looks like one that ran into the time limit, with the last
  sound observation as its last: to value it by what was known before neither rewards nor punishes the blow-up. No
  library has a way to leave a sample out, as our own trainer does.
- Episodes start staggered if the task says so (`randomize_episode_start`).
- The adapters of tensor libraries read nothing back to the host.

The modules load with the names above; a library that is not installed is one line that says how to install it.
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

# Our module, which is also the name of our extra, and the library's module.
_HOME = {
    "RlGamesEnv": ("rl_games", "rl_games"),
    "RslRlEnv": ("rsl_rl", "rsl_rl"),
    "Sb3Env": ("sb3", "stable_baselines3"),
    "SkrlEnv": ("skrl", "skrl"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home, library = _HOME[name]
    import_extra(library, home, f"gpusim_rl.connect.{name}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
