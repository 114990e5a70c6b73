"""Measures how far simulators are apart; writes simulators.json beside this file, and prints its table.

    python benchmarks/simulators.py                  all tasks, mjwarp and newton against mujoco
    python benchmarks/simulators.py Ant Anymal       only these, and no file

An env on `sim=mujoco` takes random actions. In every control step another simulator begins from its state and takes the
same action. The numbers are the largest difference of a coordinate of the scene (m, rad, or of a quaternion) after that
step, by env and step: their median, 99th percentile and maximum. A step has several physics steps. Contacts amplify the
last digit of float32, and the solvers stop after different numbers of iterations.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

REFERENCE, OTHERS = "mujoco", ("mjwarp", "newton")
NUM_ENVS, STEPS = 16, 50


def measure(task: str, name: str) -> dict[str, Any]:
    """Differences of one simulator from the reference, in one task."""
    import torch

    from gpusim_rl import make_env

    random = torch.Generator().manual_seed(0)
    reference, other = (make_env(task, num_envs=NUM_ENVS, sim=sim, device="cpu", seed=0) for sim in (REFERENCE, name))
    for env in (reference, other):
        env.reset()
    differences = []
    for _ in range(STEPS):
        other.load_state_dict({**reference.state_dict(), "sim": other.sim.state_dict()})
        copy_physics(reference.sim, other.sim)
        action = 2.0 * torch.rand(NUM_ENVS, reference.num_actions, generator=random) - 1.0
        steps = [env.step(action) for env in (reference, other)]
        continues = ~(steps[0].done | steps[1].done)
        apart = (reference.sim.qpos - other.sim.qpos).abs().amax(dim=1)
        differences.append(apart[continues])
        if steps[0].diverged.any() or steps[1].diverged.any():
            raise RuntimeError(f"{task} diverged")
    found = torch.cat(differences)
    quantiles = {"median": 0.5, "p99": 0.99, "max": 1.0}
    return {key: float(found.quantile(share)) for key, share in quantiles.items()} | {"steps": len(found)}


def copy_physics(source: Any, target: Any) -> None:
    """Gives all articulations of a simulator the poses and velocities that they have in another one."""
    import torch

    model, everywhere = source.scene.model, torch.ones(source.num_envs, dtype=torch.bool)
    root = ("root_pos", "root_quat", "root_lin_vel", "root_ang_vel")
    for name in source.scene.articulation_names:
        from_, to = source.articulation(name), target.articulation(name)
        state = {"joint_pos": from_.joint_pos, "joint_vel": from_.joint_vel}
        if model.body_dofnum[source.scene.bodies_of(name)[0]] == 6:  # its base is free
            state |= {key: getattr(from_, key) for key in root}
        to.set_state(everywhere, **{key: value.clone() for key, value in state.items()})
    target.refresh()


def table(results: dict[str, Any]) -> str:
    """A row for each task."""
    lines = ["| task |" + "".join(f" `{name}` median | 99 % | max |" for name in OTHERS)]
    lines.append("|---|" + "---:|" * 3 * len(OTHERS))
    for task, found in results.items():
        cells = [f"{found[name][key]:.0e}" for name in OTHERS for key in ("median", "p99", "max")]
        lines.append(f"| `{task}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(names: list[str]) -> None:
    """Measures the tasks."""
    from checkout import provenance
    from gpusim_rl.settings.discover import tasks

    file = Path(__file__).with_suffix(".json")
    results: dict[str, Any] = {}
    for task in names or tasks():
        results[task] = {name: measure(task, name) for name in OTHERS}
        print(task, results[task], flush=True)
    print(table(results))
    if not names:
        settings = {"num_envs": NUM_ENVS, "steps": STEPS, "reference": REFERENCE}
        file.write_text(json.dumps({**provenance(file), "settings": settings, "tasks": results}, indent=1) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, installed or not
    main(sys.argv[1:])
