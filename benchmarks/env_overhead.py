"""Times control steps of an environment and, from the same states, their physics alone; writes env_overhead.json.

    python benchmarks/env_overhead.py                     Go1Velocity, 4096 envs, on the CPU
    python benchmarks/env_overhead.py Ant --num-envs 1024

The physics alone goes back to the state before each control step and repeats its physics, with its controls. `bare` is
the same without what the task reads of the new state: kinematics and sensors.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

WARM_UP = 20
"""Control steps with random actions before anything is measured: robots fall, and begin anew."""


def measure(task: str, num_envs: int, steps: int) -> dict[str, list[float]]:
    """Returns seconds of each control step, of its physics, and of the physics without what the task reads."""
    import torch

    from gpusim_rl import make_env

    env = make_env(task, num_envs=num_envs, device="cpu", sim="mujoco", seed=0)
    env.reset()
    sim: Any = env.sim
    step, before = sim.step, dict[str, Any]()

    def remembering(substeps: int) -> None:
        before.update(substeps=substeps, seconds=-time.perf_counter(), state=copy_of(sim))
        before["seconds"] += time.perf_counter()
        step(substeps)

    def alone() -> float:
        restore(sim, before["state"])
        started = time.perf_counter()
        step(before["substeps"])
        return time.perf_counter() - started

    seconds: dict[str, list[float]] = {"env": [], "physics": [], "bare": []}
    generator = torch.Generator().manual_seed(0)
    for i in range(WARM_UP + steps):
        action = 2.0 * torch.rand(num_envs, env.num_actions, generator=generator) - 1.0
        sim.step = remembering
        started = time.perf_counter()
        env.step(action)
        took = time.perf_counter() - started - before["seconds"]
        sim.step = step
        after = copy_of(sim)
        physics = alone()
        derived, sim._derived = sim._derived, []
        bare = alone()
        sim._derived = derived
        restore(sim, after)
        if i >= WARM_UP:
            for name, value in zip(seconds, (took, physics, bare), strict=True):
                seconds[name].append(value)
    env.close()
    return seconds


def copy_of(sim: Any) -> dict[str, Any]:
    """Returns all that the next step of a simulator depends on."""
    return {name: value.clone() for name, value in sim._saved().items()}


def restore(sim: Any, state: dict[str, Any]) -> None:
    """Takes a simulator back to `copy_of`."""
    for name, value in sim._saved().items():
        value.copy_(state[name])


def main() -> None:
    """Measures and writes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(";")[0])
    parser.add_argument("task", nargs="?", default="Go1Velocity")
    parser.add_argument("--num-envs", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=40, help="control steps that are measured (default: 40)")
    args = parser.parse_args()

    from checkout import provenance, write

    out = Path(__file__).with_suffix(".json")
    seconds = measure(args.task, args.num_envs, args.steps)
    result: dict[str, Any] = {"task": args.task, "num_envs": args.num_envs, "steps": args.steps, **provenance(out)}
    for name in ("physics", "bare"):
        ratios = [part / whole for part, whole in zip(seconds[name], seconds["env"], strict=True)]
        low, median, high = statistics.quantiles(ratios, n=4)
        result[f"{name}_over_env_step"] = {"median": median, "quartiles": [low, high]}
        print(f"{name} over env step: {median:.3f} ({low:.3f} to {high:.3f})")
    result["seconds"] = {name: statistics.median(values) for name, values in seconds.items()}
    write(out, json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, installed or not
    main()
