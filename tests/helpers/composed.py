"""Composed configs, made once: Hydra needs a fifth of a second for each, and most tests ask for the same ones."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

FOLDER = "log.dir="  # differs from test to test, and is a value that goes through as it is


@pytest.fixture(autouse=True, scope="session")
def composed_once() -> Iterator[None]:
    """Let Python callers (`gpusim_rl.api`) compose the same settings once; with a folder of the user's, each time."""
    from gpusim_rl import api, paths

    compose, tasks = api.compose, api.tasks
    configs: dict[Any, dict[str, Any]] = {}
    entries: dict[Path, Any] = {}

    def compose_once(overrides: Sequence[str] = (), config_dir: str | Path | None = None) -> dict[str, Any]:
        folders = [line.removeprefix(FOLDER) for line in overrides if line.startswith(FOLDER)]
        if config_dir is not None or not all(re.fullmatch(r"/[\w/-]+", folder) for folder in folders):
            return compose(overrides, config_dir)
        key = (paths.cfg_dir(), *(line for line in overrides if not line.startswith(FOLDER)))
        if key not in configs:
            configs[key] = compose(overrides)
        config = copy.deepcopy(configs[key])
        config["log"]["dir"] = folders[-1] if folders else "runs"
        return config

    def tasks_once(config_dir: str | Path | None = None) -> Any:
        if config_dir is not None:
            return tasks(config_dir)
        if paths.cfg_dir() not in entries:
            entries[paths.cfg_dir()] = tasks()
        return entries[paths.cfg_dir()]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "compose", compose_once)
        patch.setattr(api, "tasks", tasks_once)
        yield
