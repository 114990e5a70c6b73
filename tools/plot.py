"""Plot learning curves of runs, with means over seeds.

gpusim-rl plot Ant                                       the latest Ant run
gpusim-rl plot runs/Ant/*                                all Ant runs
gpusim-rl plot runs/Ant/* --key policy/kl --x time       another column, over wall-clock time
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    import _checkout  # noqa: F401

import argparse
import textwrap
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gpusim_rl.errors import ConfigError, did_you_mean, friendly_errors, import_extra, say
from gpusim_rl.files.safe_open import writing
from gpusim_rl.options import Parser
from gpusim_rl.view.arguments import check_out

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

    from gpusim_rl.view.curves import Curve, SavedCurves

X_COLUMNS = {"env_steps": "env_steps", "time": "time/elapsed_s"}
FAR = 2.0  # maximum distance of a drawn threshold from the curves [plot heights]
LABEL_WIDTH = 100  # characters per legend row


def main(argv: list[str] | None = None) -> int:
    with friendly_errors():
        say(str(plot(parse(argv))))
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("plot", __doc__)
    parser.option("runs")
    parser.option("--key", "column of metrics.csv", "Curves", default="episode/return")
    parser.option("--x", "horizontal axis", "Curves", choices=list(X_COLUMNS), default="env_steps")
    parser.option("--out", ".png, .svg or .pdf", note="in the run folder; in the current one for several runs")
    parser.options("--overwrite", "--config-dir")
    return parser.parse_args(argv)


def plot(args: argparse.Namespace) -> Path:
    """Draw the plot and return its path."""
    from gpusim_rl.view.curves import grouped, run_folders

    import_extra("matplotlib", "view", "plot")
    from gpusim_rl.view.charts import save

    folders = run_folders(args.runs)
    name = f"{args.key.replace('/', '_')}.png"
    out = args.out or (folders[0] / name if len(folders) == 1 else Path(name))
    check_out(args.out, ".png", ".svg", ".pdf", overwrite=args.overwrite)
    runs = read_runs(folders, args.key, X_COLUMNS[args.x])
    figure = draw(grouped(runs), args.key, args.x)
    with writing(out) as file:  # replaces a symlink instead of following it
        save(figure, file, out.suffix[1:])
    return out


def draw(groups: Sequence[Sequence[SavedCurves]], key: str, x_axis: str) -> Figure:
    """Return the figure: a line for each group of runs, and a legend with titles and last values below."""
    from matplotlib.figure import Figure

    from gpusim_rl.view.charts import time_unit, visible_range
    from gpusim_rl.view.curves import Curve, count, in_words, titles

    figure = Figure(layout="constrained")
    axes = figure.subplots()
    tasks = list(dict.fromkeys(runs[0].task for runs in groups))
    curves = [[run.curve(key, X_COLUMNS[x_axis]) for run in runs] for runs in groups]
    ends = [float(curve.x[-1]) for group in curves for curve in group]
    unit, scale = time_unit(max(ends)) if x_axis == "time" else ("steps", 1.0)
    common = min(ends) / scale if len(groups) > 1 else None
    rows = 0  # rows of the legend
    for runs, group, title in zip(groups, curves, titles([runs[0].settings for runs in groups]), strict=True):
        words = [title.removeprefix(tasks[0]).strip() if len(tasks) == 1 else title, count(runs) or "1 run"]
        rows += draw_group(axes, [Curve(curve.x / scale, curve.y) for curve in group], words, unit, common)
    rows += draw_threshold(axes, groups, key)
    x_label = f"training time [{unit}]" if x_axis == "time" else "env steps (control steps summed over envs)"
    axes.set(xlabel=x_label, ylabel=in_words(key), title=", ".join(tasks))
    axes.set_ylim(*visible_range(*axes.get_ylim()))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(partial(tick, axis))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", frameon=False, fontsize="small")
    figure.set_size_inches(8, 5 + 0.2 * rows)
    return figure


def tick(axis: Axis, value: float, _: object) -> str:
    """Format a tick, rounding tiny values to 0."""
    from gpusim_rl.view.charts import short

    low, high = axis.get_view_interval()
    return short(0.0 if abs(value) < 1e-9 * (high - low) else value)


def draw_group(axes: Axes, curves: Sequence[Curve], words: Sequence[str], unit: str, common: float | None) -> int:
    """Draw runs and their mean; return the number of legend rows.

    Groups are also compared at `common`, the last x that all groups have reached.
    """
    import numpy as np

    from gpusim_rl.view.charts import draw_runs, short

    line, x, mean, std = draw_runs(axes, curves)
    label = [*filter(None, words)]
    if len(x):
        spread = f" ± {std[-1]:,.3g}" if len(curves) > 1 else ""
        label.append(f"{mean[-1]:,.4g}{spread} at {short(x[-1], 3)} {unit}")
        axes.plot(x[-1], mean[-1], "o", color=line.get_color(), markersize=4)
        if common is not None and x[0] <= common < x[-1]:
            label.append(f"{np.interp(common, x, mean):,.4g} at {short(common, 3)} {unit}, reached by all")
        if any(curve.x[-1] > x[-1] for curve in curves):
            label.append("where the shortest run ends; thin lines: individual runs")
    else:
        label.append("no mean: the runs do not overlap")
    text = textwrap.fill(", ".join(label), LABEL_WIDTH)
    line.set_label(f" {text}" if text.startswith("_") else text)  # matplotlib hides labels that start with _
    return 1 + text.count("\n")


def draw_threshold(axes: Axes, groups: Sequence[Sequence[SavedCurves]], key: str) -> int:
    """Draw the learning threshold if all runs share one for this column; return the number of legend rows."""
    goal = groups[0][0].goal
    if goal is None or goal.column != key or any(runs[0].goal != goal for runs in groups):
        return 0
    low, high = axes.get_ylim()
    margin = FAR * (high - low)
    label = f"threshold {goal.threshold:,g}: counts as learned"
    if low - margin <= goal.threshold <= high + margin:
        axes.axhline(goal.threshold, color="0.4", linewidth=1.0, linestyle="--", label=label)
    else:
        axes.plot([], [], " ", label=f"{label}, outside the plot")
    return 1


def read_runs(folders: Sequence[Path], key: str, x_column: str) -> list[SavedCurves]:
    """Read the runs, skipping runs without values in the column; raise ConfigError if no run has values."""
    from gpusim_rl.view.curves import read_run

    runs = []
    for folder in folders:
        run = read_run(folder)
        file, columns = run.run.metrics_csv, run.columns
        for name in (key, x_column):
            if name not in columns:
                hint = f"{did_you_mean(name, columns)} Available: {', '.join(columns) or 'none'}"
                raise ConfigError(f"no column {name!r}", key=str(file), hint=hint)
        if len(run.curve(key, x_column).x):
            runs.append(run)
            continue
        if folder == folders[-1] and not runs:
            raise ConfigError(f"{key} has no values yet", key=str(file))
        say(f"skipped {file}: {key} has no values yet", file=sys.stderr)
    return runs


if __name__ == "__main__":
    sys.exit(main())
