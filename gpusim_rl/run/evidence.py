"""Does every task learn? Trains tasks to a threshold or for a stated time, and keeps what came of it as data."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from gpusim_rl.config import build
from gpusim_rl.env import VecEnv
from gpusim_rl.errors import ConfigError
from gpusim_rl.run.run_dir import replacing

SCHEMA = 1
POINTS = 60
"""Points of a curve that are kept."""
POLL_S = 2.0
STOP_S = 120.0  # a run that was asked to stop finishes its iteration and writes a checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What a task is trained to, and for how long at most.

    Attributes:
        task: Name.
        threshold: Return, mean of the last 100 episodes, at which the task counts as learned.
        minutes: Training time at most, in which a task that is too hard for it shows how far it comes.
        overrides: Settings for this machine class, as for train.py.
        compare: Published return, and whose.
    """

    task: str
    threshold: float
    minutes: float = 10.0
    overrides: tuple[str, ...] = ()
    compare: str = ""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """One training.

    Attributes:
        task: Name.
        seed: Of the run.
        threshold: See `Goal`.
        overrides: Settings that it was made with.
        run: Folder of the run, to go on with it.
        reached: Whether the threshold was reached.
        env_steps: Control steps, all worlds together, at the end.
        seconds: Training time at the end [s].
        env_steps_to_threshold: At the first crossing; None before it.
        seconds_to_threshold: Likewise [s].
        final_return: Mean of the last 100 episodes.
        best_return: Best such mean.
        random_return: Mean return of uniformly random actions.
        stats: The task's own numbers in the last row.
        diverged: Worlds that diverged, in all.
        curve: Env steps [million], seconds and return, at most POINTS of them.
        environment: Machine, versions, command and commit.
    """

    task: str
    seed: int
    threshold: float
    overrides: list[str]
    run: str
    reached: bool = False
    env_steps: float = 0.0
    seconds: float = 0.0
    env_steps_to_threshold: float | None = None
    seconds_to_threshold: float | None = None
    final_return: float | None = None
    best_return: float | None = None
    random_return: float | None = None
    stats: dict[str, float] = field(default_factory=dict)
    diverged: float = 0.0
    curve: list[list[float]] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)


def read_goals(file: Path) -> dict[str, Goal]:
    """The goals of all tasks, from a yaml of `<task>: {threshold, minutes, overrides, compare}`.

    Raises:
        ConfigError: The file cannot be read, or says something that a goal does not have.
    """
    try:
        content = yaml.safe_load(file.read_text()) or {}
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {file}: {' '.join(str(error).split())}") from None
    try:
        return {task: build(Goal, {**values, "task": task}, task) for task, values in content.items()}
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"{file}: {error}") from None


def read_outcomes(file: Path) -> list[Outcome]:
    """What has been measured so far; nothing where there is no file."""
    if not file.is_file():
        return []
    return [Outcome(**entry) for entry in json.loads(file.read_text())["outcomes"]]


def write_outcomes(file: Path, outcomes: Sequence[Outcome]) -> None:
    """Replaces the file, with tasks in alphabetical order."""
    ordered = sorted(outcomes, key=lambda outcome: (outcome.task, outcome.seed))
    entries = [{name: getattr(outcome, name) for name in Outcome.__slots__} for outcome in ordered]
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as target:
        target.write((json.dumps({"schema": SCHEMA, "outcomes": entries}, indent=1) + "\n").encode())


