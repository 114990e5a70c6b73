"""Policies outside of training: run, adopt, stress and share export folders. Imports torch only to open a player."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpusim_rl.errors import ConfigError, say
from gpusim_rl.export.of_run import is_export
from gpusim_rl.files.safe_open import writing
from gpusim_rl.machine.hardware import import_torch
from gpusim_rl.view.arguments import open_player

if TYPE_CHECKING:
    from gpusim_rl.view.player import Player


def open_shown(args: argparse.Namespace, **options: Any) -> Player:
    """Open a run (see `open_player`), or the untrusted export folder `args.run`, as a player."""
    if not is_export(args.run):
        return open_player(args, **options)
    for key in (f"--sim {args.sim}" * (args.sim is not None), "--policy random" * (args.policy == "random")):
        if key:
            raise ConfigError("has no effect on an export folder, which plain MuJoCo steps", key=key)
    import_torch()
    from gpusim_rl.deployed.exported_task import open_export

    return open_export(Path(args.run), options.get("num_envs", args.num_envs), args.policy)


def write_results(folder: Path, name: str, results: Mapping[str, Any], figure: Any = None) -> None:
    """Write `<name>.json` and, with a matplotlib figure, `<name>.png`, replacing earlier ones; print their paths."""
    files = [folder / f"{name}.json", *[folder / f"{name}.png"] * (figure is not None)]
    with writing(files[0]) as file:
        file.write(f"{json.dumps(results, indent=2, allow_nan=False)}\n".encode())
    if figure is not None:
        from gpusim_rl.view.charts import save

        with writing(files[1]) as file:
            save(figure, file, "png")
    say(*map(str, files))
