"""Audit a training run for host-device copies and waits.

gpusim-rl audit task=Ant num_envs=64                     copies and waits by phase of the iteration
gpusim-rl audit task=Ant device=cuda --out audit.json    the same on a GPU, and all numbers in a file
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    import _checkout  # noqa: F401

import argparse
import json
from typing import Any

from gpusim_rl.errors import friendly_errors, say
from gpusim_rl.files.provenance import describe_environment
from gpusim_rl.files.safe_open import writing
from gpusim_rl.machine.hardware import import_torch
from gpusim_rl.options import Parser
from gpusim_rl.view.text_table import table_lines

WARM_UP = 5  # iterations in which kernels compile, graphs are captured and memory is allocated


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    import_torch()
    with friendly_errors():
        report = audit_training(args)
        text = json.dumps(report, indent=2) + "\n"
        if args.out:
            with writing(args.out) as file:
                file.write(text.encode())
        if args.json:
            sys.stdout.write(text)
        else:
            show(report)
    return 0 if report["ok"] else 1


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("audit", __doc__)
    parser.options("settings", "--iterations", "--out", "--json", iterations=3)
    return parser.parse_settings(argv)


def audit_training(args: argparse.Namespace) -> dict[str, Any]:
    """Audit a training run; return the content of the JSON output."""
    from gpusim_rl.diagnose.transfers import audit, our_loop, violations
    from gpusim_rl.testing.scratch_training import scratch_training

    with scratch_training(args.settings) as (trainer, log):
        interval, first = trainer.cfg.log.interval, trainer.iteration + WARM_UP
        rows = (first + args.iterations) // interval - first // interval
        result = audit(our_loop(trainer, log), warm_up=WARM_UP, iterations=args.iterations)
        faults = violations(result, rows)
        return {
            **describe_environment(),
            "git": log.run_dir.environment["git"],
            "task": trainer.start.task_name,
            "num_envs": trainer.cfg.num_envs,
            "sim": str(trainer.start.sim),
            "device": str(trainer.start.device),
            "precision": trainer.algorithm.policy.precision,
            "graph": str(trainer.collector.graphs.choice),
            "log_rows": rows,
            **result.as_dict(),
            "violations": faults,
            "ok": not faults,
        }


def show(report: dict[str, Any]) -> None:
    """Print copies and waits by phase, violations and the verdict."""
    counted = "operators" in next(iter(report["phases"].values()))
    columns = ["phase", "to device", "to host", "syncs"]
    columns += ["operators"] if counted else ["launches", "kernels", "device busy"]
    rows = [[phase, *cells(work, report["iterations"], counted)] for phase, work in report["phases"].items()]
    say(
        f"{report['task']}, {report['num_envs']} envs, {report['sim']}, learner on {report['device']}"
        f" ({report['precision']}); {report['method']}; per iteration, mean of {report['iterations']}",
        *table_lines([columns, *rows], right=columns[1:], width=None),
    )
    ok = "ok: in steady state, an iteration copies and waits for nothing but the metrics row"
    not_ok = "NOT ok: in steady state, an iteration may copy only the metrics row"
    say(*report["violations"], ok if report["ok"] else not_ok)


def cells(work: dict[str, Any], iterations: int, counted: bool) -> list[str]:
    """Return the table cells of a phase: copies, syncs and work per iteration."""
    row = [copies(work[direction], iterations) for direction in ("to_device", "to_host")]
    row.append(number(sum(work["syncs"].values()) / iterations))
    if counted:
        return [*row, number(work["operators"] / iterations)]
    busy = "–" if work["busy"] is None else f"{100 * work['busy']:.1f} %"
    if work["busy"] is not None and work["occupied"] - work["busy"] > 0.001:
        busy = f"{100 * work['busy']:.1f} to {100 * work['occupied']:.1f} %"
    return [*row, *(number(work[name] / iterations) for name in ("launches", "kernels")), busy]


def copies(direction: dict[str, int], iterations: int) -> str:
    """Format the copies in one direction: number and size per iteration."""
    if not direction["count"]:
        return "0"
    size, unit = direction["bytes"] / iterations, "B"
    for larger in ("kB", "MB", "GB"):
        if size >= 1000:
            size, unit = size / 1000, larger
    return f"{number(direction['count'] / iterations)} ({size:.3g} {unit})"


def number(value: float) -> str:
    """Format a number with at most one decimal."""
    return f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"


if __name__ == "__main__":
    sys.exit(main())
