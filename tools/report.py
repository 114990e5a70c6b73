"""Write an HTML report of runs.

gpusim-rl report Ant                                     the latest Ant run; report.html in its folder
gpusim-rl report runs/Ant/* --out ant.html               all Ant runs, grouped over seeds
gpusim-rl report runs/*/latest --no-replay               several tasks, without replays
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    import _checkout  # noqa: F401

import argparse
import base64
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpusim_rl.errors import ConfigError, first_line, friendly_errors, import_extra, say
from gpusim_rl.files.safe_open import load_json, writing
from gpusim_rl.machine.hardware import import_torch
from gpusim_rl.options import Parser
from gpusim_rl.view.arguments import check_out

if TYPE_CHECKING:
    from gpusim_rl.view.player import Player
    from gpusim_rl.view.report import Group

MOST_REPLAYS = 4  # per page; each takes about a megabyte
MOST_STEPS = 1000  # of the replay of a fall
PICTURE = (480, 360)  # width and height [pixels]


def main(argv: list[str] | None = None) -> int:
    with friendly_errors():
        say(str(report(parse(argv))))
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("report", __doc__)
    parser.option("runs")
    parser.option("--steps", "per replay", default=250)
    parser.option("--out", ".html", note="report.html in the run folder; in the current one for several runs")
    parser.option("--overwrite")
    parser.option("--no-replay", "numbers only, no replays", "Output", action="store_true")
    parser.options("--trust", "--config-dir")
    return parser.parse_args(argv)


def report(args: argparse.Namespace) -> Path:
    """Read the runs, replay the best of each group, write the page and return its path."""
    from gpusim_rl.view.curves import read_run, run_folders

    check_out(args.out, ".html", overwrite=args.overwrite)
    import_extra("matplotlib", "view", "report")
    folders = run_folders(args.runs)
    out = args.out or (folders[0] if len(folders) == 1 else Path()) / "report.html"
    import_torch()
    from gpusim_rl.view.report import group_runs, page

    groups = group_runs([read_run(folder) for folder in folders])
    left = 0 if args.no_replay else MOST_REPLAYS
    for group in (group for task in groups for group in task):
        pace(group)
        if left > 0:
            replay(group, args)
        left -= 1
    content = page(groups, args.config_dir)
    with writing(out) as file:  # replaces a symlink instead of following it
        file.write(content.encode())
    return out


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
                group.failure = failure(player, run.run.path / "stress.json")
            else:
                data = base64.b64encode(moving_picture(player, args.steps, PICTURE, "report")).decode()
                group.picture = f"data:image/webp;base64,{data}"
    except Exception as error:  # even from a task or simulator: the page is useful without a replay
        say(f"no replay of {run.run}: {first_line(error)}", file=sys.stderr)
        group.caption = f"No replay: {first_line(error)}"


class Recorded:
    """Recorded positions, replayed through a player's simulator."""

    def __init__(self, player: Player, frames: list[list[float]], hz: float) -> None:
        import torch

        self.env: Any = player.env
        self._frames = torch.tensor(frames).reshape(len(frames), self.env.sim.qpos.shape[1])
        self._ratio, self._steps = hz / self.env.cfg.control_hz, 0
        self.num_steps = min(int(len(frames) / self._ratio), MOST_STEPS)
        self.step()

    def step(self) -> None:
        """Show the next frame."""
        self.env.sim.qpos[0] = self._frames[min(int(self._steps * self._ratio), len(self._frames) - 1)]
        self._steps += 1


def failure(player: Player, file: Path) -> tuple[str, str]:
    """Return a 3D replay of the worst fall in stress.json and its caption, or the reason for its absence."""
    from gpusim_rl.view.web_scene import html_replay

    try:
        worst = load_json(file)["worst"] if file.is_file() else None
        if worst is None:  # no stress test, or no fall
            return "", ""
        recorded: Any = Recorded(player, worst["qpos"], float(worst["hz"]))
        words = f"{worst['label']}, {worst['smallest']:.3g} {worst['unit']}"
        return html_replay(recorded, range(recorded.num_steps), "report", [words]), f"Worst fall: {words}."
    except Exception as error:  # from a damaged file
        return "", f"No replay of the worst fall: {first_line(error)}"


if __name__ == "__main__":
    sys.exit(main())
