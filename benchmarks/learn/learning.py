"""The learning benchmark: trains tasks to a threshold or for a stated time, and keeps what came of it as data."""

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
"""3 has no `recipe` and `in_full`, 2 no `stat`, 1 no `settings` and `episodes`; 1 counted means of few episodes too."""
POINTS = 60
"""Points of a curve that are kept."""
NEWEST = 10
POLL_S = 2.0
PREPARING_POLL_S = 0.05  # [s], shorter: the time of what prepares a training counts
PART_OF_THE_POLICY = ("action_around",)
"""Settings of a task that say what an action means: a policy keeps those that it was trained with."""
STOP_S = 120.0  # a run that was asked to stop finishes its iteration and writes a checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What a task is trained to, and for how long at most.

    Attributes:
        task: Name.
        threshold: At which the task counts as learned, in the mean of the last 100 episodes: a return, or with its
            name one of the task's own numbers, `{success: 0.5}`.
        minutes: Training time at most, in which a task that is too hard for it shows how far it comes.
        overrides: Settings for this machine class, as for train.py.
        compare: Published return, and whose.
        success: How to show the task's own numbers that tell success, by name: `"{:.1f} turns per episode"`.
        prepare: Commands that write what the training reads, such as demonstrations: arguments of Python.

    In overrides and commands, `{seed}` stands for the seed of the training.
    """

    task: str
    threshold: float | dict[str, float]
    minutes: float = 10.0
    overrides: tuple[str, ...] = ()
    compare: str = ""
    success: dict[str, str] = field(default_factory=dict)
    prepare: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check that one number is judged."""
        if isinstance(self.threshold, dict) and len(self.threshold) != 1:
            raise ConfigError(
                f"{self.task}.threshold must be a return or one number of the task, got {self.threshold}; try"
                " {success: 0.5}"
            )

    def of_seed(self, seed: int) -> Goal:
        """Returns the goal with the settings and commands of a seed."""
        overrides, commands = (
            tuple(word.replace("{seed}", str(seed)) for word in words) for words in (self.overrides, self.prepare)
        )
        return replace(self, overrides=overrides, prepare=commands)

    @property
    def judged(self) -> tuple[float, str]:
        """The threshold, and the name of the number that it is of; "" for the return."""
        if isinstance(self.threshold, dict):
            [(stat, threshold)] = self.threshold.items()
            return threshold, stat
        return self.threshold, ""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """One training.

    Attributes:
        task: Name.
        seed: Of the run.
        recipe: Name of the recipe that was trained.
        threshold: See `Goal`.
        stat: Which of the task's own numbers the threshold is of; "" for the return.
        overrides: Settings that it was made with.
        settings: Hash of all settings that learning depends on; empty if not known.
        run: Folder of the run, to continue it.
        reached: Whether the threshold was reached.
        env_steps: Control steps, all envs together, at the end.
        seconds: Training time at the end [s].
        env_steps_to_threshold: When the threshold is first reached; None before it.
        seconds_to_threshold: Likewise [s].
        prepare_seconds: Time of the commands before it [s], which `seconds` leaves out.
        final_return: Mean of the last 100 episodes at the end.
        episodes: Episodes in it: fewer in a training too short for 100; None if not known.
        best_return: Best mean of 100 episodes.
        random_return: Mean return of uniformly random actions.
        stats: The task's own numbers: the newest of the last NEWEST rows, for some rows no episode has ended in. That
            of the threshold is the mean that is judged, as soon as it is known.
        in_full: The task's own numbers of the policy's mean action in the full task, whatever was trained; empty where
            that was not measured.
        diverged: Envs that diverged, in all.
        curve: Env steps [million], seconds and return since it is a mean of 100 episodes, at most POINTS of them.
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
    """The goals of all tasks, from a yaml of `<task>: {threshold, minutes, overrides, compare}`.

    Raises:
        ConfigError: The file cannot be read, or says something that a goal does not have.
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
    """What has been measured so far; nothing where there is no file."""
    if not file.is_file():
        return []
    return [Outcome(**entry) for entry in json.loads(file.read_text())["outcomes"]]


def write_outcomes(file: Path, outcomes: Sequence[Outcome]) -> None:
    """Replaces the file, with tasks in alphabetical order."""
    ordered = sorted(outcomes, key=lambda outcome: (outcome.task, outcome.recipe, outcome.seed))
    entries = [{name: getattr(outcome, name) for name in Outcome.__slots__} for outcome in ordered]
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as target:
        target.write((json.dumps({"schema": SCHEMA, "outcomes": entries}, indent=1) + "\n").encode())


