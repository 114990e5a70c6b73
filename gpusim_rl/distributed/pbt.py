"""Population-based training (Jaderberg et al. 2017, arXiv 1711.09846): how settings change, and who copied whom.

Ray Tune's scheduler decides which trial copies which one (`ray_search.py`). A trial that copies is a run that continues
a checkpoint of another one, with other settings. Each interval of each trial is a row of `population.csv`.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpusim_rl.distributed.search import Space
from gpusim_rl.distributed.tuning import Study, write_table
from gpusim_rl.errors import warn
from gpusim_rl.files.safe_open import load_yaml

FACTOR = (1.1, 1.5)
"""A value on a logarithmic scale is multiplied or divided by a number in this range."""
SHARE = (0.1, 0.3)
"""Another value moves by this share of the range."""
TABLE = "population.csv"
INTERVAL = "interval "
"""Beginning of the attributes of a study that hold the rows of the table."""


def explored(settings: Mapping[str, Any], space: Space, chance: random.Random) -> dict[str, Any]:
    """Return other settings near those of a trial that is copied, within the space."""
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
    """Find the newest checkpoint in the run folders of a trial from which something is left to train."""
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
    """Read the settings of the space from a run folder; None, with a warning, where they are not of the space."""

    def is_within(value: Any, allowed: Mapping[str, Any]) -> bool:
        if "choices" in allowed:
            return value in allowed["choices"]
        return type(value) in (int, float) and allowed["low"] <= value <= allowed["high"]

    config = load_yaml(run / "config.yaml")
    with suppress(KeyError, TypeError):
        settings = {key: functools.reduce(lambda node, name: node[name], key.split("."), config) for key in space}
        if all(is_within(value, space[key]) for key, value in settings.items()):
            return settings
    warn(f"{run} is left out: its settings are not of this space")
    return None


def add_row(study: Study, row: Mapping[str, Any]) -> None:
    """Add an interval of a trial to the study, and write the table with all of them again."""
    study.trials.set_user_attr(f"{INTERVAL}{row['trial']} {row['iteration']}", dict(row))
    rows = [row for name, row in study.trials.user_attrs.items() if name.startswith(INTERVAL)]
    write_table(study.search.folder / TABLE, sorted(rows, key=lambda row: (row["iteration"], row["trial"])))
