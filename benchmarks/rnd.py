"""Trains a sparse task with and without rewards for new states; writes rnd.json.

    taskset -c 1 python benchmarks/rnd.py

The task is `maze.py`: nothing but the far end of a U pays, and episodes end there or after 300 steps. An evaluation
without exploration follows each training.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from checkout import provenance, write

SETTINGS: dict[str, Any] = {
    "num_envs": 64,
    "device": "cpu",
    "sim": "mujoco",
    "ppo": {
        "horizon": 32,
        "epochs": 5,
        "minibatch_size": 512,
        "precision": "fp32",
        "schedule": "constant",  # with the adaptive rate one of three seeds found the end and lost it again
        "learning_rate": 1e-3,
        "network": {"hidden": [64, 64]},
    },
}
ARMS: dict[str, dict[str, Any]] = {"without": {}, "with": {"rnd": {"weight": 1.0, "normalize": True}}}
SEEDS = (1, 2, 3)


def measure(arm: str, seed: int, iterations: int, episodes: int) -> dict[str, Any]:
    """Trains once; then acts without exploration for some episodes of each env."""
    from gpusim_rl.api import prepare
    from gpusim_rl.distributed.actors import make_trainer
    from gpusim_rl.run.evaluation import evaluate
    from maze import Maze

    curve = []
    with tempfile.TemporaryDirectory() as folder:
        log_settings = {"dir": folder, "console": "quiet", "checkpoint_interval": iterations, "interval": 1}
        more = {"seed": seed, "max_iterations": iterations, "log": log_settings}
        trainer = make_trainer(prepare(Maze, **SETTINGS | more | {"ppo": SETTINGS["ppo"] | ARMS[arm]}))
        with trainer.logging() as log:
            for _ in range(iterations):
                trainer.iterate(log)
                mean = trainer.intervals.mean_return
                curve.append([trainer.env_steps, None if mean is None else round(mean, 3)])
            _, returns = evaluate(trainer.env, trainer.algorithm.policy, trainer.env.reset(), 1 + episodes)
    return {
        "rnd": arm,
        "seed": seed,
        "env_steps": trainer.env_steps,
        "success": round(float(returns[1:].mean()), 4),  # the first episodes begin anywhere in their time limit
        "episodes": returns[1:].numel(),
        "curve_env_steps_and_return_with_exploration": curve,
    }


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=250, help="of 2,048 env steps (default: 250)")
    parser.add_argument("--episodes", type=int, default=1, help="of each of 64 envs in the evaluation (default: 1)")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"), help="file to write")
    return parser.parse_args(argv)


def main() -> None:
    """Trains all, writes, and prints the table."""
    options = parse()
    command = shlex.join(["python", "benchmarks/rnd.py", *sys.argv[1:]])
    result: dict[str, Any] = {
        "command": command,
        **provenance(options.out),
        "settings": SETTINGS,
        "rnd": ARMS,
        "runs": [],
    }
    for seed in SEEDS:
        for arm in ARMS:
            found = measure(arm, seed, options.iterations, options.episodes)
            result["runs"].append(found)
            print(f"seed {seed}, {arm} rnd: {found['success']:.0%} of the episodes reach the goal", flush=True)
            write(options.out, json.dumps(result) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, installed or not
    main()