def measure_run(outcome: Outcome, run: Path) -> Outcome:
    """Brings an outcome up to date with the rows that its run has written.

    Only means of 100 episodes count as best return, for the threshold and for the curve.
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
    outcome.curve = curve[::-1][::stride][::-1]  # the last point stays
    return outcome


def _means_of_episodes(rows: Sequence[Mapping[str, Any]], stat: str) -> list[float | None]:
    """For every row the mean of a number of the task over the episodes that ended last; None before there were WINDOW.

    A row has one number for all of its episodes, so there may be some more of them in the mean.
    """
    means: list[float | None] = []
    newest: deque[tuple[float, float]] = deque()  # the number, and how many episodes ended
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
    """Complete rows of a metrics.csv, which may be in the middle of being written; nothing where there is no file."""
    if not file.is_file():
        return []
    text = file.read_text()
    complete = text[: text.rfind("\n") + 1]
    return [{k: float(v) if v else None for k, v in row.items()} for row in csv.DictReader(StringIO(complete))]


def hold_against(outcome: Outcome, threshold: float, stat: str = "") -> None:
    """Judges a training whose rows are gone by another threshold.

    What is left is the thinned curve, so the threshold is reached at its next point or at the end: late, never early.
    Of the task's own numbers only the last ones are left, which may be of few episodes: they reach no threshold, but
    one that was reached stays so.

    Args:
        outcome: Of the training.
        threshold: See `Outcome`.
        stat: As there.
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
    """Trains, or continues a training, until the threshold is reached or the time is over.

    The training is a process of its own, which is asked to stop and leaves a checkpoint: with more minutes the same
    training continues.

    Args:
        goal: See `Goal`; that of the seed.
        outcome: What is known, with the folder of the run if there is one.
        command: Starts train.py.
        environment: Variables of its process.
        runs: Folder of all runs.
        cpus: CPUs of the process; None for all.
        stop: Ends the training early, with a checkpoint, when it is set.
        say: Tells how it goes.

    Raises:
        ConfigError: The training or a command before it failed. The outcome has what it did before.
    """
    stop = stop or threading.Event()
    done = Path(outcome.run) if outcome.run else None
    if done is not None and (done / "checkpoints" / "last.pt").is_file():
        shown = [word for word in goal.overrides if ".demonstrations.file=" in word]  # a run does not save it
        settings = [f"checkpoint={done}", *shown, *_more_iterations(done)]
    else:
        done, began = None, time.monotonic()
        for words in goal.prepare:
            prepare(words, environment, stop)
            if stop.is_set():
                return outcome
        outcome.prepare_seconds = time.monotonic() - began if goal.prepare else 0.0
        settings = [f"task={goal.task}", f"recipe={outcome.recipe}", f"seed={outcome.seed}"]
        settings += [f"experiment=learn-{goal.task}", *goal.overrides]
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
    if done is not None:  # what was trained counts, however it ended
        outcome.run = str(done)
        measure_run(outcome, done)
        outcome.environment = _environment(done)
    if killed:
        raise ConfigError(
            f"training {goal.task} did not stop within {STOP_S:.0f} s and was killed; it continues from its last"
            f" checkpoint, see {log}"
        )
    if status not in (0, 128 + signal.SIGTERM, -signal.SIGTERM) or (done is None and not stop.is_set()):
        raise ConfigError(f"training {goal.task} failed: {last or status}; see {log}")
    say(describe(outcome))
    return outcome


def evaluate_in_full(task: str, recipe: str, run: Path) -> dict[str, float]:
    """Return the task's own numbers of a run's policy in the full task: one whole episode in each env, mean actions.

    Settings that the user typed stay, and so do those in PART_OF_THE_POLICY.

    Args:
        task: Name of the task's yaml.
        recipe: Recipe of the run.
        run: Run folder, or a checkpoint.
    """
    from gpusim_rl import train
    from gpusim_rl.settings.compose import compose

    ours, full = (compose([f"task={task}", f"recipe={name}"])["task"] for name in (recipe, "full"))
    changed = {key: value for key, value in full.items() if value != ours.get(key) and key not in PART_OF_THE_POLICY}
    quiet = {"console": "quiet"}
    result = train(task, checkpoint=str(run), recipe=recipe, test=True, task=changed, log=quiet)
    return {name.removeprefix("task/"): value for name, value in result.items() if name.startswith("task/")}


