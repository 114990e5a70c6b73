"""Cache of composed configs: Hydra takes 0.2 s, and most tests need the same ones."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpusim_rl.files import paths
from gpusim_rl.settings import compose as composing
from gpusim_rl.settings import discover
from helpers import kept_yaml

FOLDER = "log.dir="  # differs between tests, and is passed through


def compose_once() -> None:
    """Cache the answers of `compose` and `tasks`, except for a user's folder."""
    kept_yaml.keep()
    compose, tasks = composing.compose, discover.tasks
    configs: dict[tuple[Path | str, ...], dict[str, Any]] = {}
    entries: dict[tuple[bool, tuple[tuple[str, Path], ...]], dict[str, discover.TaskEntry]] = {}

    def kept_compose(
        overrides: Sequence[str] = (), config_dir: str | Path | None = None, saved: Any = None
    ) -> dict[str, Any]:
        folders = [line.removeprefix(FOLDER) for line in overrides if line.startswith(FOLDER)]
        if (
            config_dir is not None
            or saved is not None
            or not all(re.fullmatch(r"/[\w/.-]+", folder) for folder in folders)
        ):
            return compose(overrides, config_dir, saved)
        key = (paths.cfg_dir(), *(line for line in overrides if not line.startswith(FOLDER)))
        if key not in configs:
            configs[key] = compose(list(key[1:]))
        config = copy.deepcopy(configs[key])
        if folders:
            config["log"]["dir"] = folders[-1]
        return config

    def kept_tasks(config_dir: str | Path | None = None, *, outside: bool = False) -> dict[str, discover.TaskEntry]:
        if config_dir is not None:
            return tasks(config_dir, outside=outside)
        key = (outside, tuple(discover.cfg_dirs()))  # a test may add an entry point
        if key not in entries:
            entries[key] = tasks(outside=outside)
        return dict(entries[key])

    composing.compose, discover.tasks = kept_compose, kept_tasks


def algorithm_defaults(name: str) -> dict[str, Any]:
    """Return the default settings of `algo=<name>`."""
    return composing.compose(["~task", f"algo={name}"])[name]
