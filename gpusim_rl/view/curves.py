"""Learning curves of runs; runs that differ only in their seed share a line with mean and spread."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gpusim_rl.errors import ConfigError, say, warn
from gpusim_rl.files.paths import find_run
from gpusim_rl.files.safe_open import refuse_links
from gpusim_rl.learned import Learned, learned
from gpusim_rl.run.run_dir import RunDir
from gpusim_rl.run.writers import read_csv
from gpusim_rl.settings.overrides import key_of, value_of
from gpusim_rl.settings.schema import ALGORITHMS

# Settings that may differ between runs of one line: names, and settings that do not affect the expected result.
FREE = ("seed", "experiment", "checkpoint", "test", "headless", "log", "wandb_", "debug", "max_iterations")
POINTS = 400  # points of a mean curve
WORDS = {
    "episode/return": "return, mean of the last 100 episodes",
    "episode/trimmed_return": "return, mean of the middle 90 of 100 episodes",
    "episode/best_return": "best return, mean of the middle 90 of 100 episodes",
    "episode/length": "episode length [control steps]",
    "policy/kl": "policy KL per update [nat]",
    "policy/entropy": "policy entropy [nat]",
    "policy/std": "standard deviation of actions",
    "task/lin_vel_error": "linear velocity error [m/s]",
    "task/ang_vel_error": "yaw rate error [rad/s]",
}
GROUPS = {"reward": "{}, reward per step", "loss": "{} loss", "eval": "{} in evaluations", "time": "{}, share of time"}
UNITS = {"_gb": "GB", "_percent": "%", "_per_s": "1/s", "_s": "s"}  # by suffix of the column
HUGE = 1e100  # too large to draw


@dataclass(frozen=True)
class Curve:
    """One column of metrics over another, without rows where either is empty."""

    x: np.ndarray
    y: np.ndarray
    end: str = "complete"  # how the run ended: complete, training, stopped or failed


@dataclass(frozen=True)
class SavedCurves:
    """Settings and metrics columns of a run folder."""

    run: RunDir
    config: dict[str, Any]
    settings: dict[str, Any]  # by full key, without FREE
    columns: dict[str, np.ndarray]  # NaN for an empty cell

    @property
    def seed(self) -> int:
        """Seed of the run."""
        return self.config["seed"]

    @property
    def task(self) -> str:
        """Name of the task's class."""
        return str(self.settings["task._target_"]).rpartition(".")[2]

    @property
    def goal(self) -> Learned | None:
        """Benchmark threshold of this task; None for third-party or modified tasks."""
        ours = str(self.settings["task._target_"]).startswith("gpusim_rl.tasks.")
        goals = learned().get(self.task, {}) if ours else {}
        goal = goals.get(self.config.get("recipe") or next(iter(goals), ""))
        own = [text for text in goal.overrides if text.startswith("task.")] if goal else []
        return goal if all(str(self.settings.get(key_of(text))) == value_of(text) for text in own) else None

    def column(self, key: str) -> np.ndarray:
        """Return a column; all NaN if missing."""
        return self.columns.get(key, np.full(len(self.columns["iteration"]), np.nan))

    def curve(self, key: str, x_column: str, end: str = "complete") -> Curve:
        """Return a column as a function of `x_column`; empty if either is missing."""
        x, y = self.column(x_column), self.column(key)
        known = (x >= 0) & (x < HUGE) & (np.abs(y) < HUGE)
        return Curve(x[known], y[known], end)


def run_folders(names: Sequence[str]) -> list[Path]:
    """Return unique run folders, skipping other matches of patterns such as `runs/Ant/*`."""
    folders: dict[Path, Path] = {}
    for name in names:
        path = Path(name)
        if not (path / "metrics.csv").is_file():
            if len(names) > 1 and path.exists():
                say(f"skipped {path}: no metrics.csv", file=sys.stderr)
                continue
            path = find_run(name)
        refuse_links(path.resolve())
        folders.setdefault(path.resolve(), path)
    if not folders:
        raise ConfigError(f"no run folder with metrics.csv among {', '.join(names)}")
    return list(folders.values())


