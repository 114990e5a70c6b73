"""Training in a temporary folder, for measurements."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from gpusim_rl.api import load_spec
from gpusim_rl.distributed.actors import make_trainer
from gpusim_rl.run.logger import Logger
from gpusim_rl.run.trainer import Trainer
from gpusim_rl.settings.compose import compose
from gpusim_rl.settings.overrides import quote


@contextmanager
def scratch_training(overrides: Sequence[str]) -> Iterator[tuple[Trainer, Logger]]:
    """Build a silent training run whose folder is deleted after the block.

    with scratch_training(["task=Ant", "num_envs=64"]) as (trainer, log):
        trainer.iterate(log)
    """
    with tempfile.TemporaryDirectory() as folder:
        quiet = [f"log.dir={quote(folder)}", "log.console=quiet", "log.checkpoint_interval=1000000", "compile=off"]
        spec = load_spec(compose([*quiet, "max_iterations=1000000", *overrides]), overrides)
        trainer = make_trainer(spec)
        with trainer.logging() as log:
            yield trainer, log
