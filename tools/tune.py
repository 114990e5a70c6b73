"""Search settings: each trial is a usual run; hopeless ones are stopped early.

python tools/tune.py task=Ant trials=20                                       PPO's settings, with Optuna
python tools/tune.py task=Ant algo=sac num_envs=64 space=my_space.yaml        your own space of settings
python tools/tune.py task=Ant trials=40 study=ants                            again: goes on, until there are 40

The same command in several terminals, or on several machines with one folder, searches together.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def main(argv: list[str] | None = None) -> int:
    """Search, and print what was found."""
    from gpusim_rl.errors import friendly_errors, printable

    with friendly_errors():
        args = parse(argv)

        from gpusim_rl.distributed.tuning import read_search, tune

        for line in tune(read_search(args.settings, args.config_dir)):
            print(printable(line))
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="tune",
        description=(__doc__ or "").partition("\n")[0],
        epilog="Of the search: trials=20, pruner=hyperband|median|none, study=<name>, space=<yaml>, stall_s=600."
        " All other settings are those of train.py.",
    )
    parser.add_argument("settings", nargs="+", metavar="key=value", help="of the search, and of the training")
    parser.add_argument("-cd", "--config-dir", type=Path, help="a folder of yours with more tasks")
    return parser.parse_args(argv)


if __name__ == "__main__":
    # As for train.py: the checkout that this file is in, whether it is installed or not.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    sys.exit(main())
