"""Export folders for commands that take a run or an export. Imports torch only to export a run."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpusim_rl.errors import import_extra
from gpusim_rl.export import CARD
from gpusim_rl.files.paths import find_checkpoint
from gpusim_rl.machine.hardware import import_torch


def require_onnx(command: str) -> None:
    """Raise ConfigError unless the packages that `command` exports with are installed."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        import_extra(package, "export", command)


def is_export(name: str) -> bool:
    """Return whether a path is a folder written by `export` or `adopt`."""
    return os.path.isfile(os.path.join(name, CARD))  # False for a name that is too long


def results_folder(run: str) -> Path:
    """Return the folder for results: an export folder itself, a run's folder, or this one for a copied checkpoint."""
    return Path(run) if is_export(run) else find_checkpoint(run).run_dir or Path()


@contextmanager
def export_folder(args: argparse.Namespace, command: str) -> Iterator[Path]:
    """Yield `args.run` if it is an export folder, else a temporary export of that run."""
    if is_export(args.run):
        yield Path(args.run)
        return
    run = str(find_checkpoint(args.run).file)
    require_onnx(command)
    import_torch()
    from gpusim_rl.export.files import write_all

    options = {"trust": args.trust, "config_dir": args.config_dir, "int8": False}
    with tempfile.TemporaryDirectory(prefix="gpusim-rl-") as temporary:
        yield write_all(run, Path(temporary) / "export", **options)[0]
