"""Plot learning curves: runs that differ only in their seed become one line, mean and standard deviation.

Where one of them has ended, or has not begun, the others are thin lines: a mean of fewer runs would look like progress.

python tools/plot.py Ant                                     the latest Ant run
python tools/plot.py runs/Ant/*                              all Ant runs
python tools/plot.py runs/Ant/* --key policy/kl --x time     another column, over wall-clock time
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # As for train.py: the checkout that this file is in, whether it is installed or not.
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    from gpusim_rl import interrupts

    interrupts.install()  # before imports that take time

import argparse
import textwrap
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

    from gpusim_rl.view.curves import SavedCurves

X_COLUMNS = {"env_steps": "env_steps", "time": "time/elapsed_s"}
TIMES = {"h": 3600.0, "min": 60.0, "s": 1.0}  # seconds of each unit
FAR = 2.0  # heights of the picture within which the threshold is drawn
LABEL_WIDTH = 100  # characters of the legend on one row


def main(argv: list[str] | None = None) -> int:
    """Draws the picture and prints its path."""
    from gpusim_rl.errors import friendly_errors, say

    with friendly_errors():
        say(str(plot(parse(argv))))
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="plot", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("runs", nargs="+", metavar="run", help="run folder, or a task (its latest run)")
    parser.add_argument("--out", type=Path, help="png, svg or pdf to write (default: in the run's folder, or here)")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace an --out that exists; the default name always is replaced"
    )
    parser.add_argument("--key", default="episode/return", help="column of metrics.csv (default: episode/return)")
    parser.add_argument("--x", choices=list(X_COLUMNS), default="env_steps", help="horizontal axis")
    parser.add_argument("-cd", "--config-dir", help="as for train.py; a plot needs none")
    return parser.parse_args(argv)


def plot(args: argparse.Namespace) -> Path:
    """Draws the picture; returns its file."""
    from gpusim_rl.errors import ConfigError, import_extra
    from gpusim_rl.files.paths import check_out
    from gpusim_rl.files.safe_open import writing
    from gpusim_rl.view.curves import grouped, run_folders

    import_extra("matplotlib", "view", "plot")
    folders = run_folders(args.runs)
    name = f"{args.key.replace('/', '_')}.png"
    out = args.out or (folders[0] / name if len(folders) == 1 else Path(name))
    if out.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"--out must end in .png, .svg or .pdf, got {out}")
    check_out(args.out, overwrite=args.overwrite)
    runs = read_runs(folders, args.key, X_COLUMNS[args.x])
    figure = draw(grouped(runs), args.key, args.x)
    with writing(out) as file:  # a link there is replaced, not followed
        figure.savefig(file, format=out.suffix[1:], dpi=150)
    return out


def draw(groups: Sequence[Sequence[SavedCurves]], key: str, x_axis: str) -> Figure:
    """Returns the picture: a line for each group of runs, and below the axes their titles and last values."""
    from matplotlib.figure import Figure

    from gpusim_rl.view.curves import as_text, in_words, titles
    from gpusim_rl.view.svg_chart import visible_range

    figure = Figure(layout="constrained")
    axes = figure.subplots()
    tasks = list(dict.fromkeys(runs[0].task for runs in groups))
    ends = [float(run.curve(key, X_COLUMNS[x_axis]).x[-1]) for runs in groups for run in runs]
    x_label, scale, unit = x_units(x_axis, max(ends))
    rows = 0  # rows of the legend
    for runs, title in zip(groups, titles([runs[0].settings for runs in groups]), strict=True):
        settings = title.removeprefix(tasks[0]).strip() if len(tasks) == 1 else title
        common = min(ends) / scale if len(groups) > 1 else None
        rows += draw_group(axes, runs, settings, key, X_COLUMNS[x_axis], (scale, unit), common)
    rows += draw_threshold(axes, groups, key)
    axes.set(xlabel=x_label, ylabel=in_words(key), title=", ".join(tasks))
    axes.set_ylim(*visible_range(*axes.get_ylim()))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(partial(tick, axis))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", frameon=False, fontsize="small")
    figure.set_size_inches(8, 5 + 0.2 * rows)
    as_text(figure)
    return figure


def tick(axis: Axis, value: float, _: object) -> str:
    """Returns the label of a tick; one at 0 may be a rounding error beside it."""
    from gpusim_rl.view.svg_chart import short

    low, high = axis.get_view_interval()
    return short(0.0 if abs(value) < 1e-9 * (high - low) else value)


def draw_group(
    axes: Axes,
    runs: Sequence[SavedCurves],
    settings: str,
    key: str,
    x_column: str,
    x_unit: tuple[float, str],
    common: float | None = None,
) -> int:
    """Draws the mean of runs with its spread, and thin what is before and after it; returns its rows in the legend.

    The legend compares groups at `common`, the x that all of them have reached, next to their own last values.
    """
    import numpy as np

    from gpusim_rl.view.curves import Curve, beyond, count, mean_and_std
    from gpusim_rl.view.svg_chart import short

    scale, unit = x_unit
    curves = [Curve(curve.x / scale, curve.y) for curve in (run.curve(key, x_column) for run in runs)]
    x, mean, std = mean_and_std(curves)
    [line] = axes.plot(x, mean, linewidth=1.8)
    color = line.get_color()
    words = [settings] * bool(settings) + [count(runs) or "1 run"]
    if len(x):
        spread = f" ± {std[-1]:,.3g}" if len(runs) > 1 else ""
        words.append(f"{mean[-1]:,.4g}{spread} at {short(x[-1], 3)} {unit}")
        axes.plot(x[-1], mean[-1], "o", color=color, markersize=4)
        if common is not None and x[0] <= common < x[-1]:
            words.append(f"{np.interp(common, x, mean):,.4g} at {short(common, 3)} {unit}, which all have")
    if len(runs) > 1:
        axes.fill_between(x, mean - std, mean + std, color=color, alpha=0.2, linewidth=0)
    rests = beyond(curves, x)
    for rest in rests:
        axes.plot(rest.x, rest.y, color=color, linewidth=0.8, alpha=0.8)
    if not len(x):
        words.append("no mean: no part in common")
    elif any(rest.x[-1] > x[-1] for rest in rests):
        words.append("where the shortest ends; thin: single runs")
    label = textwrap.fill(", ".join(words), LABEL_WIDTH)
    line.set_label(f" {label}" if label.startswith("_") else label)  # matplotlib leaves out what begins with a _
    return 1 + label.count("\n")


def draw_threshold(axes: Axes, groups: Sequence[Sequence[SavedCurves]], key: str) -> int:
    """Draws what counts as learned, where all runs have the same threshold of this column; returns its legend rows."""
    goal = groups[0][0].goal
    if goal is None or goal.column != key or any(runs[0].goal != goal for runs in groups):
        return 0
    low, high = axes.get_ylim()
    margin = FAR * (high - low)
    label = f"threshold {goal.threshold:,g}: counts as learned"
    if low - margin <= goal.threshold <= high + margin:
        axes.axhline(goal.threshold, color="0.4", linewidth=1.0, linestyle="--", label=label)
    else:
        axes.plot([], [], " ", label=f"{label}, outside of the picture")
    return 1


def x_units(x_axis: str, last: float) -> tuple[str, float, str]:
    """Returns label, size and short name of the unit of the horizontal axis, which ends at `last`."""
    if x_axis == "env_steps":
        return "env steps (control steps of all envs together)", 1.0, "steps"
    unit = next((unit for unit, seconds in TIMES.items() if last >= 2.0 * seconds), "s")
    return f"time of training [{unit}]", TIMES[unit], unit


def read_runs(folders: Sequence[Path], key: str, x_column: str) -> list[SavedCurves]:
    """Returns the runs; among several, one that has no value of the column yet is left out."""
    from gpusim_rl.errors import ConfigError, did_you_mean, say
    from gpusim_rl.view.curves import read_run

    runs = []
    for folder in folders:
        run = read_run(folder)
        file, columns = run.run.metrics_csv, run.columns
        for name in (key, x_column):
            if name not in columns:
                available = f" Available: {', '.join(columns)}" if columns else " It has none"
                raise ConfigError(f"{file} has no column {name!r}.{did_you_mean(name, columns)}{available}")
        if len(run.curve(key, x_column).x):
            runs.append(run)
            continue
        unknown = f"{file}: {key} is not known in any row yet"
        if folder == folders[-1] and not runs:
            raise ConfigError(unknown)
        say(f"skipped {unknown}", file=sys.stderr)
    return runs


if __name__ == "__main__":
    sys.exit(main())
