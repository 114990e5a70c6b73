"""Simulations of `sim=isaacgym` on the stand-in for Isaac Gym."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpusim_rl.sim import before_torch

STANDIN = Path(__file__).parent / "isaacgym_standin"


@contextmanager
def standin() -> Iterator[Any]:
    """In the block `sim=isaacgym` has the stand-in; gives its `gymapi`."""
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if _ours(name)}
    sys.path.insert(0, str(STANDIN))
    before_torch._reasons.clear()
    torch = sys.modules.pop("torch")  # it was imported before, as it must not be
    try:
        importlib.import_module("isaacgym.gymapi")
    finally:
        sys.modules["torch"] = torch
    try:
        yield importlib.import_module("isaacgym.gymapi")
    finally:
        sys.path.remove(str(STANDIN))
        for name in list(sys.modules):
            if _ours(name):
                del sys.modules[name]
        sys.modules.update(before)


def _ours(name: str) -> bool:
    return name.split(".")[0] == "isaacgym" or name == "gpusim_rl.sim.isaacgym"
