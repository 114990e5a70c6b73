"""Record a run: a video of a grid of envs, or a replay in 3D as one page; works without a display.

python tools/record.py Ant                                  the latest Ant run, its last checkpoint
python tools/record.py runs/Ant/2026-01-31_12-00-00         this run
python tools/record.py Ant --policy random --num-envs 4     without any training
python tools/record.py CartpoleCamera --renderer policy     what the policy sees
python tools/record.py Ant --html                           a replay in 3D with a time line, as one page for a browser
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    import _checkout  # noqa: F401

import argparse
import shlex
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from gpusim_rl.errors import ConfigError, friendly_errors, import_extra, say
from gpusim_rl.files.paths import check_out, free_name
from gpusim_rl.files.safe_open import writing
from gpusim_rl.view.arguments import add_picture_arguments, add_player_arguments, check_video, open_player, positive

if TYPE_CHECKING:
    from gpusim_rl.view.player import Player


def main(argv: list[str] | None = None) -> int:
    with friendly_errors():
        record(parse(argv))
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="record", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run", help="run folder, checkpoint, or a task (its latest run)")
    parser.add_argument("--out", type=Path, help="mp4 or html to write (default: videos/ in the run's folder)")
    parser.add_argument("--html", action="store_true", help="write a replay of one env in 3D, as one page")
    parser.add_argument("--num-envs", type=positive, help="tiles of a video's grid (default: 9)")
    parser.add_argument("--steps", type=positive, default=300, help="control steps (default: 300)")
    parser.add_argument("--no-caption", dest="caption", action="store_false", help="leave out iteration and commands")
    add_picture_arguments(parser, width=1280, height=720, with_policy=True)
    add_player_arguments(parser, policy="trained")
    return parser.parse_args(argv)


def record(args: argparse.Namespace) -> Path:
    """Play the run and draw every frame; return the video or the page."""
    as_page = args.html or (args.out is not None and args.out.suffix == ".html")
    if as_page and args.num_envs not in (None, 1):
        hint = f"Try a video: record {shlex.quote(args.run)}"
        raise ConfigError(key="--num-envs", expected="1 with --html", got=args.num_envs, hint=hint)
    for module in ("viser", "mjviser") if as_page else ("imageio_ffmpeg", *["PIL.Image"] * args.caption):
        import_extra(module, "view", "record --html" if as_page else "record")
    check_out(args.out, ".html" if as_page else ".mp4", overwrite=args.overwrite)
    if not as_page:
        check_video(args.out or Path("default.mp4"), (args.width, args.height))
    args.num_envs = args.num_envs or (1 if as_page else 9)
    with closing(open_player(args, render_mode="rgb_array")) as player:
        from gpusim_rl.view.web_scene import html_replay

        suffix = ".html" if as_page else ".mp4"
        default = Path(f"{args.run}-{args.policy}{suffix}")
        if player.run_dir is not None:
            name = args.policy if player.iteration is None else f"{player.iteration:06d}"
            default = player.run_dir / "videos" / f"{name}{suffix}"
        path = args.out or (default if args.overwrite else free_name(default))
        if as_page:
            page = html_replay(player, progress(args.steps), "record --html")
            with writing(path) as file:
                file.write(page.encode())
        else:
            write_video(player, path, args)
    say(str(path))
    return path


def write_video(player: Player, path: Path, args: argparse.Namespace) -> None:
    """Write a video."""
    from gpusim_rl.view.renderer import Grid
    from gpusim_rl.view.video import Caption, caption_words, command_captions, drawing, frame_rate, video_writer

    env, size = player.env, (args.width, args.height)
    caption = Caption(Grid.of(env.num_envs, *size), caption_words(player)) if args.caption else None
    with drawing(player, size, args.renderer) as (draw, control_hz):
        every, fps = frame_rate(control_hz)
        with video_writer(path, size, fps, "record") as write:
            for step in progress(args.steps):
                if step % every == 0:
                    picture = draw()
                    write(picture if caption is None else caption.write(picture, command_captions(env)))
                player.step()


def progress(steps: int):  # noqa: ANN201 (rich's own type)
    """Return `range(steps)` with a progress bar on a terminal."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return track(range(steps), "recording", console=console, transient=True, disable=not console.is_terminal)


if __name__ == "__main__":
    sys.exit(main())
