"""How far the motion of policies of `algo=amp` is from the clip; adds a row for each run to style.json.

    python benchmarks/style.py HumanoidAMP                     the latest run
    python benchmarks/style.py runs/walk/a runs/walk/b --keep  only printed

Each env plays a whole episode with mean actions, from a place of the clip. An agent may be ahead of the clip or behind
it. So the errors are those of the best alignment by dynamic time warping, as Peng et al. 2021 have them (arXiv
2104.02180): in a control step the clip goes on by 0, 1 or 2 frames, and its first frame follows its last. `unaligned`
is the mean over all frames: the error of a motion with the clip's poses in any order. Envs that fall count
in `falls` alone.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from checkout import ROOT, provenance, write

if TYPE_CHECKING:
    from torch import Tensor

FASTEST = 2
"""Frames by which the clip goes on in a control step at most."""


def aligned(distances: Tensor) -> Tensor:
    """Returns the mean distance along the best alignment with a clip, [envs].

    Args:
        distances: Distance of each step of an agent from each frame of the clip, [steps, envs, frames].
    """
    import torch

    total = distances[0]
    for distance in distances[1:]:
        ways = [total.roll(step, dims=1) for step in range(FASTEST + 1)]
        total = distance + torch.stack(ways).amin(dim=0)
    return total.amin(dim=1) / len(distances)


def row(run: str, num_envs: int, seed: int) -> dict[str, Any]:
    """Returns what is known of a run, and how it moves."""
    import torch

    from gpusim_rl.errors import ConfigError
    from gpusim_rl.files.paths import find_checkpoint
    from gpusim_rl.view.player import Player

    folder = find_checkpoint(run).run_dir
    if folder is None:
        raise ConfigError(f"{run} is in no run folder, which has the settings")
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    if (algo := settings["algo"]["name"]) != "amp":
        raise ConfigError(f"{run} was trained by algo={algo}, which has no style. Try a run of algo=amp")
    with (folder / "metrics.csv").open() as file:
        last = list(csv.DictReader(file))[-1]
    with closing(Player.open(run, num_envs=num_envs, plays_on="mujoco", changes={"seed": seed})) as player:
        env: Any = player.env
        if env.name != "HumanoidAMP":
            raise ConfigError(f"{run} is of task {env.name}, expected HumanoidAMP")
        if len(env.cfg.clips) > 1:
            raise ConfigError(f"{run} has {len(env.cfg.clips)} clips: from which one its motion is is not known")
        task, seen, speeds = env.task, [], []
        alive = torch.ones(num_envs, dtype=torch.bool, device=env.device)
        for _ in range(task.cfg.episode_length):
            step = player.step()
            alive &= ~(step.terminated | step.diverged)
            seen.append(task.style[:, -1].clone())
            speeds.append(task.speed.clone())
        if not alive.any():
            raise ConfigError(f"{run} falls in all {num_envs} envs")
        sizes = {part.name: part.size for part in env.obs_parts["policy"]}
        moved = torch.stack(seen)[:-1, alive]  # the last step begins a new episode
        found = errors(moved, task.features, sizes)
    return {
        "settings": yaml.safe_load((folder / "overrides.yaml").read_text()),
        "seed": settings["seed"],
        "env_steps": int(last["env_steps"]),
        "minutes": round(float(last["time/elapsed_s"]) / 60.0, 1),
        "falls": float((~alive).float().mean()),
        "speed": float(torch.stack(speeds)[:, alive].mean()),
        **found,
        "style_reward_of_training": float(last["amp/style_reward"]),
        "accuracy_agent_of_training": float(last["amp/accuracy_agent"]),
    }


def errors(moved: Tensor, clip: Tensor, sizes: dict[str, int]) -> dict[str, float]:
    """Returns errors of joints [rad], and of hands and feet [m], aligned and over all frames.

    Args:
        moved: Features of an agent, [steps, envs, features].
        clip: Features of the frames of the clip, [frames, features].
        sizes: Sizes of the parts of the features, in their order.
    """
    ours, theirs = (dict(zip(sizes, x.split(list(sizes.values()), dim=-1), strict=True)) for x in (moved, clip))
    found = {}
    for name, part, measure in (("joint_error", "joint_pos", apart), ("hand_and_foot_error", "ends", far)):
        distances = measure(ours[part], theirs[part])
        found[name] = float(aligned(distances).mean())
        found[f"{name}_unaligned"] = float(distances.mean())
    return found


def apart(ours: Tensor, theirs: Tensor) -> Tensor:
    """Returns mean absolute differences [steps, envs, frames] of numbers [steps, envs, n] and [frames, n]."""
    return (ours[..., None, :] - theirs).abs().mean(dim=-1)


def far(ours: Tensor, theirs: Tensor) -> Tensor:
    """Returns mean distances [steps, envs, frames] of points, whose coordinates follow each other."""
    import torch

    points = (ours[..., None, :] - theirs).unflatten(-1, (-1, 3))
    return torch.linalg.vector_norm(points, dim=-1).mean(dim=-1)


def main() -> None:
    """Reads the command line, and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="run folders, or tasks: their latest runs")
    parser.add_argument("--num-envs", type=int, default=32, help="envs (default: 32)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the starts (default: 1)")
    parser.add_argument("--keep", action="store_true", help="leave style.json as it is")
    args = parser.parse_args()

    from gpusim_rl.errors import friendly_errors
    from gpusim_rl.machine.hardware import limit_openmp_spin

    limit_openmp_spin()
    with friendly_errors():
        measure(args)


def measure(args: argparse.Namespace) -> None:
    """Measures, prints and writes."""
    path = Path(__file__).with_suffix(".json")
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    for run in args.runs:
        new = row(run, args.num_envs, args.seed)
        print(
            ", ".join(f"{key} {value:.3g}" for key, value in new.items() if isinstance(value, float | int)), flush=True
        )
        rows = [old for old in rows if (old["settings"], old["seed"]) != (new["settings"], new["seed"])] + [new]
    if not args.keep:
        rows.sort(key=lambda row: row["seed"])
        result = {"command": "python benchmarks/style.py", **provenance(path), "rows": rows}
        write(path, json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
