"""Audit host-device copies and waits of our and other libraries' trainers on our environment, by phase.

python benchmarks/throughput/audit_baselines.py task=Ant num_envs=64                        all installed
python benchmarks/throughput/audit_baselines.py task=Ant num_envs=64 --baselines rsl_rl,skrl --out audit.json

On the CPU, counts of other libraries are a lower bound: pure numpy copies are not recorded.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/

from measuring.checkout import provenance, write

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gpusim_rl.diagnose.transfers import Audit, Loop
    from throughput.baselines import Baseline

WARM_UP = 5  # iterations: for compilation, graph capture and memory allocation
SHOWN_LOCATIONS = 5


def main(argv: list[str] | None = None) -> int:
    """Audit all trainers, print a table and write the file."""
    from gpusim_rl.errors import friendly_errors
    from gpusim_rl.machine.hardware import import_torch

    arguments = sys.argv[1:] if argv is None else argv
    args = parse(arguments)
    import_torch()
    with friendly_errors():
        report = audit_all(args.overrides, args.baselines, args.iterations)
        show(report)
        if args.out:
            command = shlex.join(["python", "benchmarks/throughput/audit_baselines.py", *arguments])
            write(args.out, json.dumps({"command": command, **provenance(args.out), **report}, indent=2) + "\n")
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="audit_baselines", description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("overrides", nargs="*", metavar="key=value", help="as for train.py: task=Ant num_envs=64")
    add("--baselines", default="all", help="rsl_rl,skrl,rl_games,sb3 or none (default: all installed)")
    add("--iterations", type=int, default=3, help="steady-state iterations to audit (default: 3)")
    add("--out", type=Path, metavar="FILE", help="json file for the full results")
    return parser.parse_intermixed_args(argv)


def audit_all(overrides: Sequence[str], asked: str, iterations: int) -> dict[str, Any]:
    """Audit our training and the baselines, each in its own scratch run; return the report."""
    from gpusim_rl.connect import LIBRARIES
    from gpusim_rl.diagnose.transfers import audit, our_loop
    from gpusim_rl.errors import ConfigError
    from gpusim_rl.testing.scratch_training import scratch_training
    from throughput.baselines import choose_baselines, make_baseline

    if iterations < 1:
        raise ConfigError(f"--iterations must be a positive int, got {iterations}")
    names, _ = choose_baselines(asked)
    with scratch_training(overrides) as (trainer, log):
        ours: Audit = audit(our_loop(trainer, log), warm_up=WARM_UP, iterations=iterations)
        report: dict[str, Any] = {
            "task": trainer.start.task_name,
            "num_envs": trainer.cfg.num_envs,
            "sim": str(trainer.start.sim),
            "device": str(trainer.start.device),
            "ours": ours.as_dict(),
            "baselines": {},
        }
    for name in names:
        with scratch_training(overrides) as (trainer, log):
            env: Any = trainer.env
            baseline = make_baseline(name, env, trainer.cfg, device=trainer.start.device)
            try:
                loop = baseline_loop(baseline, our_loop(trainer, log), LIBRARIES[name][0])
                found = audit(loop, warm_up=1, iterations=iterations).as_dict()
            finally:
                baseline.close()
        report["baselines"][name] = {"version": baseline.version, "settings": baseline.settings, **found}
    return report


def baseline_loop(baseline: Baseline, ours: Loop, module: str) -> Loop:
    """Return another library's loop on the environment of `ours`, with physics as an extra phase."""
    from gpusim_rl.diagnose.transfers import Loop

    def observe(around: Callable[[str], AbstractContextManager[Any]]) -> None:
        ours.observe(around)
        baseline.observe(around)

    return Loop(ours.device, baseline.iterate, observe, library=module)


def show(report: dict[str, Any]) -> None:
    """Print copies and waits of each trainer by phase, and where other libraries copy or wait most often."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    ours, baselines = report["ours"], report["baselines"]
    table = Table("", "phase", box=None, pad_edge=False, header_style="bold")
    for column in ("to device", "to host", "syncs"):
        table.add_column(column, justify="right")
    trainers = {"ours": ours} | {f"{name} {found['version']}": found for name, found in baselines.items()}
    for title, found in trainers.items():
        for number, (phase, work) in enumerate(found["phases"].items()):
            counts = [work["to_device"]["count"], work["to_host"]["count"], sum(work["syncs"].values())]
            row = [f"{count / found['iterations']:,.4g}" for count in counts]
            table.add_row("" if number else title, phase, *row)
        table.add_section()
    console.print(
        f"{report['task']}, {report['num_envs']} envs, {report['sim']}; {ours['method']};"
        f" per iteration, mean of {ours['iterations']}",
        soft_wrap=True,
    )
    console.print(table)
    for name, found in baselines.items():
        console.print(f"{name} copies or waits most often at")
        for location in found["locations"][:SHOWN_LOCATIONS]:
            count = location["count"] / found["iterations"]
            line = f"  {count:>5,.4g} x  {location['what']} at {location['where']}  ({location['phase']})"
            console.print(line, soft_wrap=True)


if __name__ == "__main__":
    # Like train.py, import the checkout of this file, installed or not; keep the script's own folder.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    sys.exit(main())
