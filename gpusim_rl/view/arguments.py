"""Command-line arguments for rendering. Imports torch only to open a player."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpusim_rl.errors import ConfigError
from gpusim_rl.files.paths import find_checkpoint
from gpusim_rl.machine.hardware import import_torch

if TYPE_CHECKING:
    from gpusim_rl.view.player import Player


def check_video(path: Path, size: tuple[int, int]) -> None:
    """Raise ConfigError unless the name ends in .mp4 and width and height [pixels] are even."""
    if path.suffix != ".mp4":
        raise ConfigError(key="video", expected="a name ending in .mp4", got=path.name)
    if size[0] % 2 or size[1] % 2 or min(size) < 2:
        raise ConfigError(key="video width and height", expected="even numbers", got=size)


def check_out(out: Path | None, *endings: str, overwrite: bool) -> None:
    """Raise ConfigError if `--out` has a wrong ending, is in a missing folder, or exists without `overwrite`."""
    if out is not None and endings and out.suffix not in endings:
        raise ConfigError(key="--out", expected=f"a name ending in {' or '.join(endings)}", got=str(out))
    if out is not None and not out.parent.is_dir():
        raise ConfigError(f"no such folder: {out.parent}", key=f"--out {out}")
    if out is not None and out.exists() and not overwrite:
        raise ConfigError("already exists", key=f"--out {out}", hint="Try another name, or --overwrite")


def open_player(args: argparse.Namespace, **options: Any) -> Player:
    """Open the player that the arguments describe; `options` are passed to `Player.open`."""
    if args.policy == "trained":
        args.run = str(find_checkpoint(args.run).file)  # before torch is imported
    import_torch()
    from gpusim_rl.view.player import Player

    options = {"num_envs": args.num_envs, "act": args.policy, "sim": args.sim, **options}
    return Player.open(args.run, trust=args.trust, config_dir=args.config_dir, **options)
