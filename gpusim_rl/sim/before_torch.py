"""Libraries of simulators that must be imported before torch; so nothing here imports it."""

from __future__ import annotations

import importlib
import sys

from gpusim_rl.errors import ConfigError
from gpusim_rl.simulators import SIMULATORS


def import_before_torch(name: str) -> None:
    """Imports the library of a simulator, if that refuses to be imported after torch.

    Args:
        name: As in `sim=<name>`.

    Raises:
        ConfigError: It is not installed, or does not load here.
    """
    simulator = SIMULATORS.get(name)
    if simulator is None or simulator.before_torch is None:
        return
    try:
        importlib.import_module(simulator.before_torch)
    except ModuleNotFoundError as error:
        if error.name != simulator.library:
            raise
        raise ConfigError(f"sim={name} needs {simulator.by_hand}; try sim=mujoco") from None
    except (ImportError, RuntimeError) as error:
        python = ".".join(map(str, sys.version_info[:2]))
        reason = str(error).strip().partition("\n")[0]
        here = f"here, in Python {python}, it does not load: {reason}"
        raise ConfigError(f"sim={name} needs {simulator.by_hand}; {here}; try sim=mujoco") from None
