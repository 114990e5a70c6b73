"""Turns finished runs of a task into the committed learning curves: one csv per seed, a plot, a summary.

    python benchmarks/curves.py Ant runs/Ant/2026-11-20_22-00-00 runs/Ant/2026-11-20_22-15-00

writes benchmarks/Ant/seed<k>.csv, curve.png and summary.json. Runs must have the same settings but for their seeds.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
COLUMNS = [
    "iteration",
    "env_steps",
    "time/elapsed_s",
    "episode/return",
    "episode/length",
    "speed/env_steps_per_s",
    "policy/kl",
    "policy/learning_rate",
    "policy/std",
    "loss/value",
    "value/explained_variance",
    "sim/diverged",
]


def main() -> None:
    """Reads the runs and writes the three kinds of files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task")
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--threshold", type=float, help="return; when it was first reached is reported")
    args = parser.parse_args()
    folder = HERE / args.task
    folder.mkdir(exist_ok=True)
    curves: dict[int, list[dict[str, float | None]]] = {}
    seeds: list[dict[str, Any]] = []
    for run in args.runs:
        seed, environment = seed_of(run), json.loads((run / "env.json").read_text())
        rows = read(run / "metrics.csv")
        curves[seed] = rows
        with (folder / f"seed{seed}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        threshold = math.inf if args.threshold is None else args.threshold
        returns = [value for row in rows if (value := row["episode/return"]) is not None]
        crossed = [row for row in rows if (value := row["episode/return"]) is not None and value >= threshold]
        seeds.append(
            {
                "seed": seed,
                "final_return": rows[-1]["episode/return"],
                "best_return": max(returns),
                "env_steps": rows[-1]["env_steps"],
                "env_steps_at_threshold": crossed[0]["env_steps"] if crossed else None,
                "seconds": rows[-1]["time/elapsed_s"],
                "diverged_worlds": sum(r["sim/diverged"] or 0 for r in rows),
                "command": environment["command"],
                "git": environment["git"],
                "versions": environment["versions"],
                "cpu": environment["cpu"],
                "gpu": environment["gpu"],
            }
        )
    summary = {"task": args.task, "threshold": args.threshold, "seeds": seeds}
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    plot(args.task, curves, folder / "curve.png")


def seed_of(run: Path) -> int:
    """Seed in a run's config."""
    import yaml

    return int(yaml.safe_load((run / "config.yaml").read_text())["seed"])


def read(path: Path) -> list[dict[str, float | None]]:
    """Rows of a metrics.csv, the committed columns, six digits."""
    with path.open() as file:
        return [
            {name: float(f"{float(row[name]):.6g}") if row.get(name) else None for name in COLUMNS}
            for row in csv.DictReader(file)
        ]


def plot(task: str, curves: dict[int, list[dict[str, float | None]]], path: Path) -> None:
    """Return over env steps, one line per seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for seed, rows in sorted(curves.items()):
        known = [(row["env_steps"] or 0, value) for row in rows if (value := row["episode/return"]) is not None]
        axes.plot(
            [steps / 1e6 for steps, _ in known],
            [value for _, value in known],
            label=f"seed {seed}",
            linewidth=1.2,
        )
    axes.set(xlabel="env steps [million]", ylabel="return, mean of the last 100 episodes", title=task)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
