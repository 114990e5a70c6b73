"""Record a video or a 3D replay of a run.

gpusim-rl record Ant                                     the latest Ant run, as an .mp4 in its folder
gpusim-rl record Ant --html                              a 3D replay with a timeline, for a browser
gpusim-rl record Ant --policy random --num-envs 4        the task before any training
gpusim-rl record CartpoleCamera --renderer policy        the images that the policy sees
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    import _checkout  # noqa: F401

import argparse
import shlex
from contextlib import closing
from pathlib import Path

from gpusim_rl.deployed import open_shown
from gpusim_rl.errors import ConfigError, friendly_errors, import_extra, say
from gpusim_rl.files.safe_open import free_name, writing
from gpusim_rl.options import Parser
from gpusim_rl.view.arguments import check_out, check_video


def main(argv: list[str] | None = None) -> int:
    with friendly_errors():
        record(parse(argv))
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("record", __doc__)
    parser.option("run", "or an export folder")
    parser.option("--policy")
    parser.option("--num-envs", note="9; 1 with --html")
    parser.option("--steps", default=300)
    parser.option("--sim", note="mujoco; newton for a run trained on it")
    parser.option("--out", ".mp4 or .html", note="in videos/ of the run folder")
    parser.options("--overwrite", "--width", "--height", width=1280, height=720)
    parser.option("--html", "write a 3D replay of one env, as one page", "Output", action="store_true")
    parser.option("--no-caption", "omit iteration and commands", "Output", dest="caption", action="store_false")
    parser.option("--renderer", "or the policy's images (policy)", choices=["auto", "gl", "ray", "policy"])
    parser.options("--trust", "--config-dir")
    return parser.parse_args(argv)


def record(args: argparse.Namespace) -> Path:
    """Play the run and draw every frame; return the path of the video or page."""
    as_page = args.html or (args.out is not None and args.out.suffix == ".html")
    if as_page and args.num_envs not in (None, 1):
        hint = f"Try a video: gpusim-rl record {shlex.quote(args.run)}"
        raise ConfigError(key="--num-envs", expected="1 with --html", got=args.num_envs, hint=hint)
    for module in ("viser", "mjviser") if as_page else ("imageio_ffmpeg", *["PIL.Image"] * args.caption):
        import_extra(module, "view", "record --html" if as_page else "record")
    check_out(args.out, ".html" if as_page else ".mp4", overwrite=args.overwrite)
    if not as_page:
        check_video(args.out or Path("default.mp4"), (args.width, args.height))
    args.num_envs = args.num_envs or (1 if as_page else 9)
    with closing(open_shown(args, render_mode="rgb_array")) as player:
        from gpusim_rl.view.video import write_video
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
            size = (args.width, args.height)
            write_video(player, path, size, progress(args.steps), "record", args.renderer, caption=args.caption)
    say(str(path))
    return path


def progress(steps: int):  # noqa: ANN201 (rich's own type)
    """Return `range(steps)` with a progress bar on a terminal."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return track(range(steps), "recording", console=console, transient=True, disable=not console.is_terminal)


if __name__ == "__main__":
    sys.exit(main())
