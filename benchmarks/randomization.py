"""Measures what it costs to give envs other masses; writes randomization.json beside this file.

    python benchmarks/randomization.py                      # all simulators that run on this device
    python benchmarks/randomization.py mujoco --num-envs 1024

docs/randomization.md quotes it. Rounds are interleaved, and ratios are taken within a round: a
machine that is busy for a while slows both sides of them. `milliseconds` are by the clock on the wall,
`cpu_milliseconds` what the processors spent on this process, whatever else they did. Of Ant, medians over rounds, with
the `ratio` to a step:

- step: a control step of all envs (physics, task, resets), nothing randomised
- all_masses: other masses and inertias for all envs at once, with the constants that MuJoCo derives from them
- step_masses_at_resets: a control step where every env gets other masses whenever it is reset
- step_all_at_resets: the same with masses, friction, damping, strength, noise on observations and actions, and latency

On CUDA each is replayed as a graph, as a training does it.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROUNDS, WARM_UP = 7, 4
SECONDS = 2.0  # of a measurement, about
FILE = Path(__file__).with_suffix(".json")
CLOCKS: dict[str, Callable[[], float]] = {"milliseconds": time.perf_counter, "cpu_milliseconds": time.process_time}


def draw(low: float, high: float, operation: str, distribution: str, **more: Any) -> dict[str, Any]:
    """A draw of the schema."""
    return {"range": [low, high], "operation": operation, "distribution": distribution, **more}


MASSES = {"rigid_body_properties": {"mass": draw(0.5, 1.5, "scaling", "uniform")}}
ALL = {
    "observations": draw(0.0, 0.002, "additive", "gaussian", range_correlated=[0.0, 0.001]),
    "actions": draw(0.0, 0.02, "additive", "gaussian", range_correlated=[0.0, 0.01]),
    "latency": {"range": [0, 2]},
    "actor_params": {
        "ant": {
            **MASSES,
            "dof_properties": {
                "damping": draw(0.5, 1.5, "scaling", "uniform"),
                "effort": draw(0.8, 1.2, "scaling", "uniform"),
            },
            "rigid_shape_properties": {"friction": draw(0.7, 1.3, "scaling", "uniform")},
        }
    },
}


def measure(sim: str, device: str, num_envs: int) -> dict[str, Any]:
    """One simulator's row."""
    import torch

    import gpusim_rl
    from gpusim_rl.run.cuda_graph import Graphs, choose_graph

    def seconds(work: Callable[[], None], count: int) -> dict[str, float]:
        """Time of one piece of work [s], by each clock."""
        if device == "cuda":
            torch.cuda.synchronize()
        started = {name: clock() for name, clock in CLOCKS.items()}
        for _ in range(count):
            work()
        if device == "cuda":
            torch.cuda.synchronize()
        return {name: (clock() - started[name]) / count for name, clock in CLOCKS.items()}

    def made(params: dict[str, Any]) -> Any:
        task = {"randomize": bool(params), "randomization_params": params}
        env = gpusim_rl.make_env("Ant", num_envs=num_envs, sim=sim, device=device, task=task)
        env.reset()
        return env

    def graphed(owner: Any, work: Callable[[], Any]) -> tuple[Graphs, Callable[[], None]]:
        where = torch.device(device, 0) if device == "cuda" else torch.device(device)
        graphs = Graphs(choose_graph("step", where, where, physics_steps=1, check_task=False), where, stateful=[owner])
        return graphs, lambda: graphs.run("step", work)

    envs = {"step": made({}), "step_masses_at_resets": made({"actor_params": {"ant": MASSES}})}
    envs["step_all_at_resets"] = made(ALL)
    action = torch.zeros(num_envs, 8, device=device)
    action.uniform_(-1.0, 1.0)
    work = {name: graphed(env.task, lambda env=env: env.step(action)) for name, env in envs.items()}

    masses = envs["step_masses_at_resets"]
    everywhere = torch.ones(num_envs, dtype=torch.bool, device=device)

    def all_masses() -> None:
        masses.randomizer.age.fill_(1)
        masses.randomizer.begin_episodes(everywhere)
        masses.sim._derive_constants()

    work["all_masses"] = graphed(masses.task, all_masses)
    rounds: list[dict[str, dict[str, float]]] = [{} for _ in range(ROUNDS)]
    counts: dict[str, int] = {}
    for name, (graphs, run) in work.items():
        with graphs.stream():
            seconds(run, WARM_UP)  # compile and capture
            counts[name] = min(100, max(1, round(SECONDS / seconds(run, 1)["milliseconds"])))
    for times in rounds:
        for name, (graphs, run) in work.items():
            with graphs.stream():
                times[name] = {clock: round(1e3 * value, 3) for clock, value in seconds(run, counts[name]).items()}
    for env in envs.values():
        env.close()
    row = {clock: summary(rounds, clock) for clock in CLOCKS}
    return {"sim": sim, "device": device, "num_envs": num_envs, **row, "rounds": rounds}


def summary(rounds: list[dict[str, dict[str, float]]], clock: str) -> dict[str, Any]:
    """Medians over rounds of what was measured by a clock, and of its ratio to a step of the same round."""

    def median(values: list[float]) -> float:
        return round(statistics.median(values), 3)

    names = sorted(rounds[0])
    times = {name: [times[name][clock] for times in rounds] for name in names}
    ratios = {n: [t / step for t, step in zip(times[n], times["step"], strict=True)] for n in names if n != "step"}
    return {
        **{name: median(times[name]) for name in names},
        "ratio": {name: median(values) for name, values in ratios.items()},
        "ratio_range": {name: [round(min(values), 3), round(max(values), 3)] for name, values in ratios.items()},
    }


def main() -> None:
    """Measures and writes."""
    parser = argparse.ArgumentParser(description="What randomisation costs.")
    parser.add_argument("sims", nargs="*", default=[], help="mujoco, mjwarp; default: those of this device")
    parser.add_argument("--num-envs", type=int, default=4096)
    parser.add_argument("--out", type=Path, default=FILE)
    arguments = parser.parse_args()

    from gpusim_rl.machine.hardware import limit_openmp_spin

    limit_openmp_spin()
    import torch

    from gpusim_rl.files.provenance import describe_environment, git_state

    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = []
    for sim in arguments.sims or ["mujoco", "mjwarp"]:
        rows.append(measure(sim, "cpu" if sim == "mujoco" else device, arguments.num_envs))
        print({name: value for name, value in rows[-1].items() if name != "rounds"}, flush=True)
    result = {
        "command": shlex.join(["python", *sys.argv]),
        "git": git_state(Path("runs"))[0],
        "environment": describe_environment(),
        "simulators": rows,
    }
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, installed or not
    main()
