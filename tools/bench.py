"""Measure physics, environment, rollout and training, and other libraries' trainers on the same environment.

python tools/bench.py task=Ant num_envs=[256,1024,4096]           writes benchmarks/Ant/bench.json, .md and .png
python tools/bench.py task=Ant num_envs=4096 --peers none         ours alone
python tools/bench.py --gymnasium num_envs=[64,256,1024]          CPU physics against EnvPool and Gymnasium, on Ant-v5

Every contestant is a process of its own; they take turns in every round, so that their ratios do not depend on what
else the machine does. For one env count all of them are alive at once: their memory adds up.

    bare physics   the task's scene with its decimation and random controls; no task, no resets
    env step       the environment with actions made beforehand
    + policy       rollouts of our trainer
    + training     all of our training: rollout, update, logging

The numbers are control steps per second, summed over worlds. `training_over_physics` in the json is the whole training
over bare physics at the faster of the simulator's settings, at the largest env count.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpusim_rl.run.bench import Contestant

GYMNASIUM_TASK = "Ant-v5"


def main(argv: list[str] | None = None) -> int:
    """Measures, prints the tables and writes the files."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments == ["--worker"]:
        return worker()
    from gpusim_rl.errors import friendly_errors

    with friendly_errors():
        bench(parse(arguments), shlex.join(["python", "tools/bench.py", *arguments]))
    return 0


def worker() -> int:
    """The process of one contestant."""
    from gpusim_rl.api import scratch_training
    from gpusim_rl.compose import compose
    from gpusim_rl.run.contestants import serve

    serve(compose, scratch_training)
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("overrides", nargs="*", help="as for train.py: task=Ant num_envs=4096; num_envs may be a list: [256,1024]")
    add("--rounds", type=int, default=5, help="turns of each contestant (default: 5)")
    add("--seconds", type=float, default=3.0, help="length of a turn, at least one iteration (default: 3)")
    add("--warm-up", type=int, default=6, help="iterations before the first round (default: 6)")
    add("--peers", default="", help="rsl_rl,skrl,rl_games,sb3 or none (default: all that are installed)")
    add(
        "--modes",
        default="same,fastest",
        help="same: the work of our PPO; fastest: the library's fastest documented mode",
    )
    add("--gymnasium", action="store_true", help="instead: CPU physics on Gymnasium's Ant-v5, EnvPool and Gymnasium")
    add("--out", type=Path, help="folder to write to (default: benchmarks/<task>)")
    add("--no-plot", action="store_true", help="write no picture")
    return parser.parse_intermixed_args(argv)


def bench(args: argparse.Namespace, command: str) -> None:
    """Measures one env count after the other; what is measured is on disk after every round."""
    from gpusim_rl.errors import ConfigError
    from gpusim_rl.run.bench import SCHEMA, Turns, markdown, measure, summary, table

    if min(args.rounds, args.seconds, args.warm_up) <= 0:
        raise ConfigError("--rounds, --seconds and --warm-up must be positive")
    counts, overrides = env_counts(args.overrides)
    about = of_gymnasium(overrides) if args.gymnasium else of_task(args, overrides, counts)
    default_counts = about.pop("default_counts")
    counts = counts or default_counts
    contestants = about.pop("contestants")
    out: Path = args.out or Path("benchmarks") / about["task"]
    turns = Turns(args.rounds, args.seconds, args.warm_up)
    known = {"schema": SCHEMA, "command": command, **provenance(out), **about, "turns": dataclasses.asdict(turns)}
    result: dict[str, Any] = known
    parts: list[dict[str, Any]] = []
    for count in counts:

        def say(text: str, count: int = count) -> None:
            print(f"{count} worlds: {text}", file=sys.stderr)

        parts.append({})
        rows: list[dict[str, Any]] = []
        for rows in measure(contestants(count), turns, command=own_command(), environment=own_environment(), say=say):
            parts[-1] = {"num_envs": count, **summary(rows), "contestants": rows}
            largest = max(parts, key=lambda part: part["num_envs"])
            headline = {key: value for key, value in largest.items() if "_over_" in key}
            result = {**known, **headline, "env_counts": parts}
            write(out / "bench.json", json.dumps(result, indent=2) + "\n")
            write(out / "bench.md", markdown(result))
        print("\n".join(["", f"{about['task']}, {count} worlds", "", *table(rows), ""]))
    names = ["bench.json", "bench.md"]
    if not args.no_plot and draw(result, out / "bench.png"):
        names.append("bench.png")
    print(", ".join(str(out / name) for name in names))


