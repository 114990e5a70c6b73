"""Specification of a training: settings, and the classes that they name. Free of torch."""

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
    """A run, composed, checked, and with its classes loaded.

    Attributes:
        cfg: All settings.
        task_class: Task, whose configuration is `cfg.task`; or environment of another library, with `cfg.env`.
        algorithm_class: Algorithm, whose configuration is `cfg.algorithm`.
        config: Composed configuration as plain values, for the run folder and the checkpoints.
        overrides: Command line from which `train.py` composes the same configuration.
        checkpoint: Checkpoint that `cfg.checkpoint` names; None for a new run.
        config_dir: Folder of the user (`-cd`); None without one.
        envs: Envs that a script of the user has made; None makes them from the settings.
    """

    cfg: RunConfig
    task_class: type[Task[Any]] | type[Environment]
    algorithm_class: type[Algorithm]
    config: dict[str, Any]
    overrides: list[str]
    checkpoint: Checkpoint | None = None
    config_dir: Path | None = None
    envs: Environment | None = None