def prepare(words: str, environment: Mapping[str, str], stop: threading.Event) -> None:
    """Runs a command of Python that writes what a training reads, until it has ended or `stop` is set.

    Raises:
        ConfigError: It failed.
    """
    with Child([sys.executable, *words.split()], env=environment) as child:
        while child.running:
            if stop.wait(PREPARING_POLL_S):
                child.stop()
                return
        reason = child.how_it_ended()
        if child.process.returncode:
            raise ConfigError(f"python {words} failed: {reason}")


def _environment(run: Path) -> dict[str, Any]:
    """Machine and versions of a run, and of its earlier starts where they were others."""
    try:
        metadata = json.loads((run / "env.json").read_text())
    except (OSError, ValueError):  # a training that failed at its very start
        return {}
    kept = {name: metadata[name] for name in ("time", "versions", "cpu", "gpu", "sim") if name in metadata}

    def machine(start: Mapping[str, Any]) -> tuple[Any, ...]:
        return start.get("cpu"), start.get("gpu"), (start.get("git") or {}).get("sha")

    others = [start for start in metadata.get("earlier", []) if machine(start) != machine(metadata)]
    return {**kept, "earlier": others} if others else kept


def _more_iterations(run: Path) -> list[str]:
    """The setting without which a training that has done all its iterations would not go on."""
    rows, settings = read_rows(run / "metrics.csv"), yaml.safe_load((run / "config.yaml").read_text()) or {}
    done = int(rows[-1].get("iteration") or 0) if rows else 0
    return [f"max_iterations={2 * done}"] if done and done >= settings.get("max_iterations", math.inf) else []


def _new_run(folder: Path, seed: int, started: float) -> Path | None:
    """The run folder that a training has made since it was started."""
    for path in sorted(folder.glob("*/config.yaml"), key=lambda file: file.stat().st_mtime, reverse=True):
        if path.parent.is_symlink() or path.stat().st_mtime < started - 1.0:
            continue
        if (yaml.safe_load(path.read_text()) or {}).get("seed") == seed:
            return path.parent
    return None


