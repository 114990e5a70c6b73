"""HTML report of runs: learning results, speed, and commands to repeat the runs."""

from __future__ import annotations

import math
import re
import shlex
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from gpusim_rl.errors import ConfigError, first_line
from gpusim_rl.files.paths import SAFE
from gpusim_rl.files.safe_open import load_yaml, open_file
from gpusim_rl.learned import Learned, duration, median_time
from gpusim_rl.public import __version__
from gpusim_rl.run.console import number
from gpusim_rl.run.logger import command
from gpusim_rl.run.run_dir import chosen_task
from gpusim_rl.settings.discover import recipes, tasks
from gpusim_rl.settings.overrides import key_of
from gpusim_rl.settings.saved_run import check_record, repeating_words
from gpusim_rl.view.charts import MOST, chart, short
from gpusim_rl.view.curves import FREE, SavedCurves, count, flat, grouped, in_words, titles

WINDOW = 100  # episodes in a mean
STILL_TRAINS_S = 60.0  # age of the last row below which an unfinished run counts as training
TAIL = 1 << 16  # bytes read from the end of train.log
LARGE, MEDIUM, SMALL = (640, 320), (640, 200), (320, 170)  # charts [px]
LEARNING = ("value/explained_variance", "loss/", "policy/", "value/q", "replay/transitions", "eval/")
NOT_SHOWN = ("policy/skipped_minibatches", "policy/lag_", "policy/dropped", "eval/iteration", "eval/return_std")
ENTERED_ONCE = ("seed", "experiment", "log.dir", "log.console", "checkpoint", "test", "trust", "headless")
PHASE_WORDS = {"rollout": "simulation and policy", "actors": "waiting for actors", "log": "logging"}


@dataclass(frozen=True)
class Ending:
    """End of a run: `complete`, `training`, `stopped` or `failed`, with a description."""

    kind: str
    words: str


@dataclass
class Group:
    """Runs that differ only in their seed."""

    title: str
    colour: int
    runs: Sequence[SavedCurves]
    endings: Sequence[Ending]
    # the following describe the best run
    env_steps_per_s: float | None = None
    shares: Mapping[str, float] = field(default_factory=dict)  # of the time, by phase
    limits: Sequence[str] = ()  # bottlenecks in sentences, most costly first
    caption: str = ""  # of the replay, or the reason for its absence
    replay: str = ""  # HTML page with a 3D replay
    failure: tuple[str, str] = "", ""  # page and caption of the worst fall that `gpusim-rl stress` found
    picture: str = ""  # replay as an animated WebP, a `data:` URL

    @property
    def best(self) -> SavedCurves:
        """Run with the highest final return."""
        return max(self.runs, key=lambda run: (last(run, "episode/return") is not None, last(run, "episode/return")))


def group_runs(runs: Sequence[SavedCurves]) -> list[list[Group]]:
    """Group runs by task, then by settings other than the seed."""
    by_task: dict[str, list[Group]] = {}
    groups = grouped(runs)
    for title, group in zip(titles([group[0].settings for group in groups]), groups, strict=True):
        same_task = by_task.setdefault(str(group[0].settings["task._target_"]), [])
        same_task.append(Group(title, len(same_task), group, [ending(run) for run in group]))
    return list(by_task.values())


def page(groups: Sequence[Sequence[Group]], config_dir: str | None = None, exports: Sequence[Any] = ()) -> str:
    """Render the self-contained page; `config_dir` has the user's tasks (`-cd`), `exports` is for export.html."""
    folder = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=folder, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    sections, written = [_task(task, config_dir) for task in groups], time.strftime("%Y-%m-%d %H:%M")
    names = ", ".join(dict.fromkeys(section["name"] for section in (*sections, *exports)))
    template = environment.get_template("report.html")
    return template.render(names=names, tasks=sections, exports=exports, written=written, version=__version__)


def last(run: SavedCurves, key: str) -> float | None:
    """Return a column's last value, or its last running mean for a `task/` statistic; None if empty."""
    means = recent_means(run, key) if key.startswith("task/") else np.zeros(0)
    known = means[np.isfinite(means)]
    known = known if len(known) else run.curve(key, "iteration").y
    return float(known[-1]) if len(known) else None


