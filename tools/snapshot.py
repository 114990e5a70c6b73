"""Draw an image of a task or a run.

gpusim-rl snapshot Ant                                   an Ant at the start of an episode, as Ant.png
gpusim-rl snapshot Ant --steps 60 --policy random        a second later
gpusim-rl snapshot Ant --steps 300 --policy trained      the latest Ant run after 300 steps
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
from gpusim_rl.files.safe_open import free_name
from gpusim_rl.options import Parser, number
from gpusim_rl.view.arguments import check_out, open_player


def main(argv: list[str] | None = None) -> int:
    with friendly_errors():
        say(str(snapshot(parse(argv))))
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("snapshot", __doc__)
    parser.option("run", "or a task without a run")
    parser.options("--policy", "--num-envs", policy="zero", num_envs=1)
    parser.option("--steps", "before the image", type=number(int, 0), default=0)
    parser.option("--sim", note="mujoco; newton for a run trained on it")
    parser.option("--out", ".png", note="TASK.png in the current folder")
    parser.options("--overwrite", "--width", "--height", width=480, height=360)
    parser.option("--fill", "image fraction that the robot fills", "Output", type=number(float, 0.01, 1), default=0.86)
    parser.options("--renderer", "--trust", "--config-dir")
    return parser.parse_args(argv)


def snapshot(args: argparse.Namespace) -> Path:
    """Step the run, draw the image and return its path."""
    check_out(args.out, ".png", overwrite=args.overwrite)
    import_extra("PIL.Image", "view", "snapshot")
    with closing(open_player(args, from_yaml=True)) as player:
        from gpusim_rl.env import VecEnv
        from gpusim_rl.view.snapshot import add_seen, draw, write_png
        from gpusim_rl.view.video import seen

        env = player.env
        if not isinstance(env, VecEnv):
            hint = f"Try gpusim-rl record {shlex.quote(args.run)}"
            raise ConfigError("envs of another library are not supported", key=player.name, hint=hint)
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
