"""Measure start-up: CPU and wall time [s] of commands from start to end, and of imports by package.

python benchmarks/throughput/startup.py [--rounds 5] [--before CHECKOUT]    writes startup.json

Rounds are interleaved; numbers are minima. CPU time includes child processes. Imports are a training's, in wall time.
"""

import argparse
import json
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from measuring.checkout import ROOT, process_environment, provenance, write

TRAININGS = tuple(f"train task={task} max_iterations=1 device=cpu" for task in ("Cartpole", "Go1Velocity"))
COMMANDS = ("--help", "train --help", "play --help", "doctor --help", *TRAININGS)


def timed(checkout: Path, command: str, *flags: str) -> tuple[float, float, str]:
    """Run a command of a checkout in an empty folder; return CPU and wall time [s], and stderr."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    words = [sys.executable, *flags, "-m", "gpusim_rl.cli", *command.split()]
    with tempfile.TemporaryDirectory() as folder:
        environment = process_environment() | {"PYTHONPATH": str(checkout)}
        done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall, done.stderr


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="startup", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--before", type=Path, help="checkout to compare with")
    args, out = parser.parse_args(), Path(__file__).with_suffix(".json")
    checkouts = {"now": ROOT} | ({"before": args.before.resolve()} if args.before else {})
    cases = {(name, command): [] for command in COMMANDS for name in checkouts}
    for _ in range(args.rounds + 1):
        for name, command in cases:
            cases[name, command].append(timed(checkouts[name], command)[:2])
    imports = Counter()
    lines = timed(ROOT, TRAININGS[0], "-X", "importtime")[2]
    for microseconds, package in re.findall(r"time: +(\d+) \|.*\| +(\w+)", lines):
        imports[package] += int(microseconds)
    report = {**provenance(out), "rounds": args.rounds, "commands": {}}
    for (name, command), results in cases.items():
        cpu, wall = (round(min(column), 2) for column in zip(*results[1:], strict=True))  # the first fills file caches
        report["commands"].setdefault(command, {})[name] = {"cpu_s": cpu, "wall_s": wall}
    report["import_shares"] = {name: round(n / sum(imports.values()), 3) for name, n in imports.most_common(12)}
    write(out, json.dumps(report, indent=2) + "\n")