@torch.no_grad()
def random_return(env: VecEnv, seed: int = 0) -> float:
    """Mean return of one whole episode in every env under uniformly random actions.

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


def amount(value: float, stat: str) -> str:
    """A return, or a number of the task with its name, as a threshold is one of the two."""
    return f"`{stat}` {value:.2g}" if stat else f"{value:,.0f}"


def describe(outcome: Outcome) -> str:
    """One line."""
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
    """Markdown: one row per task and recipe, medians of several seeds, and what must be known to read them."""
    lines = [
        "| task | recipe | success | in the full task | goal | seeds that reach it | env steps | time | return |"
        " algorithm, settings | published |",
        "|---|---|---|---|---:|---|---:|---:|---:|---|---|",
    ]
    for task, recipe in sorted({(outcome.task, outcome.recipe) for outcome in outcomes}):
        seeds = [outcome for outcome in outcomes if (outcome.task, outcome.recipe) == (task, recipe)]
        reached = sum(outcome.reached for outcome in seeds)
        fewest = min((o.episodes for o in seeds if o.episodes is not None), default=WINDOW)
        few = f" ({fewest:.0f} episodes)" if 0 < fewest < WINDOW else " (few episodes)" if fewest < WINDOW else ""
        final = [o.final_return for o in seeds if o.final_return is not None]
        goal = goals.get(task)
        cells = [
            f"`{task}`",
            recipe,
            _success([o.stats for o in seeds], goal),
            _success([o.in_full for o in seeds if o.in_full], goal) if recipe != "full" else "",
            amount(seeds[0].threshold, seeds[0].stat),
            f"{reached} of {len(seeds)}" + ("" if _learned(seeds) else ", not above random"),
            _spread(_until(seeds, "env_steps"), lambda steps: f"{steps / 1e6:.1f} M"),
            _spread(_until(seeds, "seconds"), duration),
            f"{_spread(final, lambda value: f'{value:,.0f}')}{few}" if final else "–",
            " ".join([f"`{algorithm(seeds[0])}`", *(f"`{word}`" for word in _settings(seeds[0]))]),
            goal.compare if goal else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, "", *_notes(outcomes), *_prepared(outcomes, goals)] if outcomes else lines


def _prepared(outcomes: Sequence[Outcome], goals: Mapping[str, Goal]) -> list[str]:
    """Which trainings need commands before them, as they are in learn.yaml now."""
    tasks = [
        f"`{task}`"
        for task, goal in goals.items()
        if goal.prepare and any(o.task == task and tuple(o.overrides) == goal.overrides for o in outcomes)
    ]
    where = "by the commands in [learn.yaml](../benchmarks/learn/learn.yaml); `time` includes them."
    return [f"Demonstrations of {' and '.join(tasks)} are made {where}"] if tasks else []


def algorithm(outcome: Outcome) -> str:
    """Name of the algorithm that trained it: `ppo`, unless its settings say otherwise."""
    named = [word.removeprefix("algo=") for word in outcome.overrides if word.startswith("algo=")]
    return named[-1] if named else "ppo"


def _settings(outcome: Outcome) -> list[str]:
    return [word for word in outcome.overrides if not word.startswith("algo=")]


def _until(seeds: Sequence[Outcome], name: str) -> list[float]:
    """What each seed has spent until the goal; of all of them until their end, where less than half reached it."""
    before = [seed.prepare_seconds if name == "seconds" else 0.0 for seed in seeds]
    spent = [getattr(seed, f"{name}_to_threshold") for seed in seeds]
    if median_time(spent) is None:
        spent = [getattr(seed, name) for seed in seeds]
    return [value + more for value, more in zip(spent, before, strict=True) if value is not None]


def _spread(values: Sequence[float], show: Callable[[float], str]) -> str:
    """The median, and the least and the most of several."""
    least, most = show(min(values)), show(max(values))
    return show(statistics.median(values)) + (f" ({least} to {most})" if least != most else "")


def _success(seeds: Sequence[Mapping[str, float]], goal: Goal | None) -> str:
    """The numbers of the task that tell success, medians; a dash where it has some and none is known."""
    shown = goal.success if goal else {}
    known = {name: [stats[name] for stats in seeds if name in stats] for name in shown}
    values = {name: _median(found) for name, found in known.items() if found}
    return ", ".join(shown[name].format(value) for name, value in values.items()) or ("–" if shown else "")


def _learned(seeds: Sequence[Outcome]) -> bool:
    """Whether the end is above random actions, as far as that is known; a threshold that was reached is enough."""
    pairs = [(o.final_return, o.random_return) for o in seeds]
    known = [(final, random) for final, random in pairs if final is not None and random is not None]
    return not known or any(o.reached for o in seeds) or any(final > random for final, random in known)


def _notes(outcomes: Sequence[Outcome]) -> list[str]:
    """What the numbers of the table are."""
    counts = Counter((outcome.task, outcome.recipe) for outcome in outcomes)
    fewest, most = min(counts.values()), max(counts.values())
    seeds = f"{most} seed{'' if most == 1 else 's'}" if fewest == most else f"{fewest} to {most} seeds"
    medians = "" if most == 1 else ": medians, and the least and the most of them"
    return [
        f"{seeds} of each task{medians}. A row's command is `python train.py task=<task> recipe=<recipe> seed=<seed>"
        " algo=<algorithm>` with its settings. Returns of different [recipes](tasks.md#recipes) do not compare."
        " `success`: the task's own numbers at the end of training, with exploration. `in the full task`: the same for"
        f" mean actions in the `full` task. A goal is reached when the mean over {WINDOW} episodes reaches it; env"
        " steps and time count until then, or until the time limit.",
    ]


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def front_page(results: Mapping[str, Mapping[str, Learned]]) -> list[str]:
    """Markdown table of recorded trainings.

    Columns: task (recipe, where it is not full; `*`: with other settings), aim, result and algorithm where not PPO.
    """
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
    """Return the result of each task and recipe in tasks.json, over its seeds."""
    seeds: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for outcome in json.loads(file.read_text(encoding="utf-8"))["outcomes"]:
        seeds.setdefault(outcome["task"], {}).setdefault(outcome["recipe"], []).append(outcome)
    return {
        task: {recipe: _of_task(outcomes) for recipe, outcomes in rows.items()} for task, rows in sorted(seeds.items())
    }


def _of_task(seeds: Sequence[dict[str, Any]]) -> Learned:
    """Returns the words for all seeds of a task."""
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
    """Puts a table between the marks `<!-- learn -->` and `<!-- /learn -->` of a text; without marks it stays."""
    head, begin, rest = text.partition(f"<!-- {mark} -->\n")
    _, end, tail = rest.partition(f"<!-- /{mark} -->")
    return text if not end else "".join([head, begin, *(f"{line}\n" for line in lines), end, tail])


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