def env_counts(overrides: Sequence[str]) -> tuple[list[int], list[str]]:
    """The numbers of worlds asked for, and the other overrides."""
    from gpusim_rl.errors import ConfigError

    mine = [text for text in overrides if text.startswith("num_envs=")]
    rest = [text for text in overrides if not text.startswith("num_envs=")]
    if not mine:
        return [], rest
    value = mine[-1].partition("=")[2]
    try:
        counts = [int(part) for part in value.strip("[]() ").split(",")]
        if min(counts) < 1:
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"num_envs must be a positive int or a list of them, got {value}; try num_envs=[256,1024]"
        ) from None
    return list(dict.fromkeys(counts)), rest


def of_task(args: argparse.Namespace, overrides: Sequence[str], counts: Sequence[int]) -> dict[str, Any]:
    """What is measured for a task; checks the configuration before anything is started."""
    from gpusim_rl.compose import compose
    from gpusim_rl.config import build_run
    from gpusim_rl.errors import ConfigError
    from gpusim_rl.learn.ppo import choose_precision
    from gpusim_rl.run.bench import choose_peers, install_command, training_contestants
    from gpusim_rl.run.clients import MODES
    from gpusim_rl.run.trainer import choose_devices

    asked = [name for name in args.peers.split(",") if name]
    peers, missing = choose_peers([] if asked == ["none"] else asked or None)
    if missing:
        print(f"left out, not installed: {', '.join(missing)}; {install_command(missing)}", file=sys.stderr)
    modes = args.modes.split(",")
    if not set(modes) <= set(MODES):
        raise ConfigError(f"--modes must be of {', '.join(MODES)}, got {args.modes}")
    config = compose([*overrides, *(f"num_envs={count}" for count in counts[:1])])
    cfg = build_run(config)
    rl_device, choice = choose_devices(cfg)

    def contestants(num_envs: int) -> list[Contestant]:
        return training_contestants(overrides, num_envs, on_mujoco=choice.name == "mujoco", peers=peers, modes=modes)

    return {
        "task": config["task"]["_target_"].rpartition(".")[2],
        "overrides": list(overrides),
        "sim": str(choice),
        "learner": str(rl_device),
        "precision": "bf16" if choose_precision(cfg.ppo.precision, rl_device)[0] else "fp32",
        "decimation": cfg.task.decimation,
        "horizon": cfg.ppo.horizon,
        "contestants": contestants,
        "default_counts": [cfg.num_envs],
    }


def of_gymnasium(overrides: Sequence[str]) -> dict[str, Any]:
    """What is measured with --gymnasium."""
    from gpusim_rl.errors import ConfigError, import_extra
    from gpusim_rl.run.bench import ant_v5_contestants

    if overrides:
        raise ConfigError(f"--gymnasium measures {GYMNASIUM_TASK} and takes only num_envs=, got {' '.join(overrides)}")
    for module in ("gymnasium", "imageio", "envpool"):  # without imageio, gymnasium has no MuJoCo
        import_extra(module, "bench", "--gymnasium")
    return {
        "task": GYMNASIUM_TASK,
        "overrides": [],
        "sim": "Gymnasium's ant.xml: Runge-Kutta, 5 steps of 0.01 s for a control step",
        "contestants": ant_v5_contestants,
        "default_counts": [64, 256, 1024],
    }


def provenance(out: Path) -> dict[str, Any]:
    """Commit, machine and versions."""
    from gpusim_rl.run.bench import PACKAGES
    from gpusim_rl.run.run_dir import describe_environment, git_state

    environment = describe_environment()
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            environment["versions"][package] = importlib.metadata.version(package)
    return {"git": git_state(exclude=out)[0], "environment": environment}


def own_command() -> list[str]:
    """Starts `worker` in a process of its own."""
    return [sys.executable, "-m", "gpusim_rl.cli", "bench", "--worker"]


def own_environment() -> dict[str, str]:
    """Ours, so that the process finds the same package, installed or not."""
    import gpusim_rl

    assert gpusim_rl.__file__ is not None
    folder = str(Path(gpusim_rl.__file__).parent.parent)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))}


def write(path: Path, text: str) -> None:
    """Writes a file that takes the old one's place when it is complete."""
    from gpusim_rl.errors import ConfigError
    from gpusim_rl.run.run_dir import replacing

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; try --out FOLDER") from None


def draw(result: dict[str, Any], path: Path) -> bool:
    """Draws the picture, where matplotlib is installed."""
    from gpusim_rl.errors import ConfigError, import_extra
    from gpusim_rl.run import bench

    try:
        figures = import_extra("matplotlib.figure", "plot", "the picture")
    except ConfigError as error:
        print(error, file=sys.stderr)
        return False
    bench.draw(result, figures).savefig(path, dpi=150)
    return True


if __name__ == "__main__":
    # As for train.py: the checkout that this file is in, whether it is installed or not.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    sys.exit(main())
