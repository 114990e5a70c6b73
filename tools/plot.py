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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure

X_COLUMNS = {"env_steps": ("env_steps", "env steps"), "time": ("time/elapsed_s", "time [s]")}
# Settings that may differ between runs of one line: they do not change what is learned on average, or are names.
FREE = ("seed", "experiment", "checkpoint", "test", "headless", "log", "wandb_", "debug", "max_iterations")
POINTS = 400  # points of a line
LABEL_WIDTH = 100  # characters of the legend on one row


@dataclass(frozen=True)
class Curve:
    """One run's column over x."""

    settings: dict[str, Any]  # values by full key, without those in FREE
    seed: int
    x: np.ndarray
    y: np.ndarray


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

    import_extra("matplotlib", "plot", "plot")
    folders = run_folders(args.runs)
    name = f"{args.key.replace('/', '_')}.png"
    out = args.out or (folders[0] / name if len(folders) == 1 else Path(name))
    if out.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"--out must end in .png, .svg or .pdf, got {out}")
    check_out(args.out, overwrite=args.overwrite)
    column, x_label = X_COLUMNS[args.x]
    groups: dict[str, list[Curve]] = {}
    for curve in read_curves(folders, args.key, column):
        groups.setdefault(repr(sorted(curve.settings.items())), []).append(curve)

    figure = draw(list(groups.values()), x_label, args.key)
    try:
        with replacing(out) as file:  # a link there is replaced, not followed
            figure.savefig(file, format=out.suffix[1:], dpi=150)
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror}") from None
    return out


def draw(groups: Sequence[Sequence[Curve]], x_label: str, y_label: str) -> Figure:
    """Returns the picture: a line for each group of runs, and below the axes their titles."""
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    axes = figure.subplots()
    rows = 0  # rows of the legend
    for curves, title in zip(groups, titles([curves[0].settings for curves in groups]), strict=True):
        x, mean, std = mean_and_std(curves)
        seeds = len({curve.seed for curve in curves})
        count = f" ({seeds} seeds)" if seeds > 1 else f" ({len(curves)} runs)" if len(curves) > 1 else ""
        label = f"{title}{count}"
        label = textwrap.fill(label, LABEL_WIDTH).replace("$", r"\$")  # a dollar would begin a formula
        rows += 1 + label.count("\n")
        [line] = axes.plot(x, mean, label=label)
        if len(curves) > 1:
            axes.fill_between(x, mean - std, mean + std, color=line.get_color(), alpha=0.2, linewidth=0)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", frameon=False, fontsize="small")
    figure.set_size_inches(8, 5 + 0.2 * rows)
    return figure


def run_folders(names: Sequence[str]) -> list[Path]:
    """Returns the run folders that the user means, each once, without what a shell's `runs/Ant/*` also catches."""
    from gpusim_rl.errors import ConfigError, say
    from gpusim_rl.files.safe_open import refuse_links
    from gpusim_rl.run.run_dir import resolve_run

    folders: dict[Path, Path] = {}
    for name in names:
        path = Path(name)
        if not (path / "metrics.csv").is_file():
            if len(names) > 1 and path.exists():
                say(f"skipped {path}: no metrics.csv in it", file=sys.stderr)
                continue
            path = resolve_run(name)[0].path
        refuse_links(path.resolve())
        folders.setdefault(path.resolve(), path)
    if not folders:
        raise ConfigError(f"none of {', '.join(names)} is a run folder with metrics.csv")
    return list(folders.values())


def read_curves(folders: Sequence[Path], key: str, x_column: str) -> list[Curve]:
    """Returns the column of every run; among several, a run that has no value of it yet is left out."""
    from gpusim_rl.errors import ConfigError, say

    curves = []
    for folder in folders:
        try:
            curves.append(read_curve(folder, key, x_column))
        except LookupError as error:
            if folder == folders[-1] and not curves:
                raise ConfigError(str(error)) from None
            say(f"skipped {error}", file=sys.stderr)
    return curves


