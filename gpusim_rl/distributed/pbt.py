"""Population-based training (Jaderberg et al. 2017, arXiv 1711.09846): how settings change, and who copied whom.

Ray Tune's scheduler decides which trial copies which one (`ray_search.py`). A trial that copies is a run that goes on
from a checkpoint of another one, with other settings. Each interval of each trial is a row of `population.csv`.
"""

from __future__ import annotations

import csv
import functools
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpusim_rl.distributed.search import Search, Space
from gpusim_rl.errors import warn
from gpusim_rl.files import paths
from gpusim_rl.files.safe_open import load_yaml, replacing

FACTOR = (1.1, 1.5)
"""A value on a logarithmic scale is multiplied or divided by a number in this range."""
SHARE = (0.1, 0.3)
"""Another value moves by this share of the range."""
TABLE, PICTURE = "population.csv", "lineage.png"


def explored(settings: Mapping[str, Any], space: Space, chance: random.Random) -> dict[str, Any]:
    """Returns other settings near those of a trial that is copied, within the space."""
    near = dict(settings)
    for key, allowed in space.items():
        up = chance.choice((-1, 1))
        if "choices" in allowed:
            place = allowed["choices"].index(settings[key]) + up
            near[key] = allowed["choices"][min(max(place, 0), len(allowed["choices"]) - 1)]
            continue
        low, high = allowed["low"], allowed["high"]
        if allowed.get("log"):
            value = settings[key] * chance.uniform(*FACTOR) ** up
        else:
            value = settings[key] + up * chance.uniform(*SHARE) * (high - low)
        if isinstance(low, int) and isinstance(high, int):  # by one at least
            value = max(round(value), settings[key] + 1) if up > 0 else min(round(value), settings[key] - 1)
        near[key] = min(max(value, low), high)
    return near


def newest_checkpoint(trial: Path, iterations: int) -> Path | None:
    """Finds the newest checkpoint in the run folders of a trial from which something is left to train."""
    from gpusim_rl.files.checkpoint_file import is_whole  # torch

    files = sorted(trial.glob("2*/checkpoints/[0-9]*.pt"), key=lambda file: file.stat().st_mtime_ns, reverse=True)
    for file in files:
        if int(file.stem) < iterations:
            if is_whole(file):
                return file
            warn(f"{file} is left out: it is damaged")
    return None


def settings_of(run: Path, keys: Iterable[str]) -> dict[str, Any]:
    """Reads settings of a run folder, by key."""
    config = load_yaml(run / "config.yaml")
    return {key: functools.reduce(lambda node, name: node[name], key.split("."), config) for key in keys}


# The table


def add_row(folder: Path, row: Mapping[str, Any]) -> None:
    """Adds an interval of a trial to the table in the folder of a study; the first one makes the table."""
    with (folder / TABLE).open("a", newline="") as file:
        writer = csv.DictWriter(file, row, lineterminator="\n")
        if not file.tell():
            writer.writeheader()
        writer.writerow(row)


def read_rows(folder: Path) -> list[dict[str, str]]:
    """Reads the newest row of each interval of each trial of a study, in the order of the iterations."""
    if not (folder / TABLE).is_file():
        return []
    with (folder / TABLE).open(newline="") as file:
        whole = [row for row in csv.DictReader(file) if None not in row.values()]  # a kill may have cut the last one
    newest = {(int(row["iteration"]), int(row["trial"])): row for row in whole}
    return [newest[interval] for interval in sorted(newest)]


def report(search: Search) -> list[str]:
    """Draws who copied whom, and returns lines for the user; none for other methods."""
    rows = read_rows(search.folder)
    if not rows:
        return []
    copies, folder = sum(row["parent"] != row["trial"] for row in rows), paths.from_here(search.folder)
    lines = [f"{copies} cop{'y' if copies == 1 else 'ies'}: {folder / TABLE}"]
    if _draw(search, rows):
        lines.append(f"picture: {folder / PICTURE}")
    return lines


def _draw(search: Search, rows: Sequence[Mapping[str, str]]) -> bool:
    """Draws who copied whom, and the paths of the settings; False where there is no matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    space, trials = search.space, sorted({int(row["trial"]) for row in rows})
    figure = Figure(figsize=(9, 2.2 * (len(space) + 2)))
    tree, score, *of_settings = axes = figure.subplots(len(space) + 2, 1, sharex=True)
    for row in rows:
        trial, parent = int(row["trial"]), int(row["parent"])
        style = {"color": f"C{parent % 10}", "linewidth": 1.2 if parent == trial else 2.0}
        tree.plot([int(row["since"]), int(row["iteration"])], [parent, trial], marker="o", markersize=3, **style)
    for trial in trials:
        intervals = [row for row in rows if int(row["trial"]) == trial]
        iterations = [int(row["iteration"]) for row in intervals]
        score.plot(iterations, [float(row["score"]) for row in intervals], color=f"C{trial % 10}")
        for axis, (key, allowed) in zip(of_settings, space.items(), strict=True):
            values = [float(row[key]) if "low" in allowed else row[key] for row in intervals]
            axis.plot(iterations, values, color=f"C{trial % 10}", drawstyle="steps-pre")
    tree.set(ylabel="trial", yticks=trials, title=f"{search.cfg.study}: a line that changes its row is a copy")
    score.set_ylabel("score")
    for axis, (key, allowed) in zip(of_settings, space.items(), strict=True):
        axis.set(ylabel=key, yscale="log" if allowed.get("log") else "linear")
    axes[-1].set_xlabel("iterations")
    with replacing(search.folder / PICTURE) as target:
        figure.savefig(target, format="png", dpi=120, bbox_inches="tight")
    return True
