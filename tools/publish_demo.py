"""Turn a run into a demo for gpusim-rl demo.

gpusim-rl publish-demo runs/Ant/2026-01-31_12-00-00      its best.pt, to gpusim_rl/demos/Ant
gpusim-rl publish-demo Ant --out my_demos/Ant            the latest Ant run, to your own folder
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    import _checkout  # noqa: F401

import argparse
import json
import re
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

from gpusim_rl.errors import ConfigError, friendly_errors, say
from gpusim_rl.files.paths import demos_dir, find_checkpoint
from gpusim_rl.options import Parser

CLOSE = 0.02  # maximum relative change of the return from rounding weights
KEPT = ("task", "config", "sim", "seed", "obs_sizes", "images", "num_actions", "iteration", "env_steps")
PERSONAL = ("log", "checkpoint", "start_from", "trust", "experiment")
"""Settings with the author's paths or names; a demo has the defaults of these and of all W&B settings."""


def main(argv: list[str] | None = None) -> int:
    with friendly_errors():
        say(str(publish(parse(argv))))
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("publish-demo", __doc__)
    parser.option("run")
    parser.option("--num-envs", "with an episode each, to compare the demo with the run", default=64)
    parser.option("--note", "limits of the policy, for its card, e.g. forward only", "Output", default="")
    parser.option("--out", "a folder", note="the task's demo")
    parser.options("--overwrite", "--trust", "--config-dir")
    return parser.parse_args(argv)


def publish(args: argparse.Namespace) -> Path:
    """Write the demo, evaluate run and demo, and keep the demo if the returns are close; return its folder."""
    from gpusim_rl.files.checkpoint_file import load
    from gpusim_rl.run.checkpoint import check_training

    found = find_checkpoint(args.run)
    file, run = found.file, found.run_dir
    if run is None:
        raise ConfigError("not in a run folder", key=str(file), hint="Pass the run folder, not a copy of its file")
    if file.name == "last.pt" and (best := file.with_name("best.pt")).is_file():
        file = best
    state = check_training(load(file), file, (*KEPT, "elapsed_s", "policy", "env"))
    if not re.fullmatch(r"\w+", state["task"]):
        raise ConfigError(key=f"{file}: task", expected="a name of A-Z a-z 0-9 _", got=state["task"])
    out: Path = (args.out or demos_dir() / state["task"]).absolute()
    if out.exists() and not args.overwrite:
        raise ConfigError("already exists", key=str(out), hint="Try --overwrite")
    if out.exists() and not (out / "demo.json").is_file():
        raise ConfigError("not a demo: no demo.json", key=str(out), hint="Try another --out")
    new = out.with_name(f".{out.name}.new")  # keep the old one until the new one is known to be good
    shutil.rmtree(new, ignore_errors=True)
    try:
        _write(new, state)
        before, after = (_evaluate(str(path), args) for path in (file, new))
        run_return, demo_return = before["return_mean"], after["return_mean"]
        if not abs(demo_return - run_return) <= CLOSE * abs(run_return):
            problem = f"the demo's return {demo_return:.4g} differs from the run's {run_return:.4g} by over {CLOSE:.0%}"
            raise ConfigError(problem, hint=f"Try more episodes: --num-envs {4 * args.num_envs}")
        _write_card(new / "demo.json", state, run, after, args.note)
        shutil.rmtree(out, ignore_errors=True)
        new.rename(out)
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return out


def _write(folder: Path, state: dict[str, Any]) -> None:
    """Write a minimal run folder for the player."""
    import yaml

    from gpusim_rl.files.checkpoint_file import save
    from gpusim_rl.settings.compose import compose

    (folder / "checkpoints").mkdir(parents=True)
    ours = compose([])  # without the author's folders and names
    personal = [key for key in state["config"] if key in PERSONAL or key.startswith("wandb_")]
    config = state["config"] | {key: ours[key] for key in personal}
    policy = {name: _half(name, value) for name, value in state["policy"].items()}
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    kept = {key: state[key] for key in KEPT}
    save(folder / "checkpoints/last.pt", {**kept, "config": config, "policy": policy, "env": _progress(state["env"])})


def _half(name: str, value: Any) -> Any:
    """Convert a weight to fp16, or a normaliser statistic, which may exceed fp16's range, to fp32."""
    import torch

    if not value.is_floating_point():
        return value
    return value.to(torch.float32 if "_norm." in name else torch.float16)


def _progress(env: dict[str, Any]) -> dict[str, Any]:
    """Return the training progress of the first env: terrain levels, command ranges.

    A player copies this progress to all of its envs.
    """
    num_envs = len(env["progress"])
    tensors = env["task"]["tensors"]
    per_env = {name: value[:1].clone() for name, value in tensors.items() if value.shape[:1] == (num_envs,)}
    which = {"encoder": env["encoder"]} if "encoder" in env else {}
    return {"progress": env["progress"][:1].clone(), "task": {"tensors": tensors | per_env}, **which}


def _evaluate(run: str, args: argparse.Namespace) -> dict[str, float]:
    """Play an episode in every env; return the mean metrics."""
    from gpusim_rl.run.evaluation import evaluate
    from gpusim_rl.view.player import Player

    with closing(Player.open(run, num_envs=args.num_envs, trust=args.trust, config_dir=args.config_dir)) as player:
        assert player.policy is not None
        return evaluate(player.observed, player.policy, player.obs)[0]


def _write_card(file: Path, state: dict[str, Any], run: Path, result: dict[str, float], note: str) -> None:
    """Write the demo's human-readable card."""
    from gpusim_rl.run.run_dir import RunDir

    environment = RunDir(run).environment
    gpus = [device["name"] for device in (environment.get("gpu") or {}).get("devices", ())]
    on_gpu = str(environment["learner"]["device"]).startswith("cuda")
    card = {
        "task": state["task"],
        "algorithm": state["config"]["algo"]["name"],
        "recipe": state["config"].get("recipe"),
        **({"note": note} if note else {}),
        "return": round(result["return_mean"], 4),
        "return_std": round(result["return_std"], 4),
        "success": {name[5:]: round(value, 4) for name, value in result.items() if name.startswith("task/")},
        "episodes": int(result["episodes"]),
        "env_steps": state["env_steps"],
        "minutes": round(state["elapsed_s"] / 60.0, 1),
        "seed": state["seed"],
        "commit": (environment.get("git") or {}).get("sha"),
        "date": environment["time"][:10],
        "versions": {name: environment["versions"][name] for name in ("gpusim-rl", "torch", "mujoco")},
        "hardware": gpus[0] if on_gpu and gpus else environment["cpu"]["model"],
    }
    file.write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
