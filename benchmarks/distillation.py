"""Distils a trained policy into students that lack parts of its observation; adds a row for each to distillation.json.

    python benchmarks/distillation.py runs/Go1Velocity/latest --leave-out lin_vel joint_vel
    python benchmarks/distillation.py <run of the teacher> --leave-out lin_vel --rnn none --iterations 20
    python benchmarks/distillation.py runs/FrankaReach/latest --task FrankaReachCamera
    python benchmarks/distillation.py <run on rough ground> --leave-out --set task.vision=depth num_envs=64 --level 5

The student has the task of the teacher, or with --task one with images of it, and the settings of its yaml. Returns are
means of whole episodes with mean actions, of the same seed in as many envs for both.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import resource
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from checkout import ROOT, provenance, write

ENVS = 64
"""Envs of an evaluation."""
OF_TASK = re.compile(r"\+*(task|num_envs)[.=]")
"""Settings of the teacher that the student takes over."""


def evaluated(run: str, args: argparse.Namespace) -> dict[str, float]:
    """Returns what an episode of a run is worth, and the task's numbers."""
    import torch

    from gpusim_rl.run.evaluation import evaluate
    from gpusim_rl.view.player import Player

    with closing(Player.open(run, num_envs=ENVS, plays_on="mujoco", changes={"seed": args.seed})) as player:
        assert player.policy is not None
        env: Any = player.env
        if args.level is not None:  # else each begins where its training has led it
            env.task.levels.value.fill_(args.level)
            player.obs = env.begin_episodes(torch.ones(ENVS, dtype=torch.bool))
        result, _ = evaluate(env, player.policy, player.obs)
    return {
        name: round(value, 4) for name, value in result.items() if name == "return_mean" or name.startswith("task/")
    }


def same_task(args: argparse.Namespace) -> list[str]:
    """Returns the command of a student in the teacher's task."""
    from gpusim_rl.files.paths import find_checkpoint
    from gpusim_rl.settings.saved_run import read_overrides

    of_task = [line for line in read_overrides(find_checkpoint(args.teacher)) if OF_TASK.match(line)]
    rnn = args.rnn.replace("none", "null")
    command = ["train.py", *of_task, *args.set, *(f"task.observations.{part}.used=false" for part in args.leave_out)]
    command += [
        "algo=distill",
        f"distill.horizon={args.horizon}",
        f"distill.epochs={args.epochs}",
        f"max_iterations={args.iterations}",
    ]
    return [*command, f"distill.network.rnn={rnn}", "distill.network.rnn_size=128", f"seed={args.seed}"]


def main() -> int:
    """Trains a student, and evaluates it and its teacher."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("teacher", help="run of the teacher")
    parser.add_argument("--task", help="task of the student, with the settings of its yaml: those below have no effect")
    parser.add_argument("--leave-out", nargs="*", default=["lin_vel"], help="parts that the student lacks")
    parser.add_argument("--set", nargs="*", default=[], help="other settings of the student")
    parser.add_argument("--level", type=int, help="level of rough ground that both are evaluated on")
    parser.add_argument("--rnn", default="gru", choices=["gru", "lstm", "none"], help="memory of the student")
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--horizon", type=int, default=60)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    if args.task is not None:
        command = ["train.py", f"task={args.task}", "algo=distill", f"seed={args.seed}"]
    else:
        command = same_task(args)
    named = [f"distill.teacher={args.teacher}", "experiment=distillation", "log.console=plain"]
    subprocess.run([sys.executable, *command, *named], cwd=ROOT, check=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)

    student = ROOT / "runs" / "distillation" / "latest"
    with (student / "metrics.csv").open() as file:
        last = list(csv.DictReader(file))[-1]
    row = {
        "command": " ".join(["python", *command, "distill.teacher=<run of the teacher>"]),
        "env_steps": int(last["env_steps"]),
        "minutes": round(float(last["time/elapsed_s"]) / 60.0, 1),
        "cpu_minutes": round((used.ru_utime + used.ru_stime) / 60.0, 1),
        "teacher": evaluated(args.teacher, args),
        "student": evaluated(str(student), args),
    }
    row["share"] = round(row["student"]["return_mean"] / row["teacher"]["return_mean"], 4)
    print(json.dumps(row, indent=2))
    path = Path(__file__).with_suffix(".json")
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = [old for old in rows if old["command"] != row["command"]] + [row]
    result = {"command": "python benchmarks/distillation.py <run of the teacher>", **provenance(path), "rows": rows}
    write(path, json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
