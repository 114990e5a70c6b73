"""Learning benchmark: train tasks up to a threshold or time limit, and store the outcomes."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import signal
import statistics
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import yaml

from gpusim_rl.env import VecEnv
from gpusim_rl.errors import ConfigError
from gpusim_rl.files.safe_open import replacing
from gpusim_rl.learned import Learned, duration, median_time
from gpusim_rl.machine.child import Child
from gpusim_rl.run.metrics import WINDOW
from gpusim_rl.settings.checks import build
from gpusim_rl.settings.discover import tasks

SCHEMA = 4
"""Format version. New in 4: `recipe`, `in_full`; 3: `stat`; 2: `settings`, `episodes`, means of 100 episodes only."""
POINTS = 60
"""Maximum stored points per curve."""
NEWEST = 10
POLL_S = 2.0
PREPARING_POLL_S = 0.05  # [s], shorter: preparation time is measured
PART_OF_THE_POLICY = ("action_around",)
"""Task settings that define the meaning of an action: a policy keeps the values from its training."""
STOP_S = 120.0  # a stopped run finishes its iteration and saves a checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """Learning goal and time limit of a task.

    Attributes:
        task: Name.
        threshold: Target mean over the last 100 episodes: a return, or one of the task's metrics by name, as in
            `{success: 0.5}`.
        minutes: Time limit [min]; tasks that miss the threshold report their progress.
        overrides: Overrides for this class of machine, as for train.py.
        compare: Published return and source.
        success: Formats of the task's success metrics, by name: `"{:.1f} turns per episode"`.
        prepare: Python commands that write training inputs, such as demonstrations.

    In overrides and commands, `{seed}` stands for the seed of the run.
    """

    task: str
    threshold: float | dict[str, float]
    minutes: float = 10.0
    overrides: tuple[str, ...] = ()
    compare: str = ""
    success: dict[str, str] = field(default_factory=dict)
    prepare: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check that the threshold is a return or exactly one task metric."""
        if isinstance(self.threshold, dict) and len(self.threshold) != 1:
            raise ConfigError(
                f"{self.task}.threshold must be a return or one task metric, got {self.threshold}; try {{success: 0.5}}"
            )

    def for_seed(self, seed: int) -> Goal:
        """Return the goal with `{seed}` replaced in overrides and commands."""
        overrides, commands = (
            tuple(word.replace("{seed}", str(seed)) for word in words) for words in (self.overrides, self.prepare)
        )
        return replace(self, overrides=overrides, prepare=commands)

    @property
    def judged(self) -> tuple[float, str]:
        """Threshold, and the name of its metric ("" for the return)."""
        if isinstance(self.threshold, dict):
            [(stat, threshold)] = self.threshold.items()
            return threshold, stat
        return self.threshold, ""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """Outcome of one training run.

    Attributes:
        task: Name.
        seed: Seed of the run.
        recipe: Name of the recipe.
        threshold: See `Goal`.
        stat: Metric of the threshold; "" for the return.
        overrides: Overrides of the run.
        settings: Hash of all settings that learning depends on, if known.
        run: Run folder, for resuming.
        reached: Whether the threshold was reached.
        env_steps: Control steps at the end, summed over envs.
        seconds: Training time at the end [s].
        env_steps_to_threshold: Control steps to reach the threshold, or None.
        seconds_to_threshold: Training time to reach the threshold [s], or None.
        prepare_seconds: Time of the `prepare` commands [s], not included in `seconds`.
        final_return: Mean of the last 100 episodes at the end.
        episodes: Number of episodes in `final_return`, if known.
        best_return: Best mean of 100 episodes.
        random_return: Mean return of uniformly random actions.
        stats: Task metrics: newest values in the last NEWEST rows; for the threshold's metric, the judged mean.
        in_full: Task metrics under mean actions in the full task, if measured.
        diverged: Number of envs that diverged.
        curve: At most POINTS points: env steps [million], training time [s] and return.
        environment: Machine, versions, command and commit.
    """

    task: str
    seed: int
    threshold: float
    overrides: list[str]
    run: str
    recipe: str = "full"
    stat: str = ""
    settings: str = ""
    reached: bool = False
    env_steps: float = 0.0
    seconds: float = 0.0
    env_steps_to_threshold: float | None = None
    seconds_to_threshold: float | None = None
    prepare_seconds: float = 0.0
    final_return: float | None = None
    episodes: float | None = None
    best_return: float | None = None
    random_return: float | None = None
    stats: dict[str, float] = field(default_factory=dict)
    in_full: dict[str, float] = field(default_factory=dict)
    diverged: float = 0.0
    curve: list[list[float]] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)


