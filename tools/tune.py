"""Search settings: each trial is a normal run; hopeless ones are stopped early.

python tools/tune.py task=Ant trials=20                                       PPO's settings, with Optuna
python tools/tune.py task=Ant algo=sac num_envs=64 space=my_space.yaml        your own space of settings
python tools/tune.py task=Ant trials=40 study=ants                            again: continues, until there are 40
python tools/tune.py task=Ant trials=40 method=asha                           the trials on Ray
python tools/tune.py task=Ant trials=8 method=pbt                             population-based training, on Ray

With Optuna the same command in several terminals of one machine searches together.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # As for train.py: the checkout that this file is in, whether it is installed or not.
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    from gpusim_rl import interrupts

    interrupts.install()  # before imports that take time

import argparse
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from gpusim_rl.errors import ConfigError, friendly_errors, say


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
            if error.strerror is None:  # of no file
                raise
            place = error.filename or search.folder
            hint = "Run the same command to resume"
            raise ConfigError(error.strerror, key=str(place), hint=hint) from None
        say(*lines)
    return 0


@contextmanager
def stoppable(folder: Path) -> Iterator[None]:
    """End the block on SIGTERM and a closed terminal as on Ctrl-C, and report what is left."""
    received: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        received.append(number)
        ctrl_c = signal.getsignal(signal.SIGINT)  # Ray Tune's ends the trials with checkpoints
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
    epilog = (
        "Settings of the search: method=optuna|asha|pbt (default: optuna), trials=20, pruner=hyperband|median|none,"
        " study=<name>, space=<yaml>, stall_s=600; grace=<iterations> with asha and pbt. Others as for train.py."
    )
    parser = argparse.ArgumentParser(prog="tune", description=(__doc__ or "").partition("\n")[0], epilog=epilog)
    parser.add_argument("settings", nargs="+", metavar="key=value", help="settings of the search and the training")
    parser.add_argument("-cd", "--config-dir", type=Path, help="folder with more tasks, as for train.py")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
