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
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpusim_rl.errors import friendly_errors, import_extra, say
from gpusim_rl.files.paths import find_checkpoint
from gpusim_rl.files.safe_open import writing
from gpusim_rl.machine.hardware import import_torch
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


@contextmanager
def export_folder(args: argparse.Namespace) -> Iterator[tuple[Path, Path]]:
    """Yield the export folder of the arguments, temporary for a run, and the folder for results."""
    if (given := Path(args.run)).is_dir() and not (given / "checkpoints").is_dir():
        yield given, given
        return
    args.run = str(find_checkpoint(args.run).file)  # before torch is imported
    for package in ("onnx", "onnxscript", "onnxruntime"):
        import_extra(package, "export", "stress of a run")
    import_torch()
    from gpusim_rl.export.files import write_all
    from gpusim_rl.run.run_dir import resolve_run

    with tempfile.TemporaryDirectory() as temporary:
        out, options = Path(temporary) / "export", {"trust": args.trust, "config_dir": args.config_dir}
        write_all(args.run, out, int8=False, **options)
        yield out, resolve_run(args.run)[0].path


def stress(args: argparse.Namespace) -> int:
    """Measure, print and write the results; return the exit code."""
    from gpusim_rl.deployed import gate
    from gpusim_rl.deployed.stress import stress as measure

    bounds = {} if args.gate is None else gate.read(args.gate)
    import_extra("matplotlib", "view", "stress")
    with export_folder(args) as (folder, out):
        results = measure(folder, args.seed, args.episodes)
    verdicts = gate.judge(bounds, results)
    say(*tables(results))
    say(*(f"{row['verdict']}: {row['text']}" for row in verdicts))
    write(out, {**results, "gate": verdicts}, draw(results, bounds.get("push")))
    return int(any(row["verdict"] == "missed" for row in verdicts))


def tables(results: Mapping[str, Any]) -> list[str]:
    """Return the lines of both tables: smallest sizes, and fall rates."""
    from gpusim_rl.deployed.gate import weakest

    searches, baselines = results["searches"], results["baselines"]
    pushes = [row for row in searches if row["kind"] == "push"]
    head = ["disturbance", "falls at", "unit", "worst", *NAMES.values()]
    lines = [head]
    for row in (weakest(searches, "push"), *(row for row in searches if row["kind"] != "push")):
        others = [_baseline(baselines[name]) if row["kind"] == "push" else "" for name in NAMES]
        lines.append([row["label"].partition(" from ")[0], _size(row), row["unit"], row["way"], *others])
    around = " ".join(_size(row) for row in pushes)
    rates = [["falls in", "episodes", "falls", "95 % interval"]]
    for name, row in shown_rates(results):
        low, high = row["interval"]
        cells = [str(row["episodes"]), f"{row['falls'] / row['episodes']:.1%}", f"{low:.1%} to {high:.1%}"]
        rates.append([name, *cells])
    return [
        *table_lines(lines, right=["falls at", *NAMES.values()], width=None),
        f"smallest push from behind, and each 45 degrees counter-clockwise: {around}",
        "",
        *table_lines(rates, right=rates[0][1:], width=None),
    ]


def shown_rates(results: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return names and rows of the fall rates, without changes of physics that no robot fell in."""
    from gpusim_rl.deployed.stress import RATES

    total, *others = ((row["name"], row) for row in results["rates"])
    pushes = [(name.replace("falls_push_", "pushes of ") + " m/s", row) for name, row in others if name in RATES]
    return [
        ("changed physics", total[1]),
        *((name, row) for name, row in others if name not in RATES and row["falls"]),
        *pushes,
    ]


def _size(row: Mapping[str, Any]) -> str:
    return f">{row['largest']:.3g}" if row["smallest"] is None else f"{row['smallest']:.3g}"


def _baseline(result: Mapping[str, Any]) -> str:
    from gpusim_rl.deployed.gate import weakest

    return f"fell after {result['fell_s']:.1f} s" if result["fell_s"] else _size(weakest(result["searches"], "push"))


def draw(results: Mapping[str, Any], bound: float | None) -> Figure:
    """Return the figure: the smallest push by direction, and fall rates with their intervals."""
    from matplotlib.figure import Figure

    from gpusim_rl.deployed.stress import LARGEST_PUSH, SIDES

    figure = Figure(layout="constrained", figsize=(10.0, 4.6))
    polar, bars = figure.add_subplot(1, 2, 1, projection="polar"), figure.add_subplot(1, 2, 2)
    angles = [math.pi + math.tau / len(SIDES) * i for i in range(len(SIDES) + 1)]  # the side that a push comes from
    curves: dict[str, list] = {}  # without a second curve for equal baselines
    named = [("policy", results), *((NAMES[name], row) for name, row in results["baselines"].items())]
    for name, searches in ((name, row["searches"]) for name, row in named if row["searches"]):
        sizes = [it["smallest"] or LARGEST_PUSH for it in searches if it["kind"] == "push"]
        same = next((other for other, values in curves.items() if values == sizes), "")
        curves[", ".join(filter(None, (same, name)))] = curves.pop(same, sizes)
    for name, sizes in curves.items():
        style = {"marker": "o", "linewidth": 1.8} if name == "policy" else {"linestyle": "--", "linewidth": 1.0}
        polar.plot(angles, [*sizes, sizes[0]], label=name, markersize=4, **style)
    if bound is not None:
        polar.plot([math.tau * i / 100 for i in range(101)], [bound] * 101, color="black", linewidth=0.8, label="gate")
    polar.set_theta_zero_location("N")  # pyright: ignore[reportAttributeAccessIssue]
    polar.set_xticks([angle % math.tau for angle in angles[:-1]], SIDES, fontsize="small")
    polar.tick_params(axis="x", pad=8)
    polar.tick_params(axis="y", labelsize="x-small")
    polar.set_ylim(0.0, LARGEST_PUSH)
    polar.set_title("smallest push that makes it fall [m/s]", fontsize="medium", pad=20)
    polar.legend(loc="lower left", bbox_to_anchor=(-0.35, -0.15), fontsize="small")
    for name, row in reversed(shown_rates(results)):
        rate, interval = row["falls"] / row["episodes"], row["interval"]
        error = [[100.0 * abs(rate - end)] for end in interval]
        bars.errorbar([100.0 * rate], [name], xerr=error, fmt="o", color="tab:blue", capsize=3)
    bars.set_xlim(-2.0, 102.0)
    bars.set_title("falls, with 95 % interval [%]", fontsize="medium")
    bars.grid(axis="x", alpha=0.3)
    command = ", ".join(f"{name} {value:g}" for name, value in results["command"].items())
    figure.suptitle(f"{results['task']}, command {command}", fontsize="medium")
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
