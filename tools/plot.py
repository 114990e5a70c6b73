"""Plot learning curves: runs that differ only in their seed become one line, mean and standard deviation.

python tools/plot.py Ant                                     the latest Ant run
python tools/plot.py runs/Ant/*                              all Ant runs
python tools/plot.py runs/Ant/* --key policy/kl --x time     another column, over wall-clock time
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from gpusim_rl.view.curves import SavedCurves

X_COLUMNS = {"env_steps": ("env_steps", "env steps"), "time": ("time/elapsed_s", "time [s]")}
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
    from gpusim_rl.files.safe_open import replacing
    from gpusim_rl.view.curves import grouped, run_folders

    import_extra("matplotlib", "plot", "plot")
    folders = run_folders(args.runs)
    name = f"{args.key.replace('/', '_')}.png"
    out = args.out or (folders[0] / name if len(folders) == 1 else Path(name))
    if out.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"--out must end in .png, .svg or .pdf, got {out}")
    check_out(args.out, overwrite=args.overwrite)
    runs = read_runs(folders, args.key, X_COLUMNS[args.x][0])
    figure = draw(grouped(runs), args.key, *X_COLUMNS[args.x])
    try:
        with replacing(out) as file:  # a link there is replaced, not followed
            figure.savefig(file, format=out.suffix[1:], dpi=150)
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror}") from None
    return out


def draw(groups: Sequence[Sequence[SavedCurves]], key: str, x_column: str, x_label: str) -> Figure:
    """Returns the picture: a line for each group of runs, and below the axes their titles.

    Beyond the end of the shortest run, where a mean ends, each run has a thin line.
    """
    from matplotlib.figure import Figure

    from gpusim_rl.view.curves import beyond, count, mean_and_std, titles

    figure = Figure(layout="constrained")
    axes = figure.subplots()
    rows = 0  # rows of the legend
    for runs, title in zip(groups, titles([runs[0].settings for runs in groups]), strict=True):
        curves = [run.curve(key, x_column) for run in runs]
        x, mean, std = mean_and_std(curves)
        rests = beyond(curves, x)
        note = "; mean as far as the shortest" if rests and len(x) else "; no mean: no x in common" if rests else ""
        label = f"{title} ({count(runs)}{note})" if len(runs) > 1 else title
        label = textwrap.fill(label, LABEL_WIDTH).replace("$", r"\$")  # a dollar would begin a formula
        rows += 1 + label.count("\n")
        [line] = axes.plot(x, mean, label=label)
        if len(curves) > 1:
            axes.fill_between(x, mean - std, mean + std, color=line.get_color(), alpha=0.2, linewidth=0)
        for rest in rests:
            axes.plot(rest.x, rest.y, color=line.get_color(), linewidth=0.8, alpha=0.8)
        if rests and len(x):
            axes.plot(x[-1:], mean[-1:], marker="|", markersize=12, color=line.get_color())
    axes.set_xlabel(x_label)
    axes.set_ylabel(key)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", frameon=False, fontsize="small")
    figure.set_size_inches(8, 5 + 0.2 * rows)
    return figure


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
    # As for train.py: the checkout that this file is in, whether it is installed or not.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    sys.exit(main())
