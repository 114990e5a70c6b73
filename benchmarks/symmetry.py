"""Trains Go1 with and without mirror images of its samples; adds a row for each training to symmetry.json.

    python benchmarks/symmetry.py                 five seeds of both, 1.2 M steps each: about 4 minutes of a core
    python benchmarks/symmetry.py --seeds 1,2     some of them; rows that are there are not trained again

The commands do not widen: they are to walk ahead. `env_steps_to_target` is where the mean error of the velocity in ten
iterations is at most 0.2 m/s. The gait is looked at without exploration while the robot walks ahead with 0.5 m/s. Its
`asymmetry` is |L - R| / ((L + R) / 2) of the shares of time in which the left and the right foot are on the ground, the
mean over front and rear pair; 0 is a symmetric gait (the symmetry index of Robinson et al. 1987).
"""

from __future__ import annotations

import argparse
import csv
import json
import shlex
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from checkout import ROOT, process_environment, provenance, write
from walking import FIXED

TARGET, WINDOW = 0.2, 10  # m/s; rows
ARMS = {"with": [], "without": ["ppo.symmetry.augment=false"]}
"""Settings of each kind of training; Go1's own on a CPU have mirror images."""
AHEAD = FIXED | {"x": [0.5, 0.5], "y": [0.0, 0.0], "yaw": [0.0, 0.0]}
STARTING, WALKING = 100, 700  # control steps: not looked at, looked at


def steps_to_target(rows: list[dict[str, str]]) -> int | None:
    """Returns the env steps at which the error is at most the target; None where it never is."""
    errors = [float(row["task/lin_vel_error"] or "inf") for row in rows]
    for end in range(WINDOW, len(rows) + 1):
        if sum(errors[end - WINDOW : end]) / WINDOW <= TARGET:
            return int(rows[end - 1]["env_steps"])
    return None


def gait(run: Path, num_envs: int, steps: int = WALKING) -> dict[str, float]:
    """Lets a run walk ahead; returns the asymmetry of its gait, and the error of its velocity [m/s]."""
    import torch

    from gpusim_rl.view.player import Player

    changes = {"seed": 1, "task.command": AHEAD, "task.pushes": False, "task.randomize_episode_start": False}
    with closing(Player.open(str(run), num_envs=num_envs, plays_on="mujoco", changes=changes)) as player:
        task: Any = player.env.task  # type: ignore[reportAttributeAccessIssue]
        grounded, error = torch.zeros_like(task.air_time), torch.zeros(num_envs)
        for step in range(STARTING + steps):
            player.step()
            if step >= STARTING:
                grounded += task.touches.float() / steps
                error += task.stats()["lin_vel_error"] / steps
    pairs = grounded.view(num_envs, -1, 2)  # of a left and a right foot
    apart = (pairs[..., 0] - pairs[..., 1]).abs() / pairs.mean(dim=-1).clamp(min=1e-6)
    return {"asymmetry": round(float(apart.mean()), 4), "lin_vel_error": round(float(error.mean()), 4)}


def settings_of(arm: str, seed: int, more: list[str]) -> list[str]:
    """Returns what is typed behind `train.py`."""
    return ["task=Go1Velocity", "task.command.stages=[]", *ARMS[arm], f"seed={seed}", *more]


def measure(arm: str, seed: int, more: list[str], folder: Path, num_envs: int) -> dict[str, Any]:
    """Trains once, and looks at the gait."""
    settings = settings_of(arm, seed, more)
    place = [f"log.dir={folder}", f"experiment=symmetry-{arm}-{seed}", "log.console=plain"]
    command = [sys.executable, str(ROOT / "train.py"), *settings, *place]
    subprocess.run(command, check=True, env=process_environment())
    run = folder / f"symmetry-{arm}-{seed}" / "latest"
    with (run / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return {
        "symmetry": arm,
        "seed": seed,
        "command": shlex.join(["python", "train.py", *settings]),
        **provenance(folder),
        "env_steps": int(rows[-1]["env_steps"]),
        "minutes": round(float(rows[-1]["time/elapsed_s"]) / 60.0, 1),
        "env_steps_to_target": steps_to_target(rows),
        "gait": gait(run, num_envs),
        "curve_env_steps_and_error": [
            [int(row["env_steps"]), round(float(row["task/lin_vel_error"] or "nan"), 4)] for row in rows[9::10]
        ],
    }


def main() -> None:
    """Trains what is missing, writes, and prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for train.py (default: 200 iterations)")
    parser.add_argument("--seeds", default="1,2,3,4,5", help="default: 1,2,3,4,5")
    parser.add_argument("--num-envs", type=int, default=16, help="envs whose gait is looked at (default: 16)")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of run folders (default: runs)")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"), help="file to write")
    args = parser.parse_intermixed_args()
    for seed in map(int, args.seeds.split(",")):
        for arm in ARMS:
            rows = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
            more = args.overrides or ["max_iterations=200"]
            command = shlex.join(["python", "train.py", *settings_of(arm, seed, more)])
            if any(row["command"] == command for row in rows):
                continue
            row = measure(arm, seed, more, args.runs, args.num_envs)
            print(f"seed {seed}, {arm}: target after {row['env_steps_to_target']} steps, {row['gait']}", flush=True)
            rows = sorted([*rows, row], key=lambda row: (row["seed"], row["symmetry"]))
            write(args.out, json.dumps({"target": TARGET, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
