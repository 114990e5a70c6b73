"""Draw one picture of a task or a run, framed on its robot; works without a display.

python tools/snapshot.py Ant                                     Ant.png, an env at the start of an episode
python tools/snapshot.py Ant --steps 60 --policy random          a second later
python tools/snapshot.py Ant --policy trained --steps 300        what the latest Ant run does
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    import _checkout  # noqa: F401

import argparse
import shlex
from contextlib import closing
from pathlib import Path

from gpusim_rl.errors import ConfigError, friendly_errors, import_extra, say
from gpusim_rl.files.paths import check_out, free_name
from gpusim_rl.view.arguments import add_picture_arguments, add_player_arguments, open_player, positive


def main(argv: list[str] | None = None) -> int:
    with friendly_errors():
        say(str(snapshot(parse(argv))))
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="snapshot", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run", help="task, run folder or checkpoint")
    parser.add_argument("--out", type=Path, help="png to write (default: the task's name, here)")
    parser.add_argument("--steps", type=not_negative, default=0, help="control steps before the picture (default: 0)")
    parser.add_argument("--num-envs", type=positive, default=1, help="tiles of the grid (default: 1)")
    parser.add_argument("--fill", type=share, default=0.86, help="share of the picture for the robot (default: 0.86)")
    add_picture_arguments(parser, width=480, height=360)
    add_player_arguments(parser, policy="zero")
    return parser.parse_args(argv)


def not_negative(text: str) -> int:
    """Return the value of an argument that must be 0 or more."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must not be negative, got {value}")
    return value


def share(text: str) -> float:
    """Return the value of an argument that must be above 0 and at most 1."""
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, got {value:g}")
    return value


def snapshot(args: argparse.Namespace) -> Path:
    """Play the run up to the picture, draw it and return its file."""
    check_out(args.out, ".png", overwrite=args.overwrite)
    import_extra("PIL.Image", "view", "snapshot")
    with closing(open_player(args, from_yaml=True)) as player:
        from gpusim_rl.env import VecEnv
        from gpusim_rl.view.snapshot import add_seen, draw, write_png
        from gpusim_rl.view.video import seen

        env = player.env
        if not isinstance(env, VecEnv):
            hint = f"Try tools/record.py {shlex.quote(args.run)}"
            raise ConfigError("snapshot needs one of our simulators", key=player.name, hint=hint)
        for _ in range(args.steps):
            player.step()
        sim = env.sim
        poses = sim.poses.cpu().numpy()
        pixels = draw(sim.scene, poses, args.width, args.height, args.renderer, args.fill)
        if env.images:
            pixels = add_seen(pixels, seen(player))
        default = Path(f"{env.name}.png")
        path = args.out or (default if args.overwrite else free_name(default))
    write_png(path, pixels)
    return path


if __name__ == "__main__":
    sys.exit(main())
