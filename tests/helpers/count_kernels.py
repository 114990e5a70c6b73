"""Count the kernels of an iteration by task and part, and Warp's; rewrite tests/kernels.json.

python tests/helpers/count_kernels.py              all tasks, and the file
python tests/helpers/count_kernels.py Ant Anymal   only these, and no file
python tests/helpers/count_kernels.py --lines Ant  kernels of PPO by part and line of code
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from gpusim_rl.settings.discover import tasks
from gpusim_rl.settings.hydra_errors import unknown_choice
from gpusim_rl.settings.schema import ALGORITHMS
from helpers.fake_cuda import (
    CONTROL_STEP,
    NUM_ENVS,
    PARTS,
    Placement,
    Training,
    count,
    fake_cuda,
    iterate,
    learns,
    load_guard,
    make_trainer,
    why_not,
)
from helpers.gpu_kernels import Launches, count_launches, warp_versions

TABLE = Path(__file__).parents[1] / "kernels.json"


def tasks_of(algo: str) -> list[str]:
    return [task for task in tasks() if learns(algo, task)]


def torch_version() -> str:
    """Return the version without the patch: `2.13`."""
    return ".".join(torch.__version__.split(".")[:2])


def predicted(training: Training, launches: Launches) -> dict[str, float]:
    """Return H100 times [ms] of a control step, its physics and an update, and bounds of the update's share."""
    step, update, physics = training.seconds[CONTROL_STEP], training.seconds["update"], launches.seconds()
    at_most = launches.seconds(training.num_envs)
    times = {CONTROL_STEP: step, "physics": physics, "physics at most": at_most, "update": update}
    most, least = (update / (training.horizon * (step + each) + update) for each in (physics, at_most))
    return {
        **{part: round(1e3 * seconds, 3) for part, seconds in times.items()},
        "share of the update": round(most, 3),
        "its least share": round(least, 3),
    }


def print_lines(task: str) -> None:
    """Print PPO's kernels of a control step and an update of two minibatches, by part and line."""
    counter = Placement(by_line=True)
    with fake_cuda(), torch.autograd.set_detect_anomaly(True, check_nan=False):
        iterate(make_trainer(task, ppo={"epochs": 1, "horizon": 2, "minibatch_size": NUM_ENVS}), counter=counter)
    for part, lines in counter.lines.items():
        sys.stdout.write(f"{part}: {lines.total()}\n")
        sys.stdout.writelines(f"  {number:4} {line}\n" for line, number in lines.items())


def markdown(rows: Mapping[str, Mapping[str, float]], columns: Sequence[str]) -> str:
    lines = [["task", *columns], ["---", *("---:" for _ in columns)]]
    lines += [[task, *(f"{parts.get(column, 0):,}" for column in columns)] for task, parts in rows.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n\n"


def main(arguments: list[str]) -> int:
    names = [name for name in arguments if name != "--lines"]
    unknown = [unknown_choice("task", name, list(tasks()), None) for name in names if name not in tasks()]
    problem = why_not() or next(map(str, unknown), None)
    if problem is not None:
        sys.stderr.write(f"{problem}\n")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        load_guard(Path(folder))
    if len(names) < len(arguments):
        for task in names:
            print_lines(task)
        return 0
    launches = {task: count_launches(task) for task in names or tasks()}
    warp = {task: found.numbers for task, found in launches.items()}
    sys.stdout.write(f"{warp_versions()}\n\n{markdown(warp, list(next(iter(warp.values()))))}")
    kernels: dict[str, dict[str, Any]] = {}
    times: dict[str, dict[str, Any]] = {}
    moved: dict[str, dict[str, Any]] = {}
    for algo in ALGORITHMS:
        counted = {task: count(task, algo) for task in tasks_of(algo) if task in (names or tasks())}
        if not counted:
            continue
        kernels[algo] = {task: training.kernels for task, training in counted.items()}
        times[algo] = {task: predicted(training, launches[task]) for task, training in counted.items()}
        moved[algo] = {
            task: {part: round(size / 1e6, 1) for part, size in training.moved.items()}
            for task, training in counted.items()
        }
        sys.stdout.write(f"{algo}, torch {torch.__version__}\n\n{markdown(kernels[algo], [CONTROL_STEP, *PARTS])}")
        sys.stdout.write(markdown(times[algo], list(next(iter(times[algo].values())))))
        sys.stdout.flush()
    if not names:
        table = {"torch": torch_version(), "warp": warp_versions(), "kernels": kernels, "launches": warp}
        TABLE.write_text(json.dumps({**table, "predicted_ms": times, "megabytes": moved}, indent=1) + "\n")
        sys.stdout.write(f"wrote {TABLE}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