def recent_means(run: SavedCurves, key: str) -> np.ndarray:
    """Return a column's running means over at least WINDOW episodes; NaN until that many have ended."""
    value = run.column(key)
    ended = np.where(np.isfinite(value), np.nan_to_num(run.column("episode/ended")), 0.0)
    episodes, total = np.cumsum(ended), np.cumsum(np.nan_to_num(value) * ended)
    first = np.searchsorted(episodes, episodes - WINDOW, side="right") - 1  # the last row that is left out
    before = [np.where(first >= 0, sums[np.maximum(first, 0)], 0.0) for sums in (total, episodes)]
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(episodes >= WINDOW, (total - before[0]) / (episodes - before[1]), np.nan)


def seconds_to(run: SavedCurves, goal: Learned) -> float | None:
    """Return the time [s] at which a mean of WINDOW episodes first reached a threshold; None if never."""
    whole = np.where(run.column("episode/count") >= WINDOW, run.column(goal.column), np.nan)
    judged = recent_means(run, goal.column) if goal.stat else whole
    elapsed = run.column("time/elapsed_s")[judged >= goal.threshold]
    return float(elapsed[0]) if len(elapsed) and np.isfinite(elapsed[0]) else None


def ending(run: SavedCurves) -> Ending:
    """Infer how a run ended from its settings, last row and train.log."""
    iterations, limit = run.columns["iteration"], run.config.get("max_iterations")
    done = int(iterations[-1]) if len(iterations) else 0
    of = f"iteration {done:,}" + (f" of {limit:,}" if isinstance(limit, int) else "")
    if isinstance(limit, int) and done >= limit:
        return Ending("complete", f"complete: {of}")
    text = ""
    with suppress(OSError, ConfigError), open_file(run.run.train_log) as file:
        file.seek(max(0, file.seek(0, 2) - TAIL))
        text = file.read(TAIL).decode(errors="replace")
    matches = re.findall(r"^(?:\S+ \S+  )?((?:iteration \d|ended by |next:$).*)", text, re.MULTILINE)
    final = matches[-1] if matches else ""
    if final.startswith("ended by"):
        return Ending("failed", f"{final[:200]}, after {of}")
    if final == "next:":
        return Ending("stopped", f"stopped at {of}")
    with suppress(OSError):
        if time.time() - run.run.metrics_csv.stat().st_mtime < STILL_TRAINS_S:
            return Ending("training", f"still training: {of}")
    return Ending("failed", f"ended without a message at {of}: killed, or the machine went down")


def _task(groups: Sequence[Group], config_dir: str | None) -> dict[str, Any]:
    runs = [run for group in groups for run in group.runs]
    target, goal = str(runs[0].settings["task._target_"]), runs[0].goal
    columns = list(dict.fromkeys(key for run in runs for key in run.columns))
    stats = [key for key in columns if key.startswith("task/")]

    def curve_chart(key: str, size: tuple[int, int], x_column: str = "env_steps") -> str:
        ends = {it.colour: zip(it.runs, it.endings, strict=True) for it in groups}
        curves = {colour: [run.curve(key, x_column, end.kind) for run, end in runs] for colour, runs in ends.items()}
        threshold, by_time = goal.threshold if goal and goal.column == key else None, x_column.startswith("time/")
        label = f"{key} over {'time' if by_time else 'env steps'}"
        return chart(curves, label=label, size=size, time=by_time, threshold=threshold)

    def panels(keys: Sequence[str], size: tuple[int, int] = SMALL, above: str = "") -> list[dict[str, str]]:
        drawn = [(key, curve_chart(key, size)) for key in keys]
        shown = [(key, in_words(key.removeprefix(above)), svg) for key, svg in drawn if svg]
        return [{"title": words, "now": _spread(groups[0].runs, key), "svg": svg} for key, words, svg in shown]

    changed, unknown = _changed(groups, config_dir)
    entry = next((entry for entry in tasks(config_dir).values() if entry.target == target), None)
    return {
        "name": runs[0].task,
        "description": entry.description if entry else "",
        "groups": [_group(group, goal, stats, config_dir) for group in groups],
        "hero": curve_chart("episode/return", LARGE),
        "by_time": curve_chart("episode/return", LARGE, "time/elapsed_s"),
        "goal": goal,
        "own": [row["key"] for row in changed if row["key"].startswith("task.")][:3],
        "stats": panels(["episode/length", *stats]),
        "rewards": panels([key for key in columns if key.startswith("reward/")], above="reward/"),
        "learning": panels([k for k in columns if k.startswith(LEARNING) and not k.startswith(NOT_SHOWN)]),
        "speed": panels(["speed/env_steps_per_s"], MEDIUM),
        "changed": changed,
        "unknown_defaults": unknown,
        "stride": math.ceil(max(len(run.columns["iteration"]) for run in runs) / MOST),
        "runs": [_run(group, run, end) for group in groups for run, end in zip(group.runs, group.endings, strict=True)],
    }


