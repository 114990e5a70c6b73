"""Write an HTML report of runs.

gpusim-rl report Ant                                     the latest Ant run; report.html in its folder
gpusim-rl report runs/Ant/* --out ant.html               all Ant runs, grouped over seeds
gpusim-rl report runs/*/latest --no-replay               several tasks, without replays
gpusim-rl report runs/Go1Velocity/latest/export          an export folder, with its stress test
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    import _checkout  # noqa: F401

import argparse
import base64
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from gpusim_rl.errors import ConfigError, first_line, friendly_errors, import_extra, say
from gpusim_rl.export.of_run import is_export
from gpusim_rl.files.safe_open import writing
from gpusim_rl.machine.hardware import import_torch
from gpusim_rl.options import Parser
from gpusim_rl.view.arguments import check_out

if TYPE_CHECKING:
    from gpusim_rl.view.report import Group

MOST_REPLAYS = 4  # per page; each takes about a megabyte
PICTURE = (480, 360)  # width and height [pixels]


def main(argv: list[str] | None = None) -> int:
    with friendly_errors():
        say(str(report(parse(argv))))
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("report", __doc__)
    parser.option("runs", "or an export folder")
    parser.option("--steps", "per replay", default=250)
    parser.option("--out", ".html", note="report.html in the run folder; in the current one for several runs")
    parser.option("--overwrite")
    parser.option("--no-replay", "numbers only, no replays", "Output", action="store_true")
    parser.options("--trust", "--config-dir")
    return parser.parse_args(argv)


def report(args: argparse.Namespace) -> Path:
    """Write the page of runs or of an export folder; return its path."""
    from gpusim_rl.view.curves import run_folders

    check_out(args.out, ".html", overwrite=args.overwrite)
    import_extra("matplotlib", "view", "report")
    if export := next(filter(is_export, args.runs), None):
        if len(args.runs) > 1:
            raise ConfigError(key="report", expected="runs, or one export folder", got=f"{len(args.runs)} folders")
        import_torch()
        from gpusim_rl.deployed.exported_task import export_page

        out = args.out or Path(export) / "report.html"
        content = export_page(Path(export), 0 if args.no_replay else args.steps)
    else:
        folders = run_folders(args.runs)
        out = args.out or (folders[0] if len(folders) == 1 else Path()) / "report.html"
        content = page_of_runs(folders, args)
    with writing(out) as file:  # replaces a symlink instead of following it
        file.write(content.encode())
    return out


def page_of_runs(folders: Sequence[Path], args: argparse.Namespace) -> str:
    """Read the runs and replay the best of each group; return the page."""
    import_torch()
    from gpusim_rl.view.curves import read_run
    from gpusim_rl.view.report import group_runs, page

    groups = group_runs([read_run(folder) for folder in folders])
    left = 0 if args.no_replay else MOST_REPLAYS
    for group in (group for task in groups for group in task):
        pace(group)
        if left > 0:
            replay(group, args)
        left -= 1
    return page(groups, args.config_dir)


def pace(group: Group) -> None:
    """Add the speed and the bottlenecks of the group's best run."""
    from gpusim_rl.diagnose.rules import conclusion, diagnose
    from gpusim_rl.diagnose.run_stats import read_run_stats
    from gpusim_rl.run.phases import PHASES

    try:
        stats = read_run_stats(group.best.run.path)
    except (ConfigError, OSError) as error:
        group.limits = (str(error),)
        return
    group.env_steps_per_s, group.shares = stats.env_steps_per_s, {phase: getattr(stats, phase) for phase in PHASES}
    group.limits = [str(finding) for finding in diagnose(stats)] or [conclusion(stats)]


def replay(group: Group, args: argparse.Namespace) -> None:
    """Add a 3D replay of the group's best run (an animation for another library's envs), or say why there is none."""
    from gpusim_rl.deployed.exported_task import worst_fall
    from gpusim_rl.env import VecEnv
    from gpusim_rl.view.player import Player
    from gpusim_rl.view.video import caption_words, moving_picture
    from gpusim_rl.view.web_scene import html_replay

    run, options = group.best, {"trust": args.trust, "config_dir": args.config_dir, "render_mode": "rgb_array"}
    try:
        with closing(Player.open(str(run.run.path), **options)) as player:
            group.caption = f"{', '.join(caption_words(player))}, seed {run.seed}."
            if isinstance(player.env, VecEnv):
                group.replay = html_replay(player, range(args.steps), "report")
                group.caption += " Drag to rotate, scroll to zoom."
                group.failure = worst_fall(player, run.run.path / "stress.json")
            else:
                data = base64.b64encode(moving_picture(player, args.steps, PICTURE, "report")).decode()
                group.picture = f"data:image/webp;base64,{data}"
    except Exception as error:  # even from a task or simulator: the page is useful without a replay
        say(f"no replay of {run.run}: {first_line(error)}", file=sys.stderr)
        group.caption = f"No replay: {first_line(error)}"


if __name__ == "__main__":
    sys.exit(main())
