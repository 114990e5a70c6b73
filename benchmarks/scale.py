"""Weak scaling of data parallelism: steps per second of one process and of several, in turn.

python benchmarks/scale.py --out benchmarks/scale.json
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WARM_UP = 3  # iterations


def main() -> None:
    """Measure; print a line for each number of processes, and write the results."""
    args = parse(sys.argv[1:])
    speeds: dict[int, list[float]] = {count: [] for count in args.processes}
    for _ in range(args.runs):
        for count in args.processes:  # in turn: what else the machine does is shared by all
            speeds[count].append(speed(command(args, count)))
    first = statistics.median(speeds[args.processes[0]]) / args.processes[0]
    rows = []
    for count, found in speeds.items():
        median = statistics.median(found)
        row = {"processes": count, "steps_per_s": round(median), "efficiency": round(median / count / first, 3)}
        rows.append({**row, "command": shlex.join(command(args, count)), "runs": [round(x) for x in found]})
        print(row)
    if args.out is not None:
        sys.path.insert(0, str(ROOT))
        from gpusim_rl.provenance import describe_environment, git_state

        about: dict[str, Any] = describe_environment()
        about = {name: about[name] for name in ("versions", "cpu", "gpu")} | {"git": git_state(ROOT)[0]}
        args.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--task", default="Ant")
    parser.add_argument("--num-envs", type=int, default=512, help="of each process (default: 512)")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="how many (default: 1 2)")
    parser.add_argument("--runs", type=int, default=3, help="of each number (default: 3)")
    parser.add_argument("--out", type=Path, help="json file for the results")
    return parser.parse_args(argv)


def command(args: argparse.Namespace, processes: int) -> list[str]:
    """A short training."""
    train = ["train.py", f"task={args.task}", "multi_gpu=true", f"num_envs={args.num_envs}", "max_iterations=12"]
    return [
        "torchrun",
        "--standalone",
        f"--nproc-per-node={processes}",
        *train,
        "sim.num_threads=1",
        "log.console=json",
    ]


def speed(words: list[str]) -> float:
    """Control steps per second, the median of the iterations behind the first ones."""
    with tempfile.TemporaryDirectory() as folder:
        train = [str(ROOT / word) if word == "train.py" else word for word in words]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        module = [sys.executable, "-m", "torch.distributed.run", *train[1:], f"log.dir={folder}"]
        done = subprocess.run(module, capture_output=True, text=True, env=env, check=False)
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    found = [event["speed/env_steps_per_s"] for event in events if event["event"] == "row"]
    if done.returncode or len(found) <= WARM_UP:
        sys.exit(f"{shlex.join(words)} failed:\n{done.stderr}")
    return statistics.median(found[WARM_UP:])


if __name__ == "__main__":
    main()
