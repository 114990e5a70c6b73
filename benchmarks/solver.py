"""Measures how many iterations MuJoCo Warp's constraint solver takes, and what a limit of them changes.

    python benchmarks/solver.py

writes solver.json: by task, over worlds and physics steps of random actions, the mean, the 99.9th percentile and the
largest number of iterations; and by limits of them and of the line search, the share of worlds that would take more
iterations, and how far the velocities after a physics step are from those with MuJoCo's limits: the 99.9th percentile,
and the largest, in rad/s or m/s. On a GPU a step ends with its slowest world. See `sim.iterations`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

TASKS = ("Ant", "Humanoid", "Anymal", "ShadowHand", "FrankaCubeStack", "Trifinger", "HalfCheetah", "Walker2d")
NUM_ENVS, STEPS = 256, 60
MUJOCO = (100, 50)
LIMITS = ((6, 50), (8, 50), (10, 50), (12, 50), (12, 20), (12, 10))
"""Iterations, and those of a line search."""


def measure(task: str) -> dict[str, Any]:
    """Iterations and errors of one task."""
    import torch
    import warp as wp

    from gpusim_rl import make_env

    env = make_env(task, num_envs=NUM_ENVS, sim={"name": "mjwarp", "graph": False}, device="cpu", seed=0)
    sim: Any = env.sim
    env.reset()
    torch.manual_seed(0)
    used: list[torch.Tensor] = []
    errors: dict[tuple[int, int], list[torch.Tensor]] = {limits: [] for limits in LIMITS}
    for number in range(STEPS):
        env.step(2.0 * torch.rand(NUM_ENVS, env.num_actions) - 1.0)
        if number % 3:
            continue
        state = sim.state_dict()

        def velocities(limits: tuple[int, int], state: Any = state) -> torch.Tensor:
            sim.load_state_dict(state)
            sim._model.opt.iterations, sim._model.opt.ls_iterations = limits
            sim.step(1)
            return sim.qvel.clone()

        exact = velocities(MUJOCO)
        used.append(wp.to_torch(sim._data.solver_niter).clone())
        for limits in LIMITS:
            errors[limits].append((velocities(limits) - exact).abs().amax(dim=1))
        sim._model.opt.iterations, sim._model.opt.ls_iterations = MUJOCO
        sim.load_state_dict(state)
    count = torch.cat(used).float()
    return {
        "iterations": {"mean": float(count.mean()), "p99.9": float(count.quantile(0.999)), "max": int(count.max())},
        "limits": [
            {
                "iterations": limits[0],
                "ls_iterations": limits[1],
                "above": float((count > limits[0]).float().mean()),
                "error_p99.9": float(torch.cat(error).quantile(0.999)),
                "error_max": float(torch.cat(error).max()),
            }
            for limits, error in errors.items()
        ],
    }


def main() -> None:
    """Measures and writes."""
    from gpusim_rl.files.provenance import describe_environment, git_state

    result = {
        "command": "python benchmarks/solver.py",
        "git": git_state(Path("runs"))[0],
        "environment": describe_environment(),
        "num_envs": NUM_ENVS,
        "physics_steps": len(range(0, STEPS, 3)),
        "tasks": {},
    }
    for task in sys.argv[1:] or TASKS:
        result["tasks"][task] = found = measure(task)
        print(task, found["iterations"], [limits["error_max"] for limits in found["limits"]], flush=True)
    if not sys.argv[1:]:
        Path(__file__).with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, installed or not
    main()
