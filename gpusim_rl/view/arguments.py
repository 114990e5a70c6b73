"""Command-line arguments of play, record and snapshot. Imports torch only to open a player."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpusim_rl.errors import ConfigError
from gpusim_rl.files.paths import find_checkpoint
from gpusim_rl.machine.hardware import limit_openmp_spin
from gpusim_rl.settings.simulators import SIMULATORS
from gpusim_rl.settings.trust import add_trust_arguments

if TYPE_CHECKING:
    from gpusim_rl.view.player import Player


def add_player_arguments(parser: argparse.ArgumentParser, *, policy: str) -> None:
    """Add the arguments of `open_player` except `run` and `--num-envs`; `policy` is the default of `--policy`."""
    parser.add_argument("--policy", choices=["trained", "zero", "random"], default=policy, help="who acts")
    parser.add_argument(
        "--sim", choices=list(SIMULATORS), help="simulator (default: mujoco; newton for a run that was trained on it)"
    )
    add_trust_arguments(parser)


def add_picture_arguments(
    parser: argparse.ArgumentParser, *, width: int, height: int, with_policy: bool = False
) -> None:
    """Add picture size [pixels] and renderer; `with_policy` offers the policy's own images."""
    parser.add_argument("--overwrite", action="store_true", help="replace a file that exists")
    parser.add_argument("--width", type=positive, default=width, help=f"pixels (default: {width})")
    parser.add_argument("--height", type=positive, default=height, help=f"pixels (default: {height})")
    parser.add_argument(
        "--renderer",
        choices=["auto", "gl", "ray", *["policy"] * with_policy],
        default="auto",
        help="gl: OpenGL through EGL or OSMesa; ray: ray caster on the CPU; auto: the first that works"
        + "; policy: the images that the policy sees" * with_policy,
    )


def positive(text: str) -> int:
    """Parse a positive integer."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be positive, got {value}")
    return value


def check_video(path: Path, size: tuple[int, int]) -> None:
    """Raise ConfigError unless the name ends in .mp4 and width and height [pixels] are even."""
    if path.suffix != ".mp4":
        raise ConfigError(key="video", expected="a name ending in .mp4", got=path.name)
    if size[0] % 2 or size[1] % 2 or min(size) < 2:
        raise ConfigError(key="width and height of a video", expected="even numbers", got=size)


def open_player(args: argparse.Namespace, **options: Any) -> Player:
    """Open the player of a command line; `options` go to `Player.open`."""
    if args.policy == "trained":
        args.run = str(find_checkpoint(args.run).file)  # before torch is imported
    limit_openmp_spin()  # before torch is imported
    from gpusim_rl.view.player import Player

    options = {"num_envs": args.num_envs, "act": args.policy, "sim": args.sim, **options}
    return Player.open(args.run, trust=args.trust, config_dir=args.config_dir, **options)
