"""Specification of a run: settings and the classes that they name. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpusim_rl.files.paths import Checkpoint
from gpusim_rl.settings.schema import RunConfig

if TYPE_CHECKING:
    from gpusim_rl.env import Environment, Task
    from gpusim_rl.learn.algorithm import Algorithm


@dataclass(frozen=True, slots=True)
class RunSpec:
    """Composed and checked run with its classes.

    Attributes:
        cfg: Settings.
        task_class: Task (configured by `cfg.task`) or environment of another library (`cfg.env`).
        algorithm_class: Algorithm, configured by `cfg.algorithm`.
        config: Composed configuration as plain values.
        overrides: Equivalent command line.
        checkpoint: Checkpoint to continue from or evaluate.
        config_dir: Folder of the user (`-cd`).
        envs: Ready-made envs of the user's script.
    """

    cfg: RunConfig
    task_class: type[Task[Any]] | type[Environment]
    algorithm_class: type[Algorithm]
    config: dict[str, Any]
    overrides: list[str]
    checkpoint: Checkpoint | None = None
    config_dir: Path | None = None
    envs: Environment | None = None
