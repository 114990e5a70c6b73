"""Record a video of a run: a grid of envs, with or without a display.

python tools/record.py Ant                                  the latest Ant run, its last checkpoint
python tools/record.py runs/Ant/2026-01-31_12-00-00         this run
python tools/record.py Ant --policy random --num-envs 4     without any training
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack, closing
from pathlib import Path

MAX_FPS = 30.0


def main(argv: list[str] | None = None) -> int:
    """Write the video and print its path."""
    from gpusim_rl.errors import friendly_errors

    with friendly_errors():
        record(parse(argv))
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    from gpusim_rl.settings.simulators import SIMULATORS
    from gpusim_rl.settings.trust import add_trust_arguments

    parser = argparse.ArgumentParser(prog="record", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run", help="run folder, checkpoint, or a task (its latest run)")
    parser.add_argument("--out", type=Path, help="mp4 to write (default: in the run's folder, videos/)")
    parser.add_argument("--overwrite", action="store_true", help="replace a file that exists")
    parser.add_argument("--num-envs", type=positive, default=9, help="tiles of the grid (default: 9)")
    parser.add_argument("--steps", type=positive, default=300, help="control steps (default: 300)")
    parser.add_argument("--width", type=positive, default=1280, help="pixels (default: 1280)")
    parser.add_argument("--height", type=positive, default=720, help="pixels (default: 720)")
    parser.add_argument(
        "--sim", choices=list(SIMULATORS), help="simulator (default: mujoco; newton for a run that was trained on it)"
    )
    parser.add_argument("--policy", choices=["trained", "zero", "random"], default="trained", help="who acts")
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


def record(args: argparse.Namespace) -> Path:
    """Play the run and draw every frame."""
    from gpusim_rl.machine.hardware import limit_openmp_spin

    limit_openmp_spin()  # before torch is imported
    from gpusim_rl.errors import import_extra, printable
    from gpusim_rl.files.paths import check_out, free_name

    # said before the work, not after it
    import_extra("imageio_ffmpeg", "video", "record")
    check_out(args.out, overwrite=args.overwrite)
    from gpusim_rl.env import VecEnv
    from gpusim_rl.view.player import Player
    from gpusim_rl.view.renderer import make_renderer, tiled
    from gpusim_rl.view.video import VideoWriter

    player = Player.open(
        args.run,
        act=args.policy,
        num_envs=args.num_envs,
        sim=args.sim,
        trust=args.trust,
        config_dir=args.config_dir,
        render_mode="rgb_array",
    )
    with ExitStack() as stack:
        stack.enter_context(closing(player))
        env, size = player.env, (args.width, args.height)
        if isinstance(env, VecEnv):
            sim = env.sim
            renderer, note = make_renderer(sim.scene, sim.scene_qpos().cpu().numpy(), *size, args.renderer)
            stack.enter_context(closing(renderer))
            if note:
                print(note, file=sys.stderr)
            control_hz, draw = env.cfg.control_hz, lambda: renderer.render(sim.scene_qpos().cpu().numpy())
        else:
            control_hz, draw = env.frames_per_s, lambda: tiled(env.render(), *size)
            draw()  # if they cannot, no file is begun
        every, fps = frame_rate(control_hz)
        default = default_path(player.run_dir, player.iteration, args)
        path = args.out or (default if args.overwrite else free_name(default))
        with VideoWriter(path, size, fps, "record") as video:
            for step in progress(args.steps):
                if step % every == 0:
                    video.write(draw())
                player.step()
    print(printable(str(path)))
    return path


def frame_rate(control_hz: float) -> tuple[int, float]:
    """Control steps per frame, and the frames per second with which the video runs in real time."""
    every = max(1, -int(-control_hz // MAX_FPS))
    return every, control_hz / every


def default_path(run_dir: Path | None, iteration: int | None, args: argparse.Namespace) -> Path:
    """Named after what acts."""
    if run_dir is None:
        return Path(f"{args.run}-{args.policy}.mp4")
    return run_dir / "videos" / (f"{args.policy}.mp4" if iteration is None else f"{iteration:06d}.mp4")


def progress(steps: int):  # noqa: ANN201 (rich's own type)
    """`range(steps)` with a progress bar on a terminal."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return track(range(steps), "recording", console=console, transient=True, disable=not console.is_terminal)


if __name__ == "__main__":
    # As for train.py: the checkout that this file is in, whether it is installed or not.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    sys.exit(main())
