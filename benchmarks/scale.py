"""Weak scaling of data parallelism: steps per second of one process and of several, in turn.

python benchmarks/scale.py --out benchmarks/scale.json
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WARM_UP = 3  # iterations
ITERATIONS = 9


def main() -> None:
    """Measure; print a line for each number of processes, and write the results."""
    sys.path.insert(0, str(ROOT))
    args = parse(sys.argv[1:])
    os.environ["OMP_NUM_THREADS"] = "1"
    speeds: dict[int, list[float]] = {count: [] for count in args.processes}
    for _ in range(args.runs):
        for count in args.processes:  # in turn: what else the machine does is shared by all
            speeds[count].append(speed(settings(args), count))
    first = statistics.median(speeds[args.processes[0]]) / args.processes[0]
    rows = []
    for count, found in speeds.items():
        median = statistics.median(found)
        command = ["torchrun", "--standalone", f"--nproc-per-node={count}", "train.py", *settings(args)]
        row = {"processes": count, "steps_per_s": round(median), "efficiency": round(median / count / first, 3)}
        rows.append({**row, "command": shlex.join(command), "runs": [round(x) for x in found]})
        print(row)
    if args.out is not None:
        from gpusim_rl.files.provenance import describe_environment, git_state

        about: dict[str, Any] = describe_environment()
        about = {name: about[name] for name in ("versions", "cpu", "gpu")} | {"git": git_state(ROOT)[0]}
        others = json.loads(args.out.read_text()) if args.out.exists() else {}  # of benchmarks/actors.py
        args.out.write_text(json.dumps({**others, **about, "rows": rows}, indent=1) + "\n")


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--task", default="Ant")
    parser.add_argument("--num-envs", type=int, default=512, help="of each process (default: 512)")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="how many (default: 1 2)")
    parser.add_argument("--runs", type=int, default=3, help="of each number (default: 3)")
    parser.add_argument("--out", type=Path, help="json file for the results")
    return parser.parse_args(argv)


def settings(args: argparse.Namespace) -> list[str]:
    """Of the training, in each process."""
    return [f"task={args.task}", "multi_gpu=true", f"num_envs={args.num_envs}", "sim.num_threads=1"]


def speed(overrides: list[str], processes: int) -> float:
    """Control steps per second, the median of the iterations behind the first ones."""
    from gpusim_rl.diagnose.short_training import measure_training

    result = measure_training(overrides, processes=processes, warm_up=WARM_UP, iterations=ITERATIONS)
    if result.error is not None:
        sys.exit(f"{processes} processes: {result.error}")
    return result.env_steps_per_s


if __name__ == "__main__":
    main()
