"""mjlab's Go1 on flat ground, learned by our PPO on the CPU, and gone on with from its checkpoint.

    python benchmarks/mjlab_go1.py

in an environment with mjlab and this checkout, writes mjlab_go1.json: mean return and length of the last episodes
over the steps of all envs, for 200 iterations of 32 envs, and for 10 more after a resume in a new process.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DATA = Path(__file__).with_suffix(".json")
ENV = "Mjlab-Velocity-Flat-Unitree-Go1"
ITERATIONS, MORE = 200, 10
TRAINING = ("task=MjLab", f"env.id={ENV}", "num_envs=32", "ppo.minibatch_size=192", "device=cpu", "seed=1")
COLUMNS = ("iteration", "env_steps", "episode/return", "episode/length")


def train(*arguments: str, folder: Path) -> None:
    """Trains in a process of its own, whose runs are in `folder`."""
    command = [sys.executable, ROOT / "train.py", *arguments, "log.interval=1", "log.console=quiet"]
    paths = {"PYTHONPATH": str(ROOT), "WANDB_MODE": "disabled"}
    subprocess.run(command, cwd=folder, check=True, env={**os.environ, **paths})


def rows_of(run: Path) -> list[list[float]]:
    """Returns the numbers of `COLUMNS` in each iteration in which an episode had ended."""
    with (run / "metrics.csv").open() as file:
        return [[float(row[name]) for name in COLUMNS] for row in csv.DictReader(file) if row["episode/return"]]


def about() -> dict[str, Any]:
    """Returns command, hardware and versions, for the data."""
    from gpusim_rl.files.provenance import describe_environment, git_state

    packages = {name: version(name) for name in ("mjlab", "mujoco", "mujoco-warp", "warp-lang")}
    return {
        "command": "python benchmarks/mjlab_go1.py",
        "git": git_state(DATA)[0],
        "environment": describe_environment(),
        "packages": packages,
        "training": " ".join(TRAINING),
    }


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=DATA, help="file to write (default: beside this program)")
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="folder of the runs (default: this one)")
    parser.add_argument("--trained", action="store_true", help="take the latest run in it, which has been trained")
    return parser.parse_args(argv)


def main() -> None:
    """Runs the command."""
    args = parse()
    run = args.folder / "runs" / ENV / "latest"
    if not args.trained:
        train(*TRAINING, f"max_iterations={ITERATIONS}", folder=args.folder)
    learned = rows_of(run)
    train(f"checkpoint={run}", f"max_iterations={ITERATIONS + MORE}", folder=args.folder)
    resumed = [row for row in rows_of(run) if row[0] > ITERATIONS]
    args.out.write_text(json.dumps({**about(), "columns": COLUMNS, "learned": learned, "resumed": resumed}) + "\n")
    print(f"return {learned[0][2]:.2f} to {learned[-1][2]:.2f}, after the resume {resumed[-1][2]:.2f}")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # the checkout, installed or not
    main()
