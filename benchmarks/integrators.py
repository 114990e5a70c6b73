"""Measures what integrators and friction cones cost on the CPU; writes integrators.json beside this file.

    python benchmarks/integrators.py

By task, integrator and cone: control steps/s of the environment with random actions, over those of `implicit` with
elliptic cones. All environments of a task take turns in one process, on one thread; each number is a median of rounds.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

TASKS = ("Ant", "Humanoid", "Anymal")
INTEGRATORS, CONES = ("implicit", "implicitfast", "euler"), ("elliptic", "pyramidal")
NUM_ENVS, STEPS, ROUNDS = 512, 20, 7


def measure(task: str) -> dict[str, Any]:
    """Control steps/s by integrator and cone."""
    import torch

    from gpusim_rl import make_env

    random = torch.Generator().manual_seed(0)
    envs: dict[tuple[str, str], Any] = {}
    speeds: dict[tuple[str, str], list[float]] = {}
    for integrator, cone in itertools.product(INTEGRATORS, CONES):
        physics = {"name": "mujoco", "num_threads": 1, "integrator": integrator, "cone": cone}
        envs[integrator, cone] = make_env(task, num_envs=NUM_ENVS, sim=physics, device="cpu", seed=0)
        envs[integrator, cone].reset()
        speeds[integrator, cone] = []
    for number in range(ROUNDS + 2):
        noise = torch.rand(STEPS, NUM_ENVS, 64, generator=random)  # more than any task's actions
        for physics, env in envs.items():
            actions = 2.0 * noise[..., : env.num_actions] - 1.0
            started = time.perf_counter()
            for action in actions:
                env.step(action)
            if number >= 2:  # robots have fallen onto the ground by then
                speeds[physics].append(STEPS * NUM_ENVS / (time.perf_counter() - started))
    usual = speeds[INTEGRATORS[0], CONES[0]]
    return {
        f"{integrator}, {cone}": {
            "control_steps_per_s": round(statistics.median(values)),
            "ratio": round(statistics.median(a / b for a, b in zip(values, usual, strict=True)), 2),
        }
        for (integrator, cone), values in speeds.items()
    }


def main() -> None:
    """Measures all tasks."""
    import torch

    from gpusim_rl.files.provenance import describe_environment

    torch.set_num_threads(1)
    result = {
        "environment": describe_environment(),
        "settings": {"num_envs": NUM_ENVS, "steps": STEPS, "rounds": ROUNDS},
        "tasks": {task: measure(task) for task in TASKS},
    }
    Path(__file__).with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, installed or not
    main()
