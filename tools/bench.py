"""How much of the bare simulator's speed is left when a policy is trained on it.

    python tools/bench.py task=Ant num_envs=4096 --out benchmarks/training_over_physics.json

Bare physics and training alternate in one process on one machine, several times, so that their ratio does not depend
on what else the machine does. Bare physics is the task's scene with its decimation, random controls made beforehand,
no task, no resets, at the faster of the simulator's settings. Training is all of `Trainer.train()`: policy, physics,
task, resets, update, logging.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpusim_rl.config import RunConfig
    from gpusim_rl.run.trainer import Trainer

CONTROL_SETS = 16  # random controls made beforehand and used in turn


def main(argv: list[str] | None = None) -> int:
    """Measures and writes the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="as for train.py: task=Ant num_envs=4096")
    parser.add_argument("--rounds", type=int, default=5, help="alternations of physics and training")
    parser.add_argument("--iterations", type=int, default=4, help="training iterations per round")
    parser.add_argument("--warm-up", type=int, default=10, help="training iterations before the first round")
    parser.add_argument("--out", type=Path, help="json file to write")
    args = parser.parse_args(argv)

    from gpusim_rl.errors import friendly_errors
    from gpusim_rl.machine import share_cpus

    share_cpus()
    with friendly_errors():
        result = measure(args.overrides, rounds=args.rounds, iterations=args.iterations, warm_up=args.warm_up)
        text = json.dumps(result, indent=2) + "\n"
        if args.out:
            args.out.write_text(text)
        sys.stdout.write(text)
    return 0


def measure(overrides: list[str], *, rounds: int, iterations: int, warm_up: int) -> dict[str, Any]:
    """Alternates bare physics and training; speeds are env steps per second."""
    import torch

    from gpusim_rl.compose import compose
    from gpusim_rl.config import build_run, load_task_class
    from gpusim_rl.run.logbook import Logbook
    from gpusim_rl.run.run_dir import describe_environment
    from gpusim_rl.run.trainer import Trainer

    with tempfile.TemporaryDirectory() as folder:
        quiet = [f"log.dir={folder}", "log.console=quiet", "max_iterations=1000000", "log.checkpoint_interval=1000000"]
        config = compose([*overrides, *quiet])
        cfg = build_run(config)
        trainer = Trainer(cfg, load_task_class(config["task"]["_target_"]), config=config, overrides=overrides)
        physics = {f"persistent={setting}": _bare_physics(trainer, cfg, setting) for setting in _settings(trainer)}
        speeds: dict[str, list[float]] = {name: [] for name in physics}
        training: list[float] = []
        run_dir = trainer.run_dir()
        git = run_dir.environment["git"]
        with Logbook(trainer, run_dir) as log:
            for _ in range(warm_up):
                trainer.iterate(log)
            for _ in range(rounds):
                started = time.perf_counter()
                for _ in range(iterations):
                    trainer.iterate(log)
                if trainer.rl_device.type == "cuda":
                    torch.cuda.synchronize(trainer.rl_device)
                steps = iterations * cfg.num_envs * cfg.ppo.horizon
                training.append(steps / (time.perf_counter() - started))
                for name, run in physics.items():
                    speeds[name].append(run(2 * cfg.ppo.horizon))

    fastest = max(speeds, key=lambda name: statistics.median(speeds[name]))
    ratios = [train / bare for train, bare in zip(training, speeds[fastest], strict=True)]
    return {
        "command": " ".join(["python tools/bench.py", *overrides]),
        "git": git,
        "environment": describe_environment(),
        "task": trainer.task_name,
        "num_envs": cfg.num_envs,
        "sim": str(trainer.choice),
        "precision": "bf16" if trainer.policy.bf16 else "fp32",
        "decimation": cfg.task.decimation,
        "training_over_physics": statistics.median(ratios),
        "training_over_physics_range": [min(ratios), max(ratios)],
        "training_env_steps_per_s": statistics.median(training),
        "bare_physics_env_steps_per_s": statistics.median(speeds[fastest]),
        "bare_physics_settings": {name: statistics.median(values) for name, values in speeds.items()},
        "rounds": [
            {"training": train, **{name: values[i] for name, values in speeds.items()}}
            for i, train in enumerate(training)
        ],
    }


def _settings(trainer: Trainer) -> list[Any]:
    """Settings of the simulator among which bare physics may choose the fastest."""
    return [False, True] if trainer.choice.name == "mujoco" else ["auto"]


def _bare_physics(trainer: Trainer, cfg: RunConfig, persistent: Any) -> Any:
    """A function that steps the bare simulator and returns env steps per second."""
    import torch

    from gpusim_rl.sim import make_sim

    sim = make_sim(trainer.env.sim.scene, trainer.choice, cfg.num_envs, replace(cfg.sim, persistent=persistent))
    articulations = [sim.articulation(name) for name in sim.scene.articulation_names]
    generator = torch.Generator(sim.device).manual_seed(0)
    limits = torch.as_tensor(sim.scene.model.actuator_ctrlrange, dtype=torch.float32, device=sim.device)
    limited = torch.as_tensor(sim.scene.model.actuator_ctrllimited.astype(bool), device=sim.device)
    low = torch.where(limited, limits[:, 0], -1.0)
    high = torch.where(limited, limits[:, 1], 1.0)
    unit = torch.rand(CONTROL_SETS, cfg.num_envs, low.shape[0], generator=generator, device=sim.device)
    controls = low + unit * (high - low)

    def step(i: int) -> None:
        first = 0
        for articulation in articulations:
            count = len(articulation.actuator_names)
            articulation.actuate(controls[i % CONTROL_SETS, :, first : first + count])
            first += count
        sim.step(cfg.task.decimation)

    for i in range(60):  # the robots reach the ground
        step(i)

    def run(steps: int) -> float:
        if sim.device.type == "cuda":
            torch.cuda.synchronize(sim.device)
        started = time.perf_counter()
        for i in range(steps):
            step(i)
        if sim.device.type == "cuda":
            torch.cuda.synchronize(sim.device)
        return steps * cfg.num_envs / (time.perf_counter() - started)

    return run


if __name__ == "__main__":
    raise SystemExit(main())
