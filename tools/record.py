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
    """Writes the video and prints its path."""
    from gpusim_rl.errors import friendly_errors

    with friendly_errors():
        record(parse(argv))
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    from gpusim_rl.view.arguments import add_picture_arguments, add_player_arguments, positive

    parser = argparse.ArgumentParser(prog="record", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run", help="run folder, checkpoint, or a task (its latest run)")
    parser.add_argument("--out", type=Path, help="mp4 to write (default: in the run's folder, videos/)")
    parser.add_argument("--num-envs", type=positive, default=9, help="tiles of the grid (default: 9)")
    parser.add_argument("--steps", type=positive, default=300, help="control steps (default: 300)")
    add_picture_arguments(parser, width=1280, height=720)
    add_player_arguments(parser, policy="trained")
    return parser.parse_args(argv)


def record(args: argparse.Namespace) -> Path:
    """Plays the run and draws every frame; returns the video."""
    from gpusim_rl.errors import import_extra, say
    from gpusim_rl.files.paths import check_out, free_name
    from gpusim_rl.view.arguments import open_player

    # Said before the work, not after it.
    import_extra("imageio_ffmpeg", "video", "record")
    check_out(args.out, overwrite=args.overwrite)
    with ExitStack() as stack:
        player = stack.enter_context(closing(open_player(args, render_mode="rgb_array")))
        from gpusim_rl.env import VecEnv
        from gpusim_rl.view.renderer import make_renderer, tiled
        from gpusim_rl.view.video import video_writer

        env, size = player.env, (args.width, args.height)
        if isinstance(env, VecEnv):
            sim = env.sim
            renderer, note = make_renderer(sim.scene, sim.qpos.cpu().numpy(), *size, args.renderer)
            stack.enter_context(closing(renderer))
            if note:
                say(note, file=sys.stderr)
            control_hz, draw = env.cfg.control_hz, lambda: renderer.render(sim.qpos.cpu().numpy())
        else:
            control_hz, draw = env.frames_per_s, lambda: tiled(env.render(), *size)
            draw()  # no file is begun if they cannot
        every, fps = frame_rate(control_hz)
        default = default_path(player.run_dir, player.iteration, args)
        path = args.out or (default if args.overwrite else free_name(default))
        with video_writer(path, size, fps, "record") as write:
            for step in progress(args.steps):
                if step % every == 0:
                    write(draw())
                player.step()
    say(str(path))
    return path


def frame_rate(control_hz: float) -> tuple[int, float]:
    """Returns the control steps per frame, and the frames per second [Hz] at which the video runs in real time."""
    every = max(1, -int(-control_hz // MAX_FPS))
    return every, control_hz / every


def default_path(run_dir: Path | None, iteration: int | None, args: argparse.Namespace) -> Path:
    """Returns a path that is named after what acts."""
    if run_dir is None:
        return Path(f"{args.run}-{args.policy}.mp4")
    return run_dir / "videos" / (f"{args.policy}.mp4" if iteration is None else f"{iteration:06d}.mp4")


def progress(steps: int):  # noqa: ANN201 (rich's own type)
    """Returns `range(steps)` with a progress bar on a terminal."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return track(range(steps), "recording", console=console, transient=True, disable=not console.is_terminal)


if __name__ == "__main__":
    # As for train.py: the checkout that this file is in, whether it is installed or not.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    sys.exit(main())
