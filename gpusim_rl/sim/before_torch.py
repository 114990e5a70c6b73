"""Libraries of simulators that must be imported before torch; so nothing here imports it."""

from __future__ import annotations

import importlib
import sys

from gpusim_rl.errors import ConfigError
from gpusim_rl.settings.simulators import SIMULATORS

_reasons: dict[str, str] = {}  # by simulator: why its library does not load; a second import would tell another one


def import_before_torch(name: str) -> None:
    """Imports the library of a simulator, if that must be done before torch.

    Where it cannot be imported, `require_library` tells. Settings can be checked without it.

    Args:
        name: As in `sim=<name>`.
    """
    simulator = SIMULATORS.get(name)
    if simulator is not None and simulator.before_torch is not None:
        try:
            importlib.import_module(simulator.before_torch)
        except (ImportError, RuntimeError) as error:
            if not (isinstance(error, ModuleNotFoundError) and error.name == simulator.library):
                _reasons.setdefault(name, str(error).strip().partition("\n")[0])


def require_library(name: str) -> None:
    """Imports such a library now, if it is not imported yet.

    Raises:
        ConfigError: It is not installed, or does not load here.
    """
    import_before_torch(name)
    simulator = SIMULATORS[name]
    if simulator.before_torch not in sys.modules:
        here = ""
        if name in _reasons:
            here = f"; here, in Python {'.'.join(map(str, sys.version_info[:2]))}, it does not load: {_reasons[name]}"
        raise ConfigError(f"sim={name} needs {simulator.by_hand}{here}; try sim=mujoco")