def read_run(folder: Path) -> SavedCurves:
    """Read an untrusted run folder, up to the first damaged line of metrics.csv; raise ConfigError if invalid."""
    run = RunDir(folder)
    if not run.metrics_csv.is_file():
        raise ConfigError("no metrics.csv: it was deleted, or the first iteration is still running", key=str(folder))
    content = read_csv(run.metrics_csv)
    if "iteration" not in content.columns:
        raise ConfigError("no column 'iteration': not the metrics of a run", key=str(run.metrics_csv))
    if content.damaged:
        warn(f"{run.metrics_csv} is damaged at line {content.damaged}; the curve ends there")
    config = run.config
    try:
        target, algorithm, seed = config["task"]["_target_"], config["algo"]["name"], config["seed"]
    except (KeyError, TypeError):
        target = algorithm = seed = None
    if not (isinstance(target, str) and isinstance(algorithm, str) and isinstance(seed, int)):
        expected = "a seed, a `task` section and an `algo` section"
        raise ConfigError("not the settings of a run", key=str(run.config_yaml), expected=expected)
    unused = tuple(f"{name}." for name in ALGORITHMS if name != algorithm)  # tuned values of other algorithms
    settings = {name: value for name, value in flat(config) if not name.startswith((*FREE, *unused))}
    cells = array("d", (float(cell) if cell else np.nan for row in content.rows() for cell in row))
    table = np.array(cells).reshape(len(content), len(content.columns)).T
    return SavedCurves(run, config, settings, dict(zip(content.columns, table, strict=True)))


def flat(config: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Flatten settings to (full key, value) pairs."""
    pairs: list[tuple[str, Any]] = []
    for name, value in config.items():
        pairs += flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(f"{prefix}{name}", value)]
    return pairs


def grouped(runs: Iterable[SavedCurves]) -> list[list[SavedCurves]]:
    """Group runs by equal settings, in order of first appearance."""
    groups: dict[str, list[SavedCurves]] = {}
    for run in runs:
        groups.setdefault(repr(sorted(run.settings.items())), []).append(run)
    return list(groups.values())


def count(runs: Sequence[SavedCurves]) -> str:
    """Return a label such as "3 seeds" ("3 runs" if they share a seed); "" for one run."""
    seeds = len({run.seed for run in runs})
    return f"{seeds} seeds" if seeds > 1 else f"{len(runs)} runs" if len(runs) > 1 else ""


def titles(settings: Sequence[dict[str, Any]]) -> list[str]:
    """Return legend labels: task, algorithm if several, and settings that differ within the task."""
    tasks = [str(line["task._target_"]).rpartition(".")[2] for line in settings]
    lines = []
    for task, line in zip(tasks, settings, strict=True):
        same_task = [other for name, other in zip(tasks, settings, strict=True) if name == task]
        words = [task]
        if len({other.get("algo.name") for other in same_task}) > 1:
            words.append(str(line.get("algo.name")))
        for key, value in line.items():
            if not key.startswith("algo.") and any(key in other and other[key] != value for other in same_task):
                words.append(f"{key.removeprefix('task.')}={value}")
        lines.append(" ".join(words))
    return lines


def in_words(key: str) -> str:
    """Describe a column, with its unit if known."""
    group, _, name = key.rpartition("/")
    end = next((end for end in UNITS if name.endswith(end)), "")
    words = name.removesuffix(end).replace("_", " ")
    return WORDS.get(key) or (f"{words} [{UNITS[end]}]" if end else GROUPS.get(group, "{}").format(words))


def mean_and_std(curves: Sequence[Curve]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return x, mean and standard deviation up to the shortest run; empty if the runs' x ranges do not overlap."""
    if len(curves) == 1:
        return curves[0].x, curves[0].y, np.zeros_like(curves[0].y)
    ends = max(curve.x[0] for curve in curves), min(curve.x[-1] for curve in curves)
    x = np.linspace(*ends, POINTS if ends[0] < ends[1] else 1) if ends[0] <= ends[1] else np.zeros(0)
    values = np.stack([np.interp(x, curve.x, curve.y) for curve in curves])
    return x, values.mean(axis=0), values.std(axis=0)
