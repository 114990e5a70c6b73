"""Draw one picture of a task, or of a run: its robot, framed, with or without a display.

python tools/snapshot.py Ant                                     Ant.png, an env at the start of an episode
python tools/snapshot.py Ant --steps 60 --policy random          a second later
python tools/snapshot.py Ant --policy trained --steps 300        what the latest Ant run does
"""

from __future__ import annotations

import argparse
import sys
from contextlib import closing
from pathlib import Path


def main(argv: list[str] | None = None) -> int:
    """Write the picture and print its path."""
    from gpusim_rl.errors import friendly_errors, printable

    with friendly_errors():
        print(printable(str(snapshot(parse(argv)))))
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    from gpusim_rl.settings.simulators import SIMULATORS
    from gpusim_rl.settings.trust import add_trust_arguments

    parser = argparse.ArgumentParser(prog="snapshot", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run", help="task, run folder or checkpoint")
    parser.add_argument("--out", type=Path, help="png to write (default: the task's name, here)")
    parser.add_argument("--overwrite", action="store_true", help="replace a file that exists")
    parser.add_argument("--steps", type=not_negative, default=0, help="control steps before the picture (default: 0)")
    parser.add_argument("--num-envs", type=positive, default=1, help="tiles of the grid (default: 1)")
    parser.add_argument("--width", type=positive, default=480, help="pixels (default: 480)")
    parser.add_argument("--height", type=positive, default=360, help="pixels (default: 360)")
    parser.add_argument("--fill", type=share, default=0.86, help="of the picture, for the robot (default: 0.86)")
    parser.add_argument("--policy", choices=["zero", "random", "trained"], default="zero", help="who acts")
    parser.add_argument(
        "--sim", choices=list(SIMULATORS), help="simulator (default: mujoco; newton for a run that was trained on it)"
    )
    parser.add_argument(
        "--renderer",
        choices=["auto", "gl", "ray"],
        default="auto",
        help="gl: OpenGL through EGL or OSMesa; ray: ray caster on the CPU; auto: the first that works here",
    )
    add_trust_arguments(parser)
    return parser.parse_args(argv)


def positive(text: str) -> int:
    """A count."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be positive, got {value}")
    return value


def not_negative(text: str) -> int:
    """A count that may be 0."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must not be negative, got {value}")
    return value


def share(text: str) -> float:
    """A part of the whole."""
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, got {value:g}")
    return value


def snapshot(args: argparse.Namespace) -> Path:
    """Play the run up to the picture, and draw it."""
    from gpusim_rl.errors import ConfigError, import_extra
    from gpusim_rl.files.paths import check_out, free_name
    from gpusim_rl.machine.hardware import limit_openmp_spin

    if args.out is not None and args.out.suffix != ".png":
        raise ConfigError(f"a picture's name must end in .png, got {args.out.name!r}")
    check_out(args.out, overwrite=args.overwrite)
    limit_openmp_spin()  # before torch is imported
    import_extra("PIL.Image", "video", "snapshot")  # said before the work, not after it
    from gpusim_rl.env import VecEnv
    from gpusim_rl.view.player import Player
    from gpusim_rl.view.snapshot import draw, write_png

    with closing(
        Player.open(
            args.run,
            act=args.policy,
            num_envs=args.num_envs,
            sim=args.sim,
            from_yaml=True,
            trust=args.trust,
            config_dir=args.config_dir,
        )
    ) as player:
        env = player.env
        if not isinstance(env, VecEnv):
            raise ConfigError(
                f"snapshot draws envs on our simulators, not {player.name}. Try tools/record.py {args.run}"
            )
        for _ in range(args.steps):
            player.step()
        sim = env.sim
        qpos = sim.scene_qpos().cpu().numpy()
        pixels, note = draw(sim.scene, qpos, args.width, args.height, args.renderer, args.fill)
        default = Path(f"{env.name}.png")
        path = args.out or (default if args.overwrite else free_name(default))
    if note:
        print(note, file=sys.stderr)
    write_png(path, pixels)
    return path


if __name__ == "__main__":
    # As for train.py: the checkout that this file is in, whether it is installed or not.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    sys.exit(main())