def _group(group: Group, goal: Learned | None, stats: Sequence[str], config_dir: str | None) -> dict[str, Any]:
    runs = group.runs
    best = [curve.y.max() for run in runs if len((curve := run.curve("episode/best_return", "iteration")).y)]
    mean = _spread(runs, "episode/return")
    few = "no episode yet" if mean == "–" else "over fewer than 100 episodes"
    tiles = [("return", mean, f"best {number(max(best))}" if best else few)]
    verdict = ""
    if goal is not None:
        times = [seconds_to(run, goal) for run in runs]
        median, several = median_time(times), len(runs) > 1
        verdict, of = ("bad", "not reached") if median is None else ("good", "reached")
        of = f"{sum(s is not None for s in times)} of {len(runs)} seeds" if several else of
        when = "" if median is None else f"{', median' if several else ' after'} {duration(median)}"
        tiles.append((f"threshold {number(goal.threshold)}", of, f"{in_words(goal.stat or 'return')}{when}"))
    tiles += [(in_words(key), value, "last 100 episodes") for key in stats if (value := _spread(runs, key)) != "–"]
    tiles.append(("episode length", _spread(runs, "episode/length"), "control steps"))
    steps, took = ([v for run in runs if (v := last(run, key)) is not None] for key in ("env_steps", "time/elapsed_s"))
    if steps and took:
        done = short(statistics.median(steps), 3)
        tiles.append(("trained for", duration(statistics.median(took)), f"{done} env steps"))
    if speed := group.env_steps_per_s:
        tiles.append(("speed", f"{speed:,.0f}", f"env steps/s, {runs[0].config.get('num_envs')} envs"))
    recipe = runs[0].config.get("recipe")
    if recipe and len(recipes(_task_name(runs[0]), config_dir)) > 1:
        tiles.append(("recipe", str(recipe), "named variant of the task"))
    lines, reasons = commands(runs, config_dir)
    ends = zip(runs, group.endings, strict=True)
    return {
        **vars(group),
        "count": count(runs),
        "tiles": tiles,
        "verdict": verdict,
        "endings": [(end.kind, f"seed {run.seed} {end.words}") for run, end in ends if end.kind != "complete"],
        "shares": [(PHASE_WORDS.get(phase, phase), share) for phase, share in group.shares.items() if share >= 0.005],
        "commands": lines,
        "no_commands": reasons,
    }


def _run(group: Group, run: SavedCurves, end: Ending) -> dict[str, Any]:
    environment: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        environment = run.run.environment
    git, sim, versions = (_section(environment, name) for name in ("git", "sim", "versions"))
    devices = _section(environment, "gpu").get("devices")
    gpus = [device.get("name") for device in (devices if isinstance(devices, list) else []) if isinstance(device, dict)]
    machine = dict.fromkeys([_section(environment, "cpu").get("model"), *map(str, gpus)])
    return {
        "colour": group.colour,
        "folder": str(run.run),
        "seed": run.seed,
        **vars(end),
        "return": number(last(run, "episode/return")),
        "steps": number(last(run, "env_steps")),
        "time": duration(last(run, "time/elapsed_s") or 0.0),
        "sim": " on ".join(str(sim[key]) for key in ("name", "device") if sim.get(key)),
        "commit": str(git.get("sha", "–"))[:10] + (" + changes" if git.get("dirty") else ""),
        "machine": ", ".join(str(part) for part in machine if part),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "started": str(environment.get("time", ""))[:16].replace("T", " "),
    }