def read_goals(file: Path) -> dict[str, Goal]:
    """Read the goals of all tasks from a yaml of `<task>: {threshold, minutes, overrides, compare}`.

    Raises:
        ConfigError: The file cannot be read, or has an unknown key.
    """
    try:
        content = yaml.safe_load(file.read_text()) or {}
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {file}: {' '.join(str(error).split())}") from None
    entries = content if isinstance(content, dict) else {"<task>": content}
    for task, values in entries.items():
        if entries is not content or not isinstance(values, dict):
            raise ConfigError(f"{file}: expected {task}: {{threshold: ..., minutes: ...}}, got {type(values).__name__}")
    try:
        return {task: build(Goal, {**values, "task": task}, task) for task, values in content.items()}
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def read_outcomes(file: Path) -> list[Outcome]:
    """Read the stored outcomes; return [] if there is no file."""
    if not file.is_file():
        return []
    return [Outcome(**entry) for entry in json.loads(file.read_text())["outcomes"]]


def write_outcomes(file: Path, outcomes: Sequence[Outcome]) -> None:
    """Replace the file, with outcomes sorted by task, recipe and seed."""
    ordered = sorted(outcomes, key=lambda outcome: (outcome.task, outcome.recipe, outcome.seed))
    entries = [{name: getattr(outcome, name) for name in Outcome.__slots__} for outcome in ordered]
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as target:
        target.write((json.dumps({"schema": SCHEMA, "outcomes": entries}, indent=1) + "\n").encode())


