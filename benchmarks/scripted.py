"""Lets scripts and planners solve tasks that learning finds hard; adds a row for each task to scripted.json.

    python benchmarks/scripted.py AllegroHand --num-envs 16
    python benchmarks/scripted.py Trifinger --keep          only printed
    python benchmarks/scripted.py Trifinger --zero --keep   actions of 0, to compare

The controllers are in benchmarks/scripted/, one file for each task. Numbers are of the first episode of each env.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from checkout import ROOT, provenance, write

FOLDER = Path(__file__).resolve().parent / "scripted"
SETTINGS: dict[str, dict[str, Any]] = {"Trifinger": {"difficulty": 1}}
"""Settings of `task` that a controller is made for."""


def load(task: str) -> ModuleType:
    """Imports the controller of a task.

    Raises:
        ConfigError: There is none.
    """
    from gpusim_rl.errors import ConfigError

    file = FOLDER / f"{re.sub(r'(?<!^)(?=[A-Z])', '_', task).lower()}.py"
    spec = importlib.util.spec_from_file_location(f"scripted_{file.stem}", file)
    if not file.is_file() or spec is None or spec.loader is None:
        raise ConfigError(f"no controller of {task}: expected {file.relative_to(ROOT)}")
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measure(task: str, *, num_envs: int, seed: int, steps: int | None = None, zero: bool = False) -> dict[str, Any]:
    """Returns what a controller reaches in the first episode of each env.

    Args:
        task: Name of the task.
        num_envs: Envs.
        seed: Seed of the starts.
        steps: Control steps of an episode; None for the task's own.
        zero: Whether all actions are 0.
    """
    import torch

    import gpusim_rl

    changes = {**SETTINGS.get(task, {}), "randomize_episode_start": False}
    if steps is not None:
        changes["episode_length"] = steps
    env = gpusim_rl.make_env(task, num_envs=num_envs, seed=seed, task=changes)
    env.reset()
    still = torch.zeros(num_envs, env.num_actions, device=env.device)
    act: Callable[[], torch.Tensor] = (lambda: still) if zero else load(task).controller(env.task)
    running = torch.ones(num_envs, dtype=torch.bool, device=env.device)
    returns, length, terminated = torch.zeros(3, num_envs, device=env.device)
    sums: dict[str, torch.Tensor] = {}
    last: dict[str, torch.Tensor] = {}
    began = time.perf_counter()
    with torch.no_grad():
        for _ in range(env.max_episode_length):
            step = env.step(act())
            returns += step.reward * running
            length += running
            terminated += running & step.terminated
            for name, value in step.stats.items():
                sums[name] = sums.get(name, torch.zeros_like(value)) + value * running
                last[name] = torch.where(running, value, last.get(name, value))
            running &= ~step.done
    seconds = time.perf_counter() - began
    env.sim.close()
    # What is counted at the end of an episode is NaN before it.
    stats = {f"{name}_mean": (value / length).mean() for name, value in sums.items()}
    stats |= {f"{name}_end": value.mean() for name, value in last.items()}
    return {
        "task": task,
        "settings": SETTINGS.get(task, {}),
        "actions": "zero" if zero else "scripted",
        "num_envs": num_envs,
        "seed": seed,
        "episode_s": round(env.max_episode_length * env.task.dt, 2),
        "return": round(float(returns.mean()), 2),
        "terminated": round(float(terminated.mean()), 4),
        **{name: round(float(value), 4) for name, value in sorted(stats.items()) if value.isfinite()},
        "env_steps_per_s": round(num_envs * env.max_episode_length / seconds, 1),
    }


def main() -> int:
    """Measures, prints and writes."""
    from gpusim_rl.errors import friendly_errors

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="+", metavar="TASK")
    parser.add_argument("--num-envs", type=int, default=64, help="episodes of each task (default: 64)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the starts (default: 1)")
    parser.add_argument("--steps", type=int, help="control steps of an episode (default: the task's)")
    parser.add_argument("--zero", action="store_true", help="actions of 0 in place of the controller's")
    parser.add_argument("--keep", action="store_true", help="leave scripted.json as it is")
    args = parser.parse_args()

    path = Path(__file__).with_suffix(".json")
    with friendly_errors():
        for task in args.tasks:
            row = measure(task, num_envs=args.num_envs, seed=args.seed, steps=args.steps, zero=args.zero)
            print(json.dumps(row, indent=2), flush=True)
            if args.keep:
                continue
            measured = provenance(path)
            row["commit"] = measured["git"]
            rows = json.loads(path.read_text())["rows"] if path.exists() else []  # others may have written
            of = ("task", "actions")
            rows = [old for old in rows if any(old[key] != row[key] for key in of)] + [row]
            rows.sort(key=lambda row: (row["task"], row["actions"]))
            result = {"command": "python benchmarks/scripted.py TASK", **measured, "rows": rows}
            write(path, json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
