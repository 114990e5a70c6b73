"""Checkout to measure: process environment, provenance, and output files."""

from __future__ import annotations

import importlib.metadata
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def process_environment(**more: str) -> dict[str, str]:
    """Return the environment variables of this process with the checkout in PYTHONPATH, updated with `more`."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, **more}


def provenance(*exclude: Path) -> dict[str, Any]:
    """Return commit, machine and versions; changes to the output files `exclude` do not count as dirty."""
    from gpusim_rl.files.provenance import describe_environment, git_state
    from throughput.baselines import BASELINES

    environment = describe_environment()
    for library in BASELINES.values():
        with suppress(importlib.metadata.PackageNotFoundError):
            environment["versions"][library.distribution] = importlib.metadata.version(library.distribution)
    return {"git": git_state(*exclude)[0], "environment": environment}


def require_device(name: str) -> None:
    """Check that a device exists.

    Args:
        name: `cpu`, `cuda` or `cuda:<index>`.

    Raises:
        ConfigError: There is no such device.
    """
    from gpusim_rl.errors import ConfigError

    if name == "cpu":
        return
    import torch

    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(name.partition(":")[2] or 0) >= found:
        built = "" if torch.version.cuda else f" (torch {torch.__version__} is built without CUDA)"
        raise ConfigError(f"--device {name}: torch finds {found} CUDA devices{built}; try --device cpu")


def write(path: Path, text: str) -> None:
    """Write a file atomically.

    Raises:
        ConfigError: The file cannot be written.
    """
    from gpusim_rl.errors import ConfigError
    from gpusim_rl.files.safe_open import replacing

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; try another --out") from None
