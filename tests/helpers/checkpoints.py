"""Checkpoint contents, and forged checkpoint files."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import torch

PAYLOAD = {
    "policy": {"w": torch.arange(6.0).reshape(2, 3)},
    "rng": torch.get_rng_state(),
    "iteration": 7,
    "best_return": None,
    "config": {"hidden": [32, 32], "activation": "elu", "rate": 1e-3, "separate": False},
}


def sealed(path: Path, archive: bytes) -> None:
    """Write an archive as a checkpoint with a valid digest."""
    signed = archive[:-2] + struct.pack("<H", 64)
    path.write_bytes(signed + hashlib.sha256(signed).hexdigest().encode())
