"""Arguments of the tools that show a run: play, record and snapshot. Free of torch until a player is opened."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpusim_rl.errors import ConfigError
from gpusim_rl.files.paths import find_checkpoint
from gpusim_rl.settings.simulators import SIMULATORS
from gpusim_rl.settings.trust import add_trust_arguments

if TYPE_CHECKING:
    from gpusim_rl.view.player import Player


def add_player_arguments(parser: argparse.ArgumentParser, *, policy: str) -> None:
    """Adds what `open_player` reads, but for `run` and `--num-envs`; `policy` is the default of `--policy`."""
    parser.add_argument("--policy", choices=["trained", "zero", "random"], default=policy, help="who acts")
    parser.add_argument(
        "--sim", choices=list(SIMULATORS), help="simulator (default: mujoco; newton for a run that was trained on it)"
    )
    add_trust_arguments(parser)


def add_picture_arguments(parser: argparse.ArgumentParser, *, width: int, height: int, of_policy: bool = False) -> None:
    """Adds the size of a picture, with its defaults [pixels], and its renderer; `of_policy` adds what a policy sees."""
    parser.add_argument("--overwrite", action="store_true", help="replace a file that exists")
    parser.add_argument("--width", type=positive, default=width, help=f"pixels (default: {width})")
    parser.add_argument("--height", type=positive, default=height, help=f"pixels (default: {height})")
    parser.add_argument(
        "--renderer",
        choices=["auto", "gl", "ray", *["policy"] * of_policy],
        default="auto",
        help="gl: OpenGL through EGL or OSMesa; ray: ray caster on the CPU; auto: the first that works here"
        + "; policy: what the policy sees" * of_policy,
    )


def positive(text: str) -> int:
    """Returns the value of an argument that must be a positive integer."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be positive, got {value}")
    return value


def check_video(path: Path, size: tuple[int, int]) -> None:
    """Checks the name of a video and its width and height [pixels].

    Raises:
        ConfigError: The name does not end in .mp4 or the size is odd.
    """
    if path.suffix != ".mp4":
        raise ConfigError(f"a video's name must end in .mp4, got {path.name!r}")
    if size[0] % 2 or size[1] % 2 or min(size) < 2:
        raise ConfigError(f"width and height of a video must be even, got {size[0]}x{size[1]}")


def open_player(args: argparse.Namespace, **options: Any) -> Player:
    """Opens the player that a command line asks for; `options` are other arguments of `Player.open`."""
    if args.policy == "trained":
        args.run = str(find_checkpoint(args.run).file)  # before torch is imported
    from gpusim_rl.machine.hardware import limit_openmp_spin

    limit_openmp_spin()  # before torch is imported
    from gpusim_rl.view.player import Player

    options = {"num_envs": args.num_envs, "act": args.policy, "sim": args.sim, **options}
    return Player.open(args.run, trust=args.trust, config_dir=args.config_dir, **options)
