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
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpusim_rl.deployed import write_results
from gpusim_rl.errors import ConfigError, available, friendly_errors, import_extra, say
from gpusim_rl.export.of_run import export_folder, results_folder
from gpusim_rl.files.safe_open import load_yaml
from gpusim_rl.options import Parser, positive
from gpusim_rl.view.text_table import table_lines

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BASELINES = {"zero": "zero action", "hold": "hold pose"}
RATES = {"falls": "changed physics", "falls_push_0.5": "pushes of 0.5 m/s", "falls_push_1": "pushes of 1 m/s"}
KINDS = ("push", "force", "payload", "command", "friction", "delay", "motor", "slope")


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

    bounds = {} if args.gate is None else read_gate(args.gate)
    out = results_folder(args.run)
    import_extra("matplotlib", "view", "stress")
    with export_folder(args, "stress") as folder:
        results = measure(folder, args.seed, args.episodes)
    verdicts = judge(bounds, results)
    say(*tables(results), *(f"{row['verdict']}: {row['text']}" for row in verdicts))
    write_results(out, "stress", {**results, "gate": verdicts}, draw(results, bounds.get("push")))
    return int(any(row["verdict"] == "missed" for row in verdicts))


def weakest(rows: Sequence[Mapping[str, Any]], kind: str) -> Mapping[str, Any]:
    """Return the search of a kind that found the smallest size."""
    return min((row for row in rows if row["kind"] == kind), key=lambda row: row["smallest"] or math.inf)


def size_text(row: Mapping[str, Any]) -> str:
    """Return the size that a search found, or the largest that it tried."""
    return f">{row['largest']:.3g}" if row["smallest"] is None else f"{row['smallest']:.3g}"


def read_gate(file: Path) -> dict[str, float]:
    """Return bounds from a yaml file: least sizes by kind of disturbance, and largest fall rates.

    Raises:
        ConfigError: The file has an unknown key, or a value that is not a positive number (of a rate: 0 to 1).
    """
    bounds = load_yaml(file)
    if not isinstance(bounds, dict) or not bounds:
        raise ConfigError(key=str(file), expected="bounds such as `push: 1.5`", got=bounds)
    for key, bound in bounds.items():
        if key not in (*KINDS, *RATES):
            raise ConfigError(f"unknown key {key!r}", key=str(file), hint=available(str(key), [*KINDS, *RATES]))
        if type(bound) not in (int, float) or not 0.0 <= bound <= (1.0 if key in RATES else math.inf):
            expected = "a rate from 0 to 1" if key in RATES else "a positive number"
            raise ConfigError(key=f"{file}: {key}", expected=expected, got=bound)
    return bounds


def judge(bounds: Mapping[str, float], results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row per bound: `met`, `missed`, or `open` if neither is proved."""
    rows, rates = list[dict[str, Any]](), {rate["name"]: rate for rate in results["rates"]}
    for key, bound in bounds.items():
        if key in RATES:
            (low, high), value = rates[key]["interval"], rates[key]["falls"] / rates[key]["episodes"]
            met, missed = high <= bound, low > bound
            text = f"{key} {value:.3f} (95 % interval {low:.3f} to {high:.3f}), at most {bound:g}"
        else:
            row = weakest(results["searches"], key)
            met = bound <= (row["smallest"] or row["largest"])
            missed = not met and row["smallest"] is not None
            text = f"{key} {size_text(row)} {row['unit']} ({row['way']}), at least {bound:g}"
        verdict = "met" if met else "missed" if missed else "open"
        rows.append({"key": key, "bound": bound, "verdict": verdict, "text": text})
    return rows


def tables(results: Mapping[str, Any]) -> list[str]:
    """Return the lines of both tables: smallest sizes, and fall rates."""
    pushes, others = ([row for row in results["searches"] if (row["kind"] == "push") is push] for push in (True, False))
    rows = [weakest(pushes, "push"), *others]
    sizes = [[row["label"].partition(" from ")[0], size_text(row), row["unit"], row["way"], "", ""] for row in rows]
    stood = [results["baselines"][name]["searches"] for name in BASELINES]
    fell = [f"fell after {results['baselines'][name]['fell_s']:.1f} s" for name in BASELINES]
    sizes[0][4:] = [size_text(weakest(rows, "push")) if rows else text for rows, text in zip(stood, fell, strict=True)]
    tried = [row["smallest"] or row["largest"] for row in pushes]
    shares = ",".join(f"{(min(tried) / size) ** 2:.2g}" for size in tried)  # frequent where small pushes are enough
    rates = [["falls in", "episodes", "falls", "95 % interval"]]
    for row in sorted(results["rates"], key=lambda row: "push" in row["name"]):
        if row["falls"] or row["name"] in RATES:
            share, interval = f"{row['falls'] / row['episodes']:.1%}", "{:.1%} to {:.1%}".format(*row["interval"])
            rates.append([RATES.get(row["name"]) or row["name"], str(row["episodes"]), share, interval])
    head = ["disturbance", "falls at", "unit", "worst", *BASELINES.values()]
    return [
        *table_lines([head, *sizes], right=["falls at", *BASELINES.values()], width=None),
        f"smallest push from behind, and each 45 degrees counter-clockwise: {' '.join(map(size_text, pushes))}",
        f"train where it falls: sides=[{shares}]",
        "",
        *table_lines(rates, right=rates[0][1:], width=None),
    ]


def draw(results: Mapping[str, Any], bound: float | None) -> Figure:
    """Return the figure: the smallest push by direction, for the policy and the baselines that stand."""
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained", figsize=(6.4, 4.8))
    polar: Any = figure.add_subplot(projection="polar")
    curves = {"policy": results, **{name: results["baselines"][key] for key, name in BASELINES.items()}}
    for name, curve in curves.items():
        if pushes := [row for row in curve["searches"] if row["kind"] == "push"]:
            angles = [math.tau * (0.5 + i / len(pushes)) for i in range(len(pushes) + 1)]  # where pushes come from
            sizes = [row["smallest"] or row["largest"] for row in (*pushes, pushes[0])]
            polar.plot(angles, sizes, "o-" if name == "policy" else "o--", label=name, markersize=4)
            sides = [row["label"].removeprefix("push from ") for row in pushes]
            polar.set_xticks([angle % math.tau for angle in angles[:-1]], sides)
            polar.set_ylim(0.0, pushes[0]["largest"])
    if bound is not None:
        polar.plot([math.tau * i / 100 for i in range(101)], [bound] * 101, color="black", linewidth=0.8, label="gate")
    polar.set_theta_zero_location("N")
    polar.set_rlabel_position(67.5)
    polar.tick_params(axis="x", pad=14, labelsize="small")
    polar.legend(loc="lower left", bbox_to_anchor=(-0.35, -0.15), fontsize="small")
    command = ", ".join(f"{name} {value:g}" for name, value in results["command"].items())
    figure.suptitle(f"smallest push that makes it fall [m/s]; {results['task']}, command {command}", fontsize="medium")
    return figure


if __name__ == "__main__":
    sys.exit(main())
