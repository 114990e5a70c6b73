"""Population-based training (Jaderberg et al. 2017, arXiv 1711.09846): perturbation of settings and table of copies.

Ray Tune's scheduler decides which trial copies which. A copy is a run that continues from another trial's checkpoint.
"""

from __future__ import annotations

import functools
import os
import random
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpusim_rl.distributed.search import Space
from gpusim_rl.distributed.tuning import csv_text
from gpusim_rl.errors import warn
from gpusim_rl.files.safe_open import load_yaml, open_file

FACTOR = (1.1, 1.5)  # range of the factor or divisor for log-scale values
SHARE = (0.1, 0.3)  # step of other values, as a fraction of their range
TABLE = "population.csv"  # one row per trial and interval; repeated intervals add rows
LONGEST_ROW = 65_536  # [bytes]


def explored(settings: Mapping[str, Any], space: Space, chance: random.Random) -> dict[str, Any]:
    """Return a copied trial's settings, perturbed within the search space."""
    near = dict(settings)
    for key, allowed in space.items():
        up = chance.choice((-1, 1))
        if choices := allowed.get("choices"):
            near[key] = choices[min(max(choices.index(settings[key]) + up, 0), len(choices) - 1)]
            continue
        low, high = allowed["low"], allowed["high"]
        if allowed.get("log"):
            value = settings[key] * chance.uniform(*FACTOR) ** up
        else:
            value = settings[key] + up * chance.uniform(*SHARE) * (high - low)
        if isinstance(low, int) and isinstance(high, int):  # move by at least one
            value = max(round(value), settings[key] + 1) if up > 0 else min(round(value), settings[key] - 1)
        near[key] = min(max(value, low), high)
    return near


def newest_checkpoint(trial: Path, iterations: int) -> Path | None:
    """Return a trial's newest intact checkpoint with iterations left, or None."""
    from gpusim_rl.files.checkpoint_file import is_whole  # imports torch

    files = [file for file in trial.glob("2*/checkpoints/[0-9]*.pt") if re.fullmatch("[0-9]{1,18}", file.stem)]
    for file in sorted(files, key=lambda file: (file.parts[-3], int(file.stem)), reverse=True):  # run, iteration
        if int(file.stem) < iterations:
            if is_whole(file):
                return file
            warn(f"skipped {file}: the checkpoint is damaged")
    return None


def settings_of(run: Path, space: Space) -> dict[str, Any] | None:
    """Read a run's values of the searched settings; warn and return None if they are outside the space."""

    def is_within(value: Any, allowed: Mapping[str, Any]) -> bool:
        if "choices" in allowed:
            return value in allowed["choices"]
        return type(value) in (int, float) and allowed["low"] <= value <= allowed["high"]

    config = load_yaml(run / "config.yaml")
    with suppress(KeyError, TypeError):
        settings = {key: functools.reduce(lambda node, name: node[name], key.split("."), config) for key in space}
        if all(is_within(value, space[key]) for key, value in settings.items()):
            return settings
    warn(f"skipped {run}: its settings are outside the search space")
    return None


def add_row(folder: Path, row: Mapping[str, Any]) -> None:
    """Append a row to a study's table; first remove a row truncated by a full disk."""
    with open_file(folder / TABLE, "ab+") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - LONGEST_ROW))
        whole = file.truncate(end - len(file.read().rpartition(b"\n")[2]))
        file.write(csv_text([row], header=whole == 0))
