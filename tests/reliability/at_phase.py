"""`train.py` with a signal in one phase: `at_phase.py PHASE SIGNAL SETTING=VALUE...`.

The process sends the signal to itself. The marker file `sent` in the current folder then holds the iteration.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

FROM_ITERATION = 5
"""Completed iterations before a signal in a phase of an iteration: between two checkpoints."""
PHASES = (
    "before the run folder",
    "before the first iteration",
    "rollout",
    "update",
    "metrics",
    "writing a checkpoint",
    "evaluation",
    "end",
    "closing",
)


def main() -> None:
    """Wrap the function of the phase, then run train.py."""
    import torch

    from gpusim_rl.env import VecEnv
    from gpusim_rl.learn.optimizer import MaskedAdamW
    from gpusim_rl.run import make_env
    from gpusim_rl.run.logger import Logger
    from gpusim_rl.run.trainer import Trainer
    from gpusim_rl.run.writers import CsvWriter

    phase, number = sys.argv[1], int(sys.argv[2])
    trainers: list[Any] = []

    def send() -> None:
        marker = Path("sent")
        if not marker.exists():
            marker.write_text(str(trainers[0].iteration if trainers else 0))
            os.kill(os.getpid(), number)

    def before(owner: Any, name: str, due: Callable[[], bool] = lambda: True) -> None:
        original = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if due():
                send()
            return original(*args, **kwargs)

        setattr(owner, name, wrapped)

    def in_iteration() -> bool:
        return bool(trainers) and trainers[0].iteration >= FROM_ITERATION

    build = Trainer.__init__

    def building(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        trainers.append(self)

    Trainer.__init__ = building  # type: ignore[method-assign]
    functions: dict[str, tuple[Any, ...]] = {
        "before the run folder": (make_env, "make_env"),
        "before the first iteration": (Logger, "start"),
        "rollout": (VecEnv, "step", in_iteration),
        "update": (MaskedAdamW, "masked_step", in_iteration),
        "metrics": (CsvWriter, "_append", in_iteration),
        "evaluation": (VecEnv, "step"),
        "end": (Logger, "finish"),
        "closing": (Logger, "__exit__"),
    }
    if phase == "writing a checkpoint":
        torch_save = torch.save

        def saving(payload: Any, file: Any) -> None:
            if in_iteration():
                file.write(b"half a file")
                file.flush()
                send()
                file.seek(0)
                file.truncate()
            torch_save(payload, file)

        torch.save = saving
    else:
        before(*functions[phase])

    train = Path(__file__).resolve().parents[2] / "train.py"
    sys.argv = [str(train), *sys.argv[3:]]
    runpy.run_path(str(train), run_name="__main__")


if __name__ == "__main__":
    main()
