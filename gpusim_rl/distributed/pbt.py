"""Population-based training (Jaderberg et al. 2017, arXiv 1711.09846): how settings change, and who copied whom.

Ray Tune's scheduler decides which trial copies which one (`ray_search.py`). A trial that copies is a run that goes on
from a checkpoint of another one, with other settings. Each interval of each trial is a row of `population.csv`.
"""

from __future__ import annotations

import csv
import functools
import io
import math
import random
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpusim_rl.distributed.search import Search, Space
from gpusim_rl.errors import warn
from gpusim_rl.files import paths
from gpusim_rl.files.budgets import LINE_BYTES, TABLE_BYTES
from gpusim_rl.files.safe_open import load_yaml, open_file, read_bytes, replacing

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


def is_within(value: Any, allowed: Mapping[str, Any]) -> bool:
    """Returns whether a value of a setting is one of its choices, or within its range."""
    if "choices" in allowed:
        return value in [choice for choice in allowed["choices"] if isinstance(choice, bool) == isinstance(value, bool)]
    return type(value) in (int, float) and allowed["low"] <= value <= allowed["high"]


def newest_checkpoint(trial: Path, iterations: int) -> Path | None:
    """Finds the newest checkpoint in the run folders of a trial from which something is left to train."""
    from gpusim_rl.files.checkpoint_file import is_whole  # torch

    files = [file for file in trial.glob("2*/checkpoints/[0-9]*.pt") if re.fullmatch("[0-9]{1,18}", file.stem)]
    # The names of run folders begin with a time.
    for file in sorted(files, key=lambda file: (file.parts[-3], int(file.stem)), reverse=True):
        if int(file.stem) < iterations:
            if is_whole(file):
                return file
            warn(f"{file} is left out: it is damaged")
    return None


def settings_of(run: Path, space: Space) -> dict[str, Any] | None:
    """Reads the settings of the space from a run folder; None, with a warning, where they are not of the space."""
    config = load_yaml(run / "config.yaml")
    with suppress(KeyError, TypeError):
        settings = {key: functools.reduce(lambda node, name: node[name], key.split("."), config) for key in space}
        if all(is_within(value, space[key]) for key, value in settings.items()):
            return settings
    warn(f"{run} is left out: its settings are not of this space")
    return None


# The table


def add_row(folder: Path, row: Mapping[str, Any]) -> None:
    """Adds an interval of a trial to the table in the folder of a study; the first one makes the table."""
    text = io.StringIO()
    writer = csv.DictWriter(text, row, lineterminator="\n")
    with open_file(folder / TABLE, "ab+") as file:
        end = file.seek(max(0, file.seek(0, 2) - LINE_BYTES))
        if not file.truncate(end + file.read().rfind(b"\n") + 1):  # a kill may have cut the last row
            writer.writeheader()
        writer.writerow(row)
        file.write(text.getvalue().encode())


def read_rows(search: Search) -> list[dict[str, str]]:
    """Reads the newest row of each interval of each trial of a study, in the order of the iterations.

    Rows that are not of the search are left out, with a warning.
    """
    try:
        text = read_bytes(search.folder / TABLE, TABLE_BYTES).decode(errors="replace")
    except FileNotFoundError:
        return []
    lines = [_cells(line) for line in text[: text.rfind("\n") + 1].split("\n")[:-1]]  # a kill may have cut the last one
    rows = [dict(zip(lines[0], cells, strict=False)) for cells in lines[1:] if len(cells) == len(lines[0])]
    rows = [row for row in rows if _is_of(row, search)]
    if odd := len(lines[1:]) - len(rows):
        those = "1 row that is not of this search is" if odd == 1 else f"{odd} rows that are not of this search are"
        warn(f"{search.folder / TABLE}: {those} left out")
    newest = {(int(row["iteration"]), int(row["trial"])): row for row in rows}
    return [newest[interval] for interval in sorted(newest)]


def _cells(line: str) -> list[str]:
    with suppress(csv.Error):
        return next(csv.reader([line]), [])
    return []


def _is_of(row: Mapping[str, str], search: Search) -> bool:
    """Whether a row of the table may be of a search."""
    with suppress(KeyError, ValueError):
        counts = [row[name] for name in ("trial", "parent", "since", "iteration")]
        if not all(re.fullmatch("[0-9]{1,18}", text) for text in counts):
            return False
        trial, parent, since, iteration = map(int, counts)
        of_space = (
            row[key] in map(str, allowed["choices"]) if "choices" in allowed else is_within(float(row[key]), allowed)
            for key, allowed in search.space.items()
        )
        known = max(trial, parent) < search.cfg.trials and since <= iteration <= search.iterations
        return known and math.isfinite(float(row["score"])) and all(of_space)
    return False


def report(search: Search) -> list[str]:
    """Draws who copied whom, and returns lines for the user; none for other methods."""
    rows = read_rows(search)
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
    name = search.cfg.study.replace("$", r"\$")  # no formula
    tree.set(ylabel="trial", yticks=trials, title=f"{name}: a line that changes its row is a copy")
    score.set_ylabel("score")
    for axis, (key, allowed) in zip(of_settings, space.items(), strict=True):
        axis.set(ylabel=key, yscale="log" if allowed.get("log") else "linear")
    axes[-1].set_xlabel("iterations")
    with replacing(search.folder / PICTURE) as target:
        figure.savefig(target, format="png", dpi=120, bbox_inches="tight")
    return True
