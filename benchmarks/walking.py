"""Lets trained walking robots follow fixed commands; adds a row for each run to walking.json.

    python benchmarks/walking.py Go1Velocity                    the latest run of a task
    python benchmarks/walking.py runs/go1/a runs/go1/b --keep   only printed

Each command holds for an episode of 20 s in 16 envs that start from rest. The policy acts with its mean; noise and
encoder bias are as trained; there are no pushes. Errors are means over the whole episode, the start included. Commands
that the training does not draw are left out, but for standing.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import yaml

from checkout import ROOT, provenance, write

COMMANDS = {
    "stand": (0.0, 0.0, 0.0),
    "forward": (1.0, 0.0, 0.0),
    "slowly": (0.5, 0.0, 0.0),
    "backward": (-1.0, 0.0, 0.0),
    "left": (0.0, 1.0, 0.0),
    "right": (0.0, -1.0, 0.0),
    "turn left": (0.0, 0.0, 0.5),
    "turn right": (0.0, 0.0, -0.5),
    "curve": (0.7, 0.0, 0.5),
}
"""Velocity ahead and to the left [m/s], yaw rate [rad/s]."""
FIXED = {"standing": 0.0, "heading": 0.0, "forward": 0.0, "heading_gain": 0.0, "interval": [1e6, 1e6], "stages": []}
STATS = {"lin_vel_error": "m/s", "ang_vel_error": "rad/s", "falls_per_minute": "1/min"}


def follow(run: str, changes: dict[str, Any], num_envs: int, seed: int) -> dict[str, float]:
    """Plays a whole episode in every env; returns the task's numbers."""
    from gpusim_rl.run.evaluation import evaluate
    from gpusim_rl.view.player import Player

    changes = {"seed": seed, "task.pushes": False, **changes}
    with closing(Player.open(run, num_envs=num_envs, plays_on="mujoco", changes=changes)) as player:
        assert player.policy is not None
        result, _ = evaluate(player.env, player.policy, player.obs)
    return {name: result[f"task/{name}"] for name in STATS}


def row(run: str, num_envs: int, seed: int) -> dict[str, Any]:
    """Returns what is known of a run, and its numbers for each command."""
    from gpusim_rl.files.paths import find_checkpoint

    folder = find_checkpoint(run).run_dir
    assert folder is not None
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    with (folder / "metrics.csv").open() as file:
        last = list(csv.DictReader(file))[-1]
    ranges = ranges_of(run)
    found = {}
    for name, values in COMMANDS.items():
        command: dict[str, float] = dict(zip(("x", "y", "yaw"), values, strict=True))
        if name == "stand" or all(low <= command[axis] <= high for axis, (low, high) in ranges.items()):
            fixed = FIXED | {axis: [value, value] for axis, value in command.items()}
            found[name] = follow(run, {"task.command": fixed}, num_envs, seed)
    return {
        "task": settings["task"]["_target_"].rpartition(".")[2],
        "settings": yaml.safe_load((folder / "overrides.yaml").read_text()),
        "seed": settings["seed"],
        "env_steps": int(last["env_steps"]),
        "minutes": round(float(last["time/elapsed_s"]) / 60.0, 1),
        "commands": found,
    }


def ranges_of(run: str) -> dict[str, list[float]]:
    """Returns the ranges of the parts of the commands that the training has reached."""
    from gpusim_rl.view.player import Player

    with closing(Player.open(run, plays_on="mujoco")) as player:
        limits: Any = player.env.task.command.limits  # pyright: ignore[reportAttributeAccessIssue]
    return dict(zip(("x", "y", "yaw"), limits.T.tolist(), strict=False))


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="run folders, or tasks: their latest runs")
    parser.add_argument("--num-envs", type=int, default=16, help="envs of each command (default: 16)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the starts (default: 1)")
    parser.add_argument("--keep", action="store_true", help="leave walking.json as it is")
    args = parser.parse_args()

    from gpusim_rl.machine.hardware import limit_openmp_spin

    limit_openmp_spin()
    path = Path(__file__).with_suffix(".json")
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    for run in args.runs:
        new = row(run, args.num_envs, args.seed)
        print(f"{new['task']}, seed {new['seed']}: {new['env_steps']:,} steps in {new['minutes']} min")
        for name, found in new["commands"].items():
            numbers = "  ".join(f"{found[stat]:6.3f} {unit}" for stat, unit in STATS.items())
            print(f"  {name:<12}{numbers}", flush=True)
        rows = [old for old in rows if (old["task"], old["seed"]) != (new["task"], new["seed"])] + [new]
    if not args.keep:
        rows.sort(key=lambda row: (row["task"], row["seed"]))
        result = {"command": "python benchmarks/walking.py", **provenance(path), "rows": rows}
        write(path, json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
