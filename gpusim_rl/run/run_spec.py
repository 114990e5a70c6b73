"""Specification of a run: settings and the classes that they name. Does not import torch."""

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
    """Validated settings of a run, with the classes that they name."""

    cfg: RunConfig
    task_class: type[Task[Any]] | type[Environment]  # configured by `cfg.task` or `cfg.env`
    algorithm_class: type[Algorithm]  # configured by `cfg.algorithm`
    config: dict[str, Any]  # composed config as plain values
    overrides: list[str]  # equivalent command-line overrides
    checkpoint: Checkpoint | None = None
    config_dir: Path | None = None  # the user's folder (`-cd`)
    envs: Environment | None = None  # ready-made by the user's script
