"""Train or evaluate a task.

python train.py                                        Cartpole, on the available hardware
python train.py task=Ant num_envs=4096                 4096 ants at once
python train.py checkpoint=Ant                         resume the latest Ant run
python train.py test=true checkpoint=Ant               evaluate it
torchrun --nproc-per-node=4 train.py task=Ant multi_gpu=true
python train.py --help                                 the settings people change
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from gpusim_rl import interrupts

    interrupts.install()  # before slow imports

import logging
import os
from typing import Any

from gpusim_rl.files.paths import Checkpoint
from gpusim_rl.settings.compose import RunResult, hydra_main


@hydra_main
def main(config: dict[str, Any], overrides: list[str], checkpoint: Checkpoint | None) -> RunResult:
    """Check the config against the task and the algorithm, then train or evaluate."""
    # Heavy imports start here: --help, TAB and typos are handled without torch.
    from gpusim_rl.machine.hardware import check_address_space

    check_address_space()
    logging.getLogger("gpusim_rl").setLevel(logging.INFO)  # for example, kernel compilation
    from gpusim_rl.api import load_spec

    spec = load_spec(config, overrides, checkpoint)

    from gpusim_rl.distributed.actors import make_trainer
    from gpusim_rl.distributed.data_parallel import joined
    from gpusim_rl.run.evaluation import evaluate_run

    with joined(spec) as collective:
        if spec.cfg.test:
            return RunResult(str(spec.cfg.checkpoint), evaluate_run(spec)["return_mean"], None)
        trainer = make_trainer(spec, collective)
        row = trainer.train()
    return RunResult(str(trainer.run_dir), row.get("episode/return"), row.get("episode/best_return"))


if __name__ == "__main__":
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from gpusim_rl.machine.hardware import import_torch

        import_torch()
        from gpusim_rl.distributed.data_parallel import continued

        sys.argv[1:] = continued(sys.argv[1:])
    main()
