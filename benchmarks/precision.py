"""Does a task learn in bfloat16 as it does in float32? Compares runs that differ in precision and seed only.

    python benchmarks/precision.py Cartpole runs/Cartpole/*

writes benchmarks/<task>/precision.json, .png and a csv per run. `--bf16 FILE...` adds curves of earlier runs.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
POINTS = 10  # where the curves are compared
Curve = list[tuple[float, float]]


def main() -> None:
    """Reads the runs, compares, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task")
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--bf16", nargs="*", type=Path, default=[], help="csv files of runs in bf16")
    args = parser.parse_args()
    folder = HERE / args.task
    folder.mkdir(exist_ok=True)
    curves: dict[str, list[Curve]] = {"bf16": [read(path) for path in args.bf16], "fp32": []}
    about: list[dict[str, Any]] = []
    for run in args.runs:
        environment = json.loads((run / "env.json").read_text())
        precision, curve = environment["learner"]["precision"], read(run / "metrics.csv")
        curves[precision].append(curve)
        name = f"{precision}_{len(curves[precision])}.csv"
        with (folder / name).open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["env_steps", "episode/return"])
            writer.writerows((int(steps), f"{value:.6g}") for steps, value in curve)
        keys = ("command", "git", "versions", "cpu", "gpu")
        about.append({"file": name, **{key: environment[key] for key in keys}})
    end = min(curve[-1][0] for several in curves.values() for curve in several)
    points = []
    for i in range(1, POINTS + 1):
        steps = end * i / POINTS
        values = {precision: [at(curve, steps) for curve in several] for precision, several in curves.items()}
        difference = statistics.mean(values["bf16"]) - statistics.mean(values["fp32"])
        # Welch's t: the difference in units of what seeds alone make of it
        noise = math.sqrt(sum(statistics.variance(v) / len(v) for v in values.values()))
        points.append({"env_steps": int(steps), "returns": values, "t": difference / noise if noise else 0.0})
    result = {
        "task": args.task,
        "compared_up_to_env_steps": int(end),
        "largest_t": max((p["t"] for p in points), key=abs),
        "bf16_from": [str(path.name) for path in args.bf16],
        "runs": about,
        "points": points,
    }
    (folder / "precision.json").write_text(json.dumps(result, indent=2) + "\n")
    plot(args.task, curves, folder / "precision.png")
    for point in points:
        means = {precision: round(statistics.mean(v), 1) for precision, v in point["returns"].items()}
        print(f"{point['env_steps']:>10,} steps  {means}  t {point['t']:.2f}")


def read(path: Path) -> Curve:
    """Env steps and return of every row that knows one."""
    with path.open() as file:
        rows = [(row["env_steps"], row["episode/return"]) for row in csv.DictReader(file)]
    return [(float(steps), float(value)) for steps, value in rows if value]


def at(curve: Curve, steps: float) -> float:
    """The return at this point, of the row before it."""
    return next((value for done, value in reversed(curve) if done <= steps), curve[0][1])


def plot(task: str, curves: dict[str, list[Curve]], path: Path) -> None:
    """Return over env steps, a line per run."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for precision, colour in (("bf16", "tab:orange"), ("fp32", "tab:blue")):
        for i, curve in enumerate(curves[precision]):
            label = precision if i == 0 else None
            axes.plot([s / 1e6 for s, _ in curve], [r for _, r in curve], color=colour, label=label, linewidth=1.1)
    axes.set(xlabel="env steps [million]", ylabel="return, mean of the last 100 episodes", title=task)
    axes.set_xlim(0, max(curve[-1][0] for curve in curves["fp32"]) / 1e6)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
