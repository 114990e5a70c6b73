"""Adapters that expose our environments through the interfaces of other RL libraries.

    from gpusim_rl.connect import RslRlEnv     # rsl_rl 5.5     pip install 'rsl-rl-lib~=5.5'
    from gpusim_rl.connect import SkrlEnv      # skrl 2.1       pip install 'skrl~=2.1'
    from gpusim_rl.connect import RlGamesEnv   # rl_games 1.6   pip install 'rl-games~=1.6'
    from gpusim_rl.connect import Sb3Env       # SB3 2.9        pip install 'stable-baselines3~=2.9'

docs/connect.md has a script for each.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gpusim_rl.errors import import_optional
from gpusim_rl.files.provenance import check_versions

if TYPE_CHECKING:
    from gpusim_rl.connect.rl_games import RlGamesEnv
    from gpusim_rl.connect.rsl_rl import RslRlEnv
    from gpusim_rl.connect.sb3 import Sb3Env
    from gpusim_rl.connect.skrl import SkrlEnv

__all__ = ["RlGamesEnv", "RslRlEnv", "Sb3Env", "SkrlEnv"]

LIBRARIES = {
    "rsl_rl": ("rsl_rl", "rsl-rl-lib~=5.5"),
    "skrl": ("skrl", "skrl~=2.1"),
    "rl_games": ("rl_games", "rl-games~=1.6"),
    "sb3": ("stable_baselines3", "stable-baselines3~=2.9"),
}
"""Import name and tested versions, keyed by our module name."""

_MODULES = {"RlGamesEnv": "rl_games", "RslRlEnv": "rsl_rl", "Sb3Env": "sb3", "SkrlEnv": "skrl"}


def require_library(name: str, needed_by: str) -> None:
    """Raise ConfigError unless a library is installed in a tested version."""
    module, requirement = LIBRARIES[name]
    import_optional(module, requirement, needed_by)
    check_versions(needed_by, [requirement])


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require_library(_MODULES[name], f"gpusim_rl.connect.{name}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