def measure_run(outcome: Outcome, run: Path) -> Outcome:
    """Brings an outcome up to date with the rows that its run has written."""
    rows = _rows(run / "metrics.csv")
    curve: list[list[float]] = []
    outcome.best_return = outcome.env_steps_to_threshold = outcome.seconds_to_threshold = None
    for row in rows:
        value = row.get("episode/return")
        steps, seconds = row["env_steps"], row["time/elapsed_s"]
        outcome.env_steps, outcome.seconds = steps, seconds
        if value is None:
            continue
        curve.append([round(steps / 1e6, 4), round(seconds, 1), float(f"{value:.5g}")])
        outcome.final_return = value
        outcome.best_return = max(value, -float("inf") if outcome.best_return is None else outcome.best_return)
        if value >= outcome.threshold and outcome.env_steps_to_threshold is None:
            outcome.env_steps_to_threshold, outcome.seconds_to_threshold = steps, seconds
    outcome.reached = outcome.env_steps_to_threshold is not None
    outcome.diverged = sum(row.get("sim/diverged") or 0.0 for row in rows)
    if rows:
        numbers = {name: value for name, value in rows[-1].items() if name.startswith("task/")}
        outcome.stats = {name.removeprefix("task/"): v for name, v in numbers.items() if v is not None}
    stride = max(1, -(-len(curve) // POINTS))
    outcome.curve = curve[::-1][::stride][::-1]  # the last point stays
    return outcome


def _rows(file: Path) -> list[dict[str, Any]]:
    if not file.is_file():
        return []
    with file.open() as lines:
        rows = list(csv.DictReader(lines))
    # The last row may be in the middle of being written.
    complete = [row for row in rows if None not in row.values()]
    return [{name: float(value) if value else None for name, value in row.items()} for row in complete]


def train_to(
    goal: Goal,
    outcome: Outcome,
    *,
    command: Sequence[str],
    environment: Mapping[str, str],
    runs: Path,
    cpus: set[int] | None = None,
    say: Callable[[str], None],
) -> Outcome:
    """Trains, or goes on training, until the threshold is reached or the time is over.

    The training is a process of its own, which is asked to stop and leaves a checkpoint: with more minutes the same
    training goes on.

    Args:
        goal: See `Goal`.
        outcome: What is known, with the folder of the run if there is one.
        command: Starts train.py.
        environment: Variables of its process.
        runs: Folder of all runs.
        cpus: CPUs of the process; None for all.
        say: Tells how it goes.

    Raises:
        ConfigError: The training failed.
    """
    done = Path(outcome.run) if outcome.run else None
    if done is not None and (done / "checkpoints" / "last.pt").is_file():
        settings = [f"checkpoint={done}"]
    else:
        done = None
        settings = [f"task={goal.task}", f"seed={outcome.seed}", f"experiment=learn-{goal.task}", *goal.overrides]
    arguments = [*command, *settings, f"log.dir={runs}", "log.console=quiet"]
    log = runs / f"learn-{goal.task}-{outcome.seed}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        process = subprocess.Popen(arguments, stdout=output, stderr=output, env=dict(environment))
    try:
        if cpus is not None and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(process.pid, cpus)
        started = time.time()
        while process.poll() is None:
            time.sleep(POLL_S)
            done = done or _new_run(runs / f"learn-{goal.task}", outcome.seed, started)
            if done is None:
                continue
            outcome.run = str(done)
            measure_run(outcome, done)
            if outcome.reached or outcome.seconds >= goal.minutes * 60.0:
                break
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    if process.returncode not in (0, 128 + signal.SIGTERM, -signal.SIGTERM) or done is None:
        last = log.read_text().strip().splitlines()
        raise ConfigError(f"training {goal.task} failed: {last[-1] if last else process.returncode}; see {log}")
    measure_run(outcome, done)
    facts = json.loads((done / "env.json").read_text())
    kept = ("time", "versions", "cpu", "gpu", "sim")
    outcome.environment = {name: facts[name] for name in kept if name in facts}
    say(describe(outcome))
    return outcome


def _new_run(folder: Path, seed: int, started: float) -> Path | None:
    """The run folder that a training has made since it was started."""
    for path in sorted(folder.glob("*/config.yaml"), key=lambda file: file.stat().st_mtime, reverse=True):
        if path.parent.is_symlink() or path.stat().st_mtime < started - 1.0:
            continue
        if yaml.safe_load(path.read_text()).get("seed") == seed:
            return path.parent
    return None


@torch.no_grad()
def random_return(env: VecEnv, seed: int = 0) -> float:
    """Mean return of one whole episode in every world under uniformly random actions.

    Args:
        env: Without staggered starts.
        seed: Of the actions.
    """
    generator = torch.Generator(env.device).manual_seed(seed)
    limit = env.cfg.clip_actions
    env.reset()
    total = torch.zeros(env.num_envs, device=env.device)
    running = torch.ones(env.num_envs, dtype=torch.bool, device=env.device)
    for _ in range(env.max_episode_length):
        unit = torch.rand(env.num_envs, env.num_actions, generator=generator, device=env.device)
        step = env.step(limit * (2.0 * unit - 1.0))
        total += torch.where(running, step.reward, 0.0)
        running &= ~step.done
    return float(total.mean())


def describe(outcome: Outcome) -> str:
    """One line."""
    value = "no episode ended" if outcome.final_return is None else f"return {outcome.final_return:,.0f}"
    if outcome.reached:
        assert outcome.env_steps_to_threshold is not None and outcome.seconds_to_threshold is not None
        steps, seconds = outcome.env_steps_to_threshold / 1e6, outcome.seconds_to_threshold
        value = f"{outcome.threshold:,.0f} after {steps:.1f} M steps, {seconds:.0f} s; {value}"
    else:
        value = f"{value}, below {outcome.threshold:,.0f}, after {outcome.env_steps / 1e6:.1f} M steps"
    return f"{outcome.task} seed {outcome.seed}: {value}"


def table(outcomes: Sequence[Outcome], goals: Mapping[str, Goal]) -> list[str]:
    """Markdown: one row per task, medians where there are several seeds."""
    lines = [
        "| task | threshold | reached | env steps | time | hardware | return | random | published |",
        "|---|---:|---|---:|---:|---|---:|---:|---|",
    ]
    for task in sorted({outcome.task for outcome in outcomes}):
        seeds = [outcome for outcome in outcomes if outcome.task == task]
        reached = [outcome for outcome in seeds if outcome.reached]
        all_reached = len(reached) == len(seeds)
        steps = _median([(o.env_steps_to_threshold if all_reached else o.env_steps) or 0.0 for o in seeds])
        seconds = _median([(o.seconds_to_threshold if all_reached else o.seconds) or 0.0 for o in seeds])
        best = _median([o.best_return for o in seeds if o.best_return is not None])
        random = _median([o.random_return for o in seeds if o.random_return is not None])
        goal = goals.get(task)
        cells = [
            f"`{task}`",
            f"{seeds[0].threshold:,.0f}",
            f"{len(reached)} of {len(seeds)}",
            f"{steps / 1e6:.1f} M" if steps is not None else "",
            _duration(seconds),
            hardware(seeds[0].environment),
            f"{best:,.0f}" if best is not None else "–",
            f"{random:,.0f}" if random is not None else "–",
            goal.compare if goal else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def hardware(environment: Mapping[str, Any]) -> str:
    """Where a training ran, in few words."""
    gpu, cpu = environment.get("gpu"), environment.get("cpu") or {}
    if gpu:
        return str(gpu[0]["name"] if isinstance(gpu, list) else gpu)
    count = cpu.get("available", "?")
    return f"{count} CPU core{'' if count == 1 else 's'}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _median(values: Sequence[float]) -> float | None:
    ordered = sorted(values)
    if not ordered:
        return None
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else 0.5 * (ordered[middle - 1] + ordered[middle])


def fill(text: str, lines: Sequence[str]) -> str:
    """Puts the table between the marks `<!-- learn -->` and `<!-- /learn -->` of a text; without marks it stays."""
    head, mark, rest = text.partition("<!-- learn -->\n")
    _, end, tail = rest.partition("<!-- /learn -->")
    return text if not end else "".join([head, mark, *(f"{line}\n" for line in lines), end, tail])


def draw(outcomes: Sequence[Outcome], figures: Any) -> Any:
    """A figure with a curve of every training, a panel for each task.

    Args:
        outcomes: See `read_outcomes`.
        figures: The module `matplotlib.figure`.
    """
    tasks = sorted({outcome.task for outcome in outcomes})
    columns = min(4, max(1, len(tasks)))
    rows = max(1, -(-len(tasks) // columns))
    figure = figures.Figure(figsize=(3.2 * columns, 2.4 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for panel, task in zip(panels, tasks, strict=False):
        for outcome in (o for o in outcomes if o.task == task):
            panel.plot([p[0] for p in outcome.curve], [p[2] for p in outcome.curve], linewidth=1.2)
            panel.axhline(outcome.threshold, color="tab:green", linewidth=0.8, linestyle="--")
            if outcome.random_return is not None:
                panel.axhline(outcome.random_return, color="tab:gray", linewidth=0.8, linestyle=":")
        panel.set_title(task, fontsize=9)
        panel.tick_params(labelsize=7)
        panel.grid(alpha=0.3)
    for panel in panels[len(tasks) :]:
        panel.set_visible(False)
    figure.supxlabel("env steps [million]", fontsize=8)
    figure.supylabel("return; dashed: threshold, dotted: random actions", fontsize=8)
    return figure
