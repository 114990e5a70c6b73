"""Search for the best settings of a task.

gpusim-rl tune task=Ant trials=20                                 PPO settings, with Optuna
gpusim-rl tune task=Ant algo=sac num_envs=64 space=my_space.yaml  your own search space
gpusim-rl tune task=Ant trials=40 study=ants                      continue a study, even from several terminals
gpusim-rl tune task=Ant trials=8 method=pbt                       population-based training, on Ray
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    import _checkout  # noqa: F401

import argparse
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from gpusim_rl.errors import ConfigError, friendly_errors, say
from gpusim_rl.options import Parser


def main(argv: list[str] | None = None) -> int:
    with friendly_errors():
        args = parse(argv)
        from gpusim_rl.distributed.search import read_search
        from gpusim_rl.distributed.tuning import tune

        search = read_search(args.settings, args.config_dir)
        if search.cfg.method != "optuna":
            from gpusim_rl.distributed.ray_search import tune
        try:
            with stoppable(search.folder):
                lines = tune(search)
        except OSError as error:
            if error.strerror is None:  # not a file error
                raise
            place = error.filename or search.folder
            hint = "Run the same command to resume"
            raise ConfigError(error.strerror, key=str(place), hint=hint) from None
        say(*lines)
    return 0


@contextmanager
def stoppable(folder: Path) -> Iterator[None]:
    """Treat SIGTERM and a closed terminal like Ctrl-C, and report where finished trials are."""
    received: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        received.append(number)
        ctrl_c = signal.getsignal(signal.SIGINT)  # Ray Tune's handler ends the trials with checkpoints
        if not callable(ctrl_c):
            raise KeyboardInterrupt
        ctrl_c(signal.SIGINT, frame)

    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
    handlers = {number: signal.signal(number, stop) for number in numbers}  # nohup ignores SIGHUP
    try:
        yield
    except KeyboardInterrupt:
        with suppress(OSError):  # the terminal is gone
            say(f"stopped: finished trials are in {folder}; run the same command to resume", file=sys.stderr)
        if received:
            raise SystemExit(128 + received[0]) from None
        raise
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("tune", __doc__)
    parser.option("settings", "and search settings (below)", nargs="+")
    parser.rows["Search"] = [
        ("method=NAME", "optuna; asha or pbt on Ray (default: optuna)"),
        ("trials=N", "total number of trials in the study (default: 20)"),
        ("study=NAME", "study to start or continue"),
        ("space=FILE", "yaml of the search space"),
        ("pruner=NAME", "hyperband, median or none, with optuna (default: hyperband)"),
        ("grace=N", "iterations before asha may stop a trial, or between changes by pbt (default: a ninth of a run)"),
        ("stall_s=S", "time without a new metrics row after which a trial fails [s] (default: 600)"),
    ]
    parser.option("--config-dir")
    return parser.parse_intermixed_args(argv)


if __name__ == "__main__":
    sys.exit(main())