def read_curve(folder: Path, key: str, x_column: str) -> Curve:
    """Returns one column of a run's metrics.csv, without the rows where it is not known.

    Raises:
        LookupError: No row has a value.
    """
    import numpy as np

    from gpusim_rl.errors import ConfigError, did_you_mean, warn
    from gpusim_rl.run.run_dir import RunDir
    from gpusim_rl.run.writers import read_csv
    from gpusim_rl.settings.schema import ALGORITHMS

    run = RunDir(folder)
    if not run.metrics_csv.is_file():
        raise ConfigError(f"{folder} has no metrics.csv: either it was deleted, or the first iteration is not over yet")
    content = read_csv(run.metrics_csv)
    columns = content.columns
    if content.damaged:
        warn(f"{run.metrics_csv} is damaged in line {content.damaged}: the curve ends before it")
    for name in (key, x_column):
        if name not in columns:
            available = f" Available: {', '.join(columns)}" if columns else " It has none"
            raise ConfigError(f"{run.metrics_csv} has no column {name!r}.{did_you_mean(name, columns)}{available}")
    rows = [dict(zip(columns, row, strict=True)) for row in content.rows]
    points = [(float(row[x_column]), float(row[key])) for row in rows if row[x_column] and row[key]]
    if not points:
        raise LookupError(f"{run.metrics_csv}: {key} is not known in any row yet")
    config = run.config
    if not is_of_a_run(config):
        raise ConfigError(
            f"{run.config_yaml} is not the settings of a run: expected a seed, and the sections task and algo"
        )
    algorithm = config["algo"]["name"]
    unused = tuple(f"{name}." for name in ALGORITHMS if name != algorithm)  # tuned values that a task's yaml holds
    settings = {name: value for name, value in flat(config) if not name.startswith((*FREE, *unused))}
    x, y = np.array(points).T
    return Curve(settings, config["seed"], x, y)


def is_of_a_run(config: Any) -> bool:
    """Returns whether settings, which may be a stranger's, have what names a line."""
    try:
        target, name, seed = config["task"]["_target_"], config["algo"]["name"], config["seed"]
    except (KeyError, TypeError):
        return False
    return isinstance(target, str) and isinstance(name, str) and isinstance(seed, int)


def flat(config: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Returns settings by full key."""
    pairs: list[tuple[str, Any]] = []
    for name, value in config.items():
        pairs += flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(f"{prefix}{name}", value)]
    return pairs


def titles(settings: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the titles of lines: task, algorithm, and the settings that differ from other lines of that task.

    An algorithm is named where those of a task differ; a setting counts where both lines have it.
    """

    def task(line: dict[str, Any]) -> str:
        return str(line["task._target_"]).rpartition(".")[2]

    lines = []
    for line in settings:
        same_task = [other for other in settings if task(other) == task(line)]
        words = [task(line)]
        if len({other.get("algo.name") for other in same_task}) > 1:
            words.append(str(line.get("algo.name")))
        for key, value in line.items():
            if not key.startswith("algo.") and any(key in other and other[key] != value for other in same_task):
                words.append(f"{key.removeprefix('task.')}={value}")
        lines.append(" ".join(words))
    return lines


def mean_and_std(curves: Sequence[Curve]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns x, and mean and standard deviation over the runs that have got as far as x."""
    import numpy as np

    if len(curves) == 1:
        return curves[0].x, curves[0].y, np.zeros_like(curves[0].y)
    x = np.linspace(min(curve.x[0] for curve in curves), max(curve.x[-1] for curve in curves), POINTS)
    covered = np.stack([(curve.x[0] <= x) & (x <= curve.x[-1]) for curve in curves])
    x, covered = x[covered.any(axis=0)], covered[:, covered.any(axis=0)]
    values = np.stack([np.interp(x, curve.x, curve.y) for curve in curves])
    mean = np.average(values, axis=0, weights=covered)
    return x, mean, np.sqrt(np.average((values - mean) ** 2, axis=0, weights=covered))


if __name__ == "__main__":
    # As for train.py: the checkout that this file is in, whether it is installed or not.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    sys.exit(main())