def commands(runs: Sequence[SavedCurves], config_dir: str | None) -> tuple[list[str], list[str]]:
    """Return commands that repeat runs, with seeds merged, and reasons for missing commands."""
    seeds: dict[str, list[str]] = {}
    reasons = []
    for run in runs:
        try:
            words = repeating_words(load_yaml(run.run.overrides_yaml), run.config, run.run.config_yaml, config_dir)
        except ConfigError as error:
            reasons.append(f"No command for {run.run}: {first_line(error)}")
            continue
        line = shlex.join(word for word in words if key_of(word) not in ENTERED_ONCE)
        seeds.setdefault(f"{command('train')} {line}".strip(), []).append(str(run.seed))
    lines = [f"{line}{' -m' * (len(known) > 1)} seed={','.join(dict.fromkeys(known))}" for line, known in seeds.items()]
    return lines, reasons


def _changed(groups: Sequence[Group], config_dir: str | None) -> tuple[list[dict[str, Any]], str]:
    """Return table rows of non-default settings, and the reason if the defaults are unknown."""
    from gpusim_rl.settings.compose import compose

    runs = [group.runs[0] for group in groups]
    try:
        learner = str(_section(runs[0].run.environment, "learner").get("device"))
        task = _task_name(runs[0])
        if task not in tasks(config_dir, outside=True):
            raise ConfigError(f"no yaml found for task {task}")
        device, recipe = "cuda" if learner.startswith("cuda") else "cpu", runs[0].config.get("recipe") or "auto"
        words = [f"task={task}", f"algo={runs[0].config['algo']['name']}", f"device={device}", f"recipe={recipe}"]
        if not all(SAFE.fullmatch(word) for word in words):
            raise ConfigError("unsafe task, algorithm or recipe name")
        defaults = dict(flat(compose(words, config_dir)))
    except (ConfigError, OSError, ValueError) as error:
        return [], first_line(error)
    defaults["device"] = "auto"
    unused = {key.partition(".")[0] for key in defaults} - {key.partition(".")[0] for key in runs[0].settings}
    hidden, configs = tuple({*FREE} - {"max_iterations"}), [dict(flat(run.config)) for run in runs]
    rows = []
    for key in dict.fromkeys([*(key for run in runs for key in run.settings), "max_iterations"]):
        values = [config.get(key, "–") for config in configs]
        if key.startswith(hidden) or key.partition(".")[0] in unused or re.fullmatch(r"\w+\._target_", key):
            continue
        if any(value != defaults.get(key, "–") for value in values):
            shown = values[:1] if all(value == values[0] for value in values) else values
            rows.append({"key": key, "default": defaults.get(key, "–"), "values": shown})
    return rows, ""


def _spread(runs: Sequence[SavedCurves], key: str) -> str:
    """Format mean and standard deviation of a column's last value over the runs."""
    values = [value for run in runs if (value := last(run, key)) is not None]
    if not values:
        return "–"
    deviation = statistics.pstdev(values) if len(values) > 1 else 0.0
    spread = f" ± {deviation:,.0f}" if deviation >= 100 else f" ± {deviation:.2g}" if len(values) > 1 else ""
    return f"{number(statistics.fmean(values))}{spread}"


def _task_name(run: SavedCurves) -> str:
    """Return the name of the task's yaml, or of its class if overrides.yaml does not name it."""
    with suppress(ConfigError):
        words = load_yaml(run.run.overrides_yaml)
        check_record(words, run.run.overrides_yaml)
        return chosen_task(words) or run.task
    return run.task


def _section(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a section of an untrusted env.json; empty if missing."""
    section = values.get(name)
    return section if isinstance(section, dict) else {}
