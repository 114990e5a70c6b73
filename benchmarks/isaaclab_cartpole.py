"""Isaac Lab's Cartpole, learned by our PPO and by rsl_rl with Isaac Lab's own settings, in the same number of steps.

    python benchmarks/isaaclab_cartpole.py

in an environment with Isaac Lab and this checkout, writes isaaclab_cartpole.json: mean return and length of the last
episodes over the steps of all envs, and the lengths of an episode of each env without exploration noise, at the end.
The envs are those of docs/examples/offline_cartpole.py, on the CPU.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DATA = Path(__file__).with_suffix(".json")
NUM_ENVS, STEPS = 64, 9600  # control steps of each env
ENV = ("env.id=offline_cartpole:Offline-Cartpole", "env.physics=newton_mjwarp")
OURS = ("task=IsaacLab", *ENV, f"num_envs={NUM_ENVS}", "device=cpu", "ppo.minibatch_size=384", "log.console=quiet")


Rows = list[list[float]]
Evaluation = dict[str, float]


def ours(seed: int, folder: Path) -> tuple[Rows, Evaluation]:
    """Trains with our PPO; returns rows of steps, mean return and mean length, and an evaluation."""
    iterations = f"max_iterations={STEPS // 24}"
    command = [sys.executable, ROOT / "train.py", *OURS, iterations, "log.interval=1", f"seed={seed}", "log.dir=runs"]
    subprocess.run(command, cwd=folder, check=True, env=_environment())
    run = folder / "runs/Offline-Cartpole/latest"
    with (run / "metrics.csv").open() as file:
        found = [row for row in csv.DictReader(file) if row["episode/return"]]
    rows = [[float(row[name]) for name in ("env_steps", "episode/return", "episode/length")] for row in found]
    test = [sys.executable, ROOT / "train.py", f"checkpoint={run}", "test=true", "trust=true", "log.console=quiet"]
    subprocess.run(test, cwd=folder, check=True, env=_environment(), stdout=subprocess.DEVNULL)
    result = json.loads((run / "evaluation.json").read_text())
    return rows, {name: result[name] for name in ("return_mean", "length_mean")}


def theirs(seed: int, folder: Path) -> tuple[Rows, Evaluation]:
    """Trains with rsl_rl, in a process of the other Python; returns the same as `ours`."""
    file = folder / "rows.json"
    command = [sys.executable, Path(__file__).resolve(), "--rsl-rl", str(seed), "--out", file]
    subprocess.run(command, cwd=folder, check=True, env=_environment())
    rows, evaluation = json.loads(file.read_text())
    return rows, evaluation


def train_rsl_rl(seed: int) -> tuple[Rows, Evaluation]:
    """Trains with rsl_rl as Isaac Lab does, and averages the last 100 episodes, as our metrics do."""
    import gymnasium
    import torch

    import_module("offline_cartpole")  # registers the env
    rsl_rl = import_module("isaaclab_rl.rsl_rl")
    agents = import_module("isaaclab_tasks.core.cartpole.agents.rsl_rl_ppo_cfg")
    parse_env_cfg = import_module("isaaclab_tasks.utils.parse_cfg").parse_env_cfg
    cfg = parse_env_cfg("Offline-Cartpole", device="cpu", num_envs=NUM_ENVS, overrides=["physics=newton_mjwarp"])
    cfg.seed = seed
    envs = rsl_rl.RslRlVecEnvWrapper(gymnasium.make("Offline-Cartpole", cfg=cfg))
    settings: Any = rsl_rl.handle_deprecated_rsl_rl_cfg(agents.CartpoleDirectPPORunnerCfg(), version("rsl-rl-lib"))
    settings.seed, settings.device = seed, "cpu"
    step, ended, rows = envs.step, list[tuple[float, float]](), list[list[float]]()
    sums, lengths, count = torch.zeros(NUM_ENVS), torch.zeros(NUM_ENVS), 0

    def counted(actions: torch.Tensor) -> Any:
        nonlocal count
        result = step(actions)
        sums.add_(result[1])
        lengths.add_(1)
        count += 1
        for env in result[2].nonzero().flatten().tolist():
            ended.append((float(sums[env]), float(lengths[env])))
            sums[env] = lengths[env] = 0.0
        if count % settings.num_steps_per_env == 0 and ended:
            last = torch.tensor(ended[-100:]).mean(dim=0)
            rows.append([float(count * NUM_ENVS), *last.tolist()])
        return result

    envs.step = counted
    runner = import_module("isaaclab_rl.rsl_rl.utils").create_rsl_rl_runner(envs, settings, log_dir=None)
    runner.learn(STEPS // settings.num_steps_per_env)
    return rows, evaluated(envs, step, runner.get_inference_policy(device="cpu"))


def evaluated(envs: Any, step: Any, policy: Any) -> Evaluation:
    """Runs one whole episode in each env without exploration noise."""
    import torch

    obs, _ = envs.reset()
    sums, lengths, going = torch.zeros(NUM_ENVS), torch.zeros(NUM_ENVS), torch.ones(NUM_ENVS, dtype=torch.bool)
    with torch.inference_mode():
        while going.any():
            obs, reward, done, _ = step(policy(obs))
            sums, lengths = sums + reward * going, lengths + going
            going &= ~done.bool()
    return {"return_mean": float(sums.mean()), "length_mean": float(lengths.mean())}


def _environment() -> dict[str, str]:
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "docs/examples")))
    return {**os.environ, "PYTHONPATH": paths, "WANDB_MODE": "disabled"}


def about() -> dict[str, Any]:
    """Returns command, hardware and versions, for the data."""
    from gpusim_rl.files.provenance import describe_environment, git_state

    packages = {name: version(name) for name in ("isaaclab", "newton", "rsl-rl-lib")}
    return {
        "command": "python benchmarks/isaaclab_cartpole.py",
        "git": git_state(DATA)[0],
        "environment": describe_environment(),
        "packages": packages,
        "training": " ".join(OURS),
    }


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3, help="runs of each (default: 3)")
    parser.add_argument("--out", type=Path, default=DATA, help="file to write (default: beside this program)")
    parser.add_argument("--rsl-rl", type=int, metavar="SEED", help="trains with rsl_rl in this process")
    return parser.parse_args(argv)


def main() -> None:
    """Runs the command."""
    args = parse()
    if args.rsl_rl is not None:
        args.out.write_text(json.dumps(train_rsl_rl(args.rsl_rl)))
        return
    curves: dict[str, list[Rows]] = {"ours": [], "rsl_rl": []}
    evaluations: dict[str, list[Evaluation]] = {"ours": [], "rsl_rl": []}
    for seed in range(args.seeds):
        for name, learn in (("ours", ours), ("rsl_rl", theirs)):
            with tempfile.TemporaryDirectory() as folder:
                rows, evaluation = learn(seed, Path(folder))
            curves[name].append(rows)
            evaluations[name].append(evaluation)
            print(f"{name}, seed {seed}: {rows[-1][2]:.0f} of 300 steps, {evaluation['length_mean']:.0f} without noise")
            sys.stdout.flush()
    result = {**about(), "columns": ["env_steps", "return", "length"], **curves, "evaluation": evaluations}
    args.out.write_text(json.dumps(result, indent=None) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # the checkout, installed or not
    main()
