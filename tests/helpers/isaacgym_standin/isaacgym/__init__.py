"""A stand-in for Isaac Gym Preview 4: the part of its documented API that `sim=isaacgym` uses, over C MuJoCo.

It raises `ContractError` where the real library would crash or silently compute something else.
"""

from __future__ import annotations

import sys

if "torch" in sys.modules:
    raise ImportError("PyTorch was imported before isaacgym modules.  Please import torch after isaacgym modules.")