def measure_run(outcome: Outcome, run: Path) -> Outcome:
    """Update an outcome from the metrics rows of its run.

    Best return, threshold and curve use only means over 100 episodes.
    """
    rows = read_rows(run / "metrics.csv")
    judged = _means_of_episodes(rows, outcome.stat) if outcome.stat else []
    curve: list[list[float]] = []
    outcome.best_return = outcome.final_return = outcome.episodes = None
    outcome.env_steps_to_threshold = outcome.seconds_to_threshold = None
    for number, row in enumerate(rows):
        value, count = row.get("episode/return"), row.get("episode/count") or 0.0
        steps, seconds = row["env_steps"], row["time/elapsed_s"]
        outcome.env_steps, outcome.seconds = steps, seconds
        found = judged[number] if outcome.stat else value if count >= WINDOW else None
        if found is not None and found >= outcome.threshold and outcome.env_steps_to_threshold is None:
            outcome.env_steps_to_threshold, outcome.seconds_to_threshold = steps, seconds
        if value is None:
            continue
        outcome.final_return, outcome.episodes = value, count
        if count < WINDOW:
            continue
        curve.append([round(steps / 1e6, 4), round(seconds, 1), float(f"{value:.5g}")])
        outcome.best_return = max(value, -float("inf") if outcome.best_return is None else outcome.best_return)
    outcome.reached = outcome.env_steps_to_threshold is not None
    outcome.diverged = sum(row.get("sim/diverged") or 0.0 for row in rows)
    if rows:
        numbers = [item for row in rows[-NEWEST:] for item in row.items() if item[0].startswith("task/")]
        outcome.stats = {name.removeprefix("task/"): value for name, value in numbers if value is not None}
    if judged and judged[-1] is not None:
        outcome.stats[outcome.stat] = judged[-1]
    stride = max(1, -(-len(curve) // POINTS))
    outcome.curve = curve[::-1][::stride][::-1]  # keep the last point
    return outcome


def _means_of_episodes(rows: Sequence[Mapping[str, Any]], stat: str) -> list[float | None]:
    """Return, per row, the mean of a task metric over the last WINDOW episodes; None for fewer episodes.

    A row has one value for all of its episodes, so the mean may include a few more.
    """
    means: list[float | None] = []
    newest: deque[tuple[float, float]] = deque()  # value, number of ended episodes
    episodes = 0.0
    for row in rows:
        value, ended = row.get(f"task/{stat}"), row.get("episode/ended") or 0.0
        if value is not None and ended:
            newest.append((value, ended))
            episodes += ended
        while newest and episodes - newest[0][1] >= WINDOW:
            episodes -= newest.popleft()[1]
        means.append(sum(value * ended for value, ended in newest) / episodes if episodes >= WINDOW else None)
    return means


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Read the complete rows of a metrics.csv that may still be growing; return [] if there is no file."""
    if not file.is_file():
        return []
    text = file.read_text()
    complete = text[: text.rfind("\n") + 1]
    return [{k: float(v) if v else None for k, v in row.items()} for row in csv.DictReader(StringIO(complete))]


def hold_against(outcome: Outcome, threshold: float, stat: str = "") -> None:
    """Judge a run by another threshold and metric, although its metrics rows are gone.

    Only the thinned curve is left, so the time to the threshold is rounded up to its next point or to the end. The last
    task metrics may average few episodes, so for them only an already reached threshold (or a lower one) counts.
    """
    held = outcome.reached and outcome.stat == stat and outcome.threshold >= threshold
    outcome.threshold, outcome.stat = threshold, stat
    outcome.reached = held if stat else outcome.best_return is not None and outcome.best_return >= threshold
    outcome.env_steps_to_threshold = outcome.seconds_to_threshold = None
    if outcome.reached:
        reached = [(point[0] * 1e6, point[1]) for point in outcome.curve if not stat and point[2] >= threshold]
        steps, seconds = next(iter(reached), (outcome.env_steps, outcome.seconds))
        outcome.env_steps_to_threshold, outcome.seconds_to_threshold = steps, seconds


def train_to(
    goal: Goal,
    outcome: Outcome,
    *,
    command: Sequence[str],
    environment: Mapping[str, str],
    runs: Path,
    cpus: set[int] | None = None,
    stop: threading.Event | None = None,
    say: Callable[[str], None],
) -> Outcome:
    """Start or resume a training run, and stop it at the threshold or time limit.

    Training runs in a process that saves a checkpoint when stopped; a later call with a larger time limit resumes it.

    Args:
        goal: Goal for the seed.
        outcome: Known outcome, with the run folder if it exists.
        command: Command that starts train.py.
        environment: Environment variables of the process.
        runs: Folder of all runs.
        cpus: CPUs of the process; None for all.
        stop: Event that stops the run early, with a checkpoint.
        say: Reports progress.

    Raises:
        ConfigError: Training or a `prepare` command failed; the outcome has the progress so far.
    """
    stop = stop or threading.Event()
    done = Path(outcome.run) if outcome.run else None
    if done is not None and (done / "checkpoints" / "last.pt").is_file():
        shown = [word for word in goal.overrides if ".demonstrations.file=" in word]  # not saved in the run
        settings = [f"checkpoint={done}", *shown, *_more_iterations(done)]
    else:
        done, began = None, time.monotonic()
        for words in goal.prepare:
            prepare(words, environment, stop)
            if stop.is_set():
                return outcome
        outcome.prepare_seconds = time.monotonic() - began if goal.prepare else 0.0
        words = dict.fromkeys([f"recipe={outcome.recipe}", *goal.overrides])  # which may name the recipe
        settings = [f"task={goal.task}", f"seed={outcome.seed}", f"experiment=learn-{goal.task}", *words]
    arguments = [*command, *settings, f"log.dir={runs}", "log.console=quiet"]
    log = runs / f"learn-{goal.task}-{outcome.seed}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    started = time.time()
    child = Child(arguments, printed=log.open("wb+"), env=environment)
    try:
        if cpus is not None and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(child.process.pid, cpus)
        while child.running and not stop.wait(POLL_S):
            done = done or _new_run(runs / f"learn-{goal.task}", outcome.seed, started)
            if done is None:
                continue
            outcome.run = str(done)
            measure_run(outcome, done)
            if outcome.reached or outcome.seconds >= goal.minutes * 60.0:
                break
    finally:
        killed = not child.stop(STOP_S)
        status, last = child.process.returncode, child.last_line()
        child.close()
    done = done or _new_run(runs / f"learn-{goal.task}", outcome.seed, started)
    if done is not None:  # keep the progress, even after a failure
        outcome.run = str(done)
        measure_run(outcome, done)
        outcome.environment = _environment(done)
    if killed:
        raise ConfigError(
            f"training {goal.task} did not stop within {STOP_S:.0f} s and was killed; it will resume from its last"
            f" checkpoint, see {log}"
        )
    if status not in (0, 128 + signal.SIGTERM, -signal.SIGTERM) or (done is None and not stop.is_set()):
        raise ConfigError(f"training {goal.task} failed: {last or status}; see {log}")
    say(describe(outcome))
    return outcome


def evaluate_in_full(task: str, recipe: str, run: Path) -> dict[str, float]:
    """Return the task metrics of a run's mean actions in the full task: one whole episode in each env.

    User overrides and the settings in PART_OF_THE_POLICY are kept.
    """
    from gpusim_rl import train
    from gpusim_rl.settings.compose import compose

    ours, full = (compose([f"task={task}", f"recipe={name}"])["task"] for name in (recipe, "full"))
    changed = {key: value for key, value in full.items() if value != ours.get(key) and key not in PART_OF_THE_POLICY}
    quiet = {"console": "quiet"}
    result = train(task, checkpoint=str(run), recipe=recipe, test=True, task=changed, log=quiet)
    return {name.removeprefix("task/"): value for name, value in result.items() if name.startswith("task/")}


def prepare(words: str, environment: Mapping[str, str], stop: threading.Event) -> None:
    """Run a Python command that writes training inputs, until it exits or `stop` is set.

    Raises:
        ConfigError: The command failed.
    """
    with Child([sys.executable, *words.split()], env=environment) as child:
        while child.running:
            if stop.wait(PREPARING_POLL_S):
                child.stop()
                return
        reason = child.exit_reason()
        if child.process.returncode:
            raise ConfigError(f"python {words} failed: {reason}")


def _environment(run: Path) -> dict[str, Any]:
    """Return the machine and versions of a run; `earlier` lists its starts on another machine or commit."""
    try:
        metadata = json.loads((run / "env.json").read_text())
    except (OSError, ValueError):  # training failed at startup
        return {}
    kept = {name: metadata[name] for name in ("time", "versions", "cpu", "gpu", "sim") if name in metadata}

    def machine(start: Mapping[str, Any]) -> tuple[Any, ...]:
        return start.get("cpu"), start.get("gpu"), (start.get("git") or {}).get("sha")

    others = [start for start in metadata.get("earlier", []) if machine(start) != machine(metadata)]
    return {**kept, "earlier": others} if others else kept


def _more_iterations(run: Path) -> list[str]:
    """Return the override that a completed run needs to continue; empty if the run is not completed."""
    rows, settings = read_rows(run / "metrics.csv"), yaml.safe_load((run / "config.yaml").read_text()) or {}
    done = int(rows[-1].get("iteration") or 0) if rows else 0
    return [f"max_iterations={2 * done}"] if done and done >= settings.get("max_iterations", math.inf) else []


def _new_run(folder: Path, seed: int, started: float) -> Path | None:
    """Return the run folder of this seed created since training started, or None."""
    for path in sorted(folder.glob("*/config.yaml"), key=lambda file: file.stat().st_mtime, reverse=True):
        if path.parent.is_symlink() or path.stat().st_mtime < started - 1.0:
            continue
        if (yaml.safe_load(path.read_text()) or {}).get("seed") == seed:
            return path.parent
    return None


@torch.no_grad()
def random_return(env: VecEnv, seed: int = 0) -> float:
    """Return the mean return of one whole episode per env (without staggered starts) under uniformly random actions."""
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


def amount(value: float, stat: str) -> str:
    """Format a return, or a task metric with its name."""
    return f"`{stat}` {value:.2g}" if stat else f"{value:,.0f}"


def describe(outcome: Outcome) -> str:
    """Describe an outcome in one line."""
    value = "no episode ended" if outcome.final_return is None else f"return {outcome.final_return:,.0f}"
    if outcome.stat in outcome.stats:
        value += f", {amount(outcome.stats[outcome.stat], outcome.stat)}"
    threshold = amount(outcome.threshold, outcome.stat)
    if outcome.reached:
        assert outcome.env_steps_to_threshold is not None and outcome.seconds_to_threshold is not None
        steps, seconds = outcome.env_steps_to_threshold / 1e6, outcome.seconds_to_threshold
        value = f"{threshold} after {steps:.1f} M steps, {seconds:.0f} s; {value}"
    else:
        value = f"{value}, below {threshold}, after {outcome.env_steps / 1e6:.1f} M steps"
        if not _learned([outcome]):
            value += f"; not learned in this time: random actions get {outcome.random_return:,.0f}"
    return f"{outcome.task} recipe {outcome.recipe} seed {outcome.seed}: {value}"


def table(outcomes: Sequence[Outcome], goals: Mapping[str, Goal]) -> list[str]:
    """Format a Markdown table: a row per task and recipe, medians over seeds, and notes."""
    lines = [
        "|task (recipe)|goal|env steps|time|task metrics|settings|published|",
        "|---|---:|---:|---:|---|---|---|",
    ]
    for task, recipe in sorted({(outcome.task, outcome.recipe) for outcome in outcomes}):
        seeds = [outcome for outcome in outcomes if (outcome.task, outcome.recipe) == (task, recipe)]
        reached = sum(outcome.reached for outcome in seeds)
        missed = "" if _learned(seeds) else ", not above random"
        missed = f" ({reached} of {len(seeds)} seeds{missed})" if reached < len(seeds) else ""
        goal = goals.get(task)
        numbers = [_success([o.stats for o in seeds], goal)]
        if recipe != "full" and any(o.in_full for o in seeds):
            numbers.append(f"in the full task {_success([o.in_full for o in seeds if o.in_full], goal)}")
        settings = " ".join(seeds[0].overrides)
        cells = [
            f"`{task}`" if recipe == "full" else f"`{task}` ({recipe})",
            amount(seeds[0].threshold, seeds[0].stat) + missed,
            f"{statistics.median(_until(seeds, 'env_steps')) / 1e6:.1f} M",
            duration(statistics.median(_until(seeds, "seconds"))),
            "; ".join(numbers),
            f"`{settings}`" if settings else "",
            goal.compare if goal else "",
        ]
        lines.append(f"|{'|'.join(cells)}|")
    return [*lines, "", *_notes(outcomes), *_prepared(outcomes, goals)] if outcomes else lines


def _prepared(outcomes: Sequence[Outcome], goals: Mapping[str, Goal]) -> list[str]:
    """Format a note on tasks that need `prepare` commands."""
    tasks = [
        f"`{task}`"
        for task, goal in goals.items()
        if goal.prepare and any(o.task == task and tuple(o.overrides) == goal.overrides for o in outcomes)
    ]
    where = "by commands in [learn.yaml](../benchmarks/learn/learn.yaml); `time` includes them."
    return [f"Demonstrations of {' and '.join(tasks)} are made {where}"] if tasks else []


def _until(seeds: Sequence[Outcome], name: str) -> list[float]:
    """Return the known steps or times to the goal, or the totals unless most seeds reached the goal."""
    before = [seed.prepare_seconds if name == "seconds" else 0.0 for seed in seeds]
    spent = [getattr(seed, f"{name}_to_threshold") for seed in seeds]
    if median_time(spent) is None:
        spent = [getattr(seed, name) for seed in seeds]
    return [value + more for value, more in zip(spent, before, strict=True) if value is not None]


def _success(seeds: Sequence[Mapping[str, float]], goal: Goal | None) -> str:
    """Format medians of the task's success metrics; a dash if unknown."""
    shown = goal.success if goal else {}
    known = {name: [stats[name] for stats in seeds if name in stats] for name in shown}
    values = {name: _median(found) for name, found in known.items() if found}
    return ", ".join(shown[name].format(value) for name, value in values.items()) or ("–" if shown else "")


def _learned(seeds: Sequence[Outcome]) -> bool:
    """Return whether any seed reached the threshold or beats random actions; True if the returns are unknown."""
    pairs = [(o.final_return, o.random_return) for o in seeds]
    known = [(final, random) for final, random in pairs if final is not None and random is not None]
    return not known or any(o.reached for o in seeds) or any(final > random for final, random in known)


def _notes(outcomes: Sequence[Outcome]) -> list[str]:
    """Return a note that explains the numbers of the table."""
    counts = Counter((outcome.task, outcome.recipe) for outcome in outcomes)
    fewest, most = min(counts.values()), max(counts.values())
    seeds = f"{most} seed{'' if most == 1 else 's'}" if fewest == most else f"{fewest} to {most} seeds"
    medians = "" if most == 1 else "; numbers are medians"
    return [
        f"{seeds} of each task{medians}. A goal is a mean return, or the mean of the metric named, over {WINDOW}"
        " episodes; env steps and time are until the goal, or the time limit, is reached. Task metrics are from the"
        " end of training, with exploration (in the full task: without). Published returns are skrl's on Isaac Gym,"
        " unless another source is named.",
    ]


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def front_page(results: Mapping[str, Mapping[str, Learned]]) -> list[str]:
    """Format the Markdown table of docs/tasks.md: task (recipe; `*`: with overrides), aim, result."""
    lines = ["|task (recipe)|learns to|goal reached|", "|---|---|---|"]
    for name, entry in tasks().items():
        if name not in results:
            continue
        aim = re.split(r"[,;.]", entry.description)[0]
        for recipe, result in results[name].items():
            words = "".join(f", `{word}`" for word in result.overrides if word.startswith("algo="))
            marks = "" if recipe == "full" else f" ({recipe})"
            marks += " *" if result.overrides else ""
            value = result.result if result.stat else f"return {result.result}"
            lines.append(f"|`{name}`{marks}|{aim}|{value}{words}|")
    return lines


def results(file: Path) -> dict[str, dict[str, Learned]]:
    """Return the results over all seeds in tasks.json, by task and recipe."""
    seeds: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for outcome in json.loads(file.read_text(encoding="utf-8"))["outcomes"]:
        seeds.setdefault(outcome["task"], {}).setdefault(outcome["recipe"], []).append(outcome)
    return {
        task: {recipe: _task_result(outcomes) for recipe, outcomes in rows.items()}
        for task, rows in sorted(seeds.items())
    }


def _task_result(seeds: Sequence[dict[str, Any]]) -> Learned:
    """Return a task's result over all seeds: median time to the threshold, or final value if too few reached it."""
    first, stat = seeds[0], seeds[0].get("stat") or ""
    form = ".2g" if stat else ",.0f"
    threshold, name = f"{first['threshold']:{form}}", f"{stat} " if stat else ""
    before = [seed.get("prepare_seconds", 0.0) for seed in seeds]
    until = [seed["seconds_to_threshold"] for seed in seeds]
    seconds = median_time([None if t is None else t + more for t, more in zip(until, before, strict=True)])
    reached = sum(bool(seed["reached"]) for seed in seeds)
    if seconds is not None:
        some = f" ({reached} of {len(seeds)} seeds)" if reached < len(seeds) else ""
        result = f"{name}{threshold} in {duration(seconds)}{some}"
    else:
        ends = [seed["stats"].get(stat) if stat else seed["final_return"] for seed in seeds]
        known = [end for end in ends if end is not None]
        end = f"{statistics.median(known):{form}}" if known else "?"
        spent = statistics.median(seed["seconds"] + more for seed, more in zip(seeds, before, strict=True))
        result = f"{name}{end} of {threshold} in {duration(spent)}"
    gpu, cpus = first["environment"].get("gpu"), first["environment"].get("cpu", {}).get("available")
    hardware = "GPU" if gpu else f"{cpus} CPU core{'' if cpus == 1 else 's'}"
    return Learned(result, seconds, hardware, list(first.get("overrides") or []), first["threshold"], stat)


def fill(text: str, lines: Sequence[str], mark: str = "learn") -> str:
    """Return the text with the lines between `<!-- learn -->` and `<!-- /learn -->` replaced, if it has these marks."""
    head, begin, rest = text.partition(f"<!-- {mark} -->\n")
    _, end, tail = rest.partition(f"<!-- /{mark} -->")
    return text if not end else "".join([head, begin, *(f"{line}\n" for line in lines), end, tail])


def draw(outcomes: Sequence[Outcome], figures: Any) -> Any:
    """Plot the learning curve of every run, one panel per task; `figures` is `matplotlib.figure`."""
    tasks = sorted({outcome.task for outcome in outcomes})
    columns = min(4, max(1, len(tasks)))
    rows = max(1, -(-len(tasks) // columns))
    figure = figures.Figure(figsize=(3.2 * columns, 2.4 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for panel, task in zip(panels, tasks, strict=False):
        for outcome in (o for o in outcomes if o.task == task):
            panel.plot([p[0] for p in outcome.curve], [p[2] for p in outcome.curve], linewidth=1.2)
            if not outcome.stat:
                panel.axhline(outcome.threshold, color="tab:green", linewidth=0.8, linestyle="--")
            if outcome.random_return is not None:
                panel.axhline(outcome.random_return, color="tab:gray", linewidth=0.8, linestyle=":")
        panel.set_title(task, fontsize=9)
        panel.tick_params(labelsize=7)
        panel.grid(alpha=0.3)
    for panel in panels[len(tasks) :]:
        panel.set_visible(False)
    figure.supxlabel("env steps [million]", fontsize=8)
    figure.supylabel(f"mean return of {WINDOW} episodes; dashed: threshold, dotted: random actions", fontsize=8)
    return figure
