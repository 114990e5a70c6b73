"""Find the smallest disturbances that make a policy fall.

gpusim-rl stress Go1Velocity                           the latest run
gpusim-rl stress runs/Go1Velocity/latest/export        an export folder
gpusim-rl stress Go1Velocity --gate gates.yaml         exit code 1 if a bound such as `push: 1.5` is missed
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    import _checkout  # noqa: F401

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpusim_rl.deployed import gate
from gpusim_rl.errors import friendly_errors, import_extra, say
from gpusim_rl.export.of_run import export_folder, results_folder
from gpusim_rl.files.safe_open import writing
from gpusim_rl.options import Parser, positive
from gpusim_rl.view.text_table import table_lines

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMES = {"zero": "zero action", "hold": "hold pose"}


def main(argv: list[str] | None = None) -> int:
    with friendly_errors():
        return stress(parse(argv))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("stress", __doc__)
    parser.option("run", "or a folder written by export")
    parser.option("--episodes", "episodes per fall rate", "Environments", type=positive, default=64)
    parser.option("--gate", "yaml file of bounds", "Output", type=Path, metavar="FILE")
    parser.options("--seed", "--trust", "--config-dir")
    return parser.parse_args(argv)


def stress(args: argparse.Namespace) -> int:
    """Measure, print and write the results; return the exit code."""
    from gpusim_rl.deployed.stress import stress as measure

    bounds = {} if args.gate is None else gate.read(args.gate)
    out = results_folder(args.run)
    import_extra("matplotlib", "view", "stress")
    with export_folder(args, "stress") as folder:
        results = measure(folder, args.seed, args.episodes)
    verdicts = gate.judge(bounds, results)
    say(*tables(results))
    say(*(f"{row['verdict']}: {row['text']}" for row in verdicts))
    write(out, {**results, "gate": verdicts}, draw(results, bounds.get("push")))
    return int(any(row["verdict"] == "missed" for row in verdicts))


def tables(results: Mapping[str, Any]) -> list[str]:
    """Return the lines of both tables: smallest sizes, and fall rates."""
    searches, baselines = results["searches"], results["baselines"]
    lines = [["disturbance", "falls at", "unit", "worst", *NAMES.values()]]
    for row in (gate.weakest(searches, "push"), *(row for row in searches if row["kind"] != "push")):
        others = [_baseline(baselines[name]) if row["kind"] == "push" else "" for name in NAMES]
        lines.append([row["label"].partition(" from ")[0], gate.size_text(row), row["unit"], row["way"], *others])
    around = [row for row in searches if row["kind"] == "push"]
    sizes = [row["smallest"] or row["largest"] for row in around]
    shares = ",".join(f"{(min(sizes) / size) ** 2:.2g}" for size in sizes)  # frequent where small pushes are enough
    rates = [["falls in", "episodes", "falls", "95 % interval"]]
    total, *others = results["rates"]
    fell = [row for row in others if row["falls"] and row["name"] not in gate.RATES]
    pushes = [row for row in others if row["name"] in gate.RATES]
    for row in ({**total, "name": "changed physics"}, *fell, *pushes):
        low, high = row["interval"]
        name = row["name"].replace("falls_push_", "pushes of ") + " m/s" * (row in pushes)
        rates.append([name, str(row["episodes"]), f"{row['falls'] / row['episodes']:.1%}", f"{low:.1%} to {high:.1%}"])
    return [
        *table_lines(lines, right=["falls at", *NAMES.values()], width=None),
        f"smallest push from behind, and each 45 degrees counter-clockwise: {' '.join(map(gate.size_text, around))}",
        f"train where it falls: sides=[{shares}]",
        "",
        *table_lines(rates, right=rates[0][1:], width=None),
    ]


def _baseline(result: Mapping[str, Any]) -> str:
    fell_s = result["fell_s"]
    return f"fell after {fell_s:.1f} s" if fell_s else gate.size_text(gate.weakest(result["searches"], "push"))


def draw(results: Mapping[str, Any], bound: float | None) -> Figure:
    """Return the figure: the smallest push by direction, for the policy and the baselines that stand."""
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained", figsize=(6.4, 4.8))
    polar = figure.add_subplot(projection="polar")
    pushes = [row for row in results["searches"] if row["kind"] == "push"]
    angles = [math.pi + math.tau / len(pushes) * i for i in range(len(pushes) + 1)]  # the side that a push comes from
    curves = {"policy": results["searches"]}
    curves |= {name: results["baselines"][key]["searches"] for key, name in NAMES.items()}
    for name, searches in ((name, searches) for name, searches in curves.items() if searches):
        sizes = [row["smallest"] or row["largest"] for row in searches if row["kind"] == "push"]
        style = {"marker": "o", "linewidth": 1.8} if name == "policy" else {"linestyle": "--", "linewidth": 1.0}
        polar.plot(angles, [*sizes, sizes[0]], label=name, markersize=4, **style)
    if bound is not None:
        polar.plot([math.tau * i / 100 for i in range(101)], [bound] * 101, color="black", linewidth=0.8, label="gate")
    polar.set_theta_zero_location("N")  # pyright: ignore[reportAttributeAccessIssue]
    sides = [row["label"].partition(" from ")[2] for row in pushes]
    polar.set_xticks([angle % math.tau for angle in angles[:-1]], sides, fontsize="small")
    polar.set_rlabel_position(67.5)  # pyright: ignore[reportAttributeAccessIssue]
    polar.tick_params(axis="x", pad=14)
    polar.set_ylim(0.0, pushes[0]["largest"])
    polar.legend(loc="lower left", bbox_to_anchor=(-0.35, -0.15), fontsize="small")
    command = ", ".join(f"{name} {value:g}" for name, value in results["command"].items())
    figure.suptitle(f"smallest push that makes it fall [m/s]; {results['task']}, command {command}", fontsize="medium")
    return figure


def write(folder: Path, results: Mapping[str, Any], figure: Figure) -> None:
    """Write stress.json and stress.png, replacing earlier ones."""
    from gpusim_rl.view.charts import save

    with writing(folder / "stress.json") as file:
        file.write(f"{json.dumps(results, allow_nan=False)}\n".encode())
    with writing(folder / "stress.png") as file:
        save(figure, file, "png")
    say(str(folder / "stress.json"), str(folder / "stress.png"))


if __name__ == "__main__":
    sys.exit(main())
