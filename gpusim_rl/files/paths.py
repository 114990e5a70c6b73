"""Paths of runs, and of shipped files in a checkout, an editable install or a wheel."""

from __future__ import annotations

import glob
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpusim_rl.errors import ConfigError, did_you_mean, say
from gpusim_rl.files.safe_open import refuse_link, refuse_links

SAFE = re.compile(r"[A-Za-z0-9._/=+~,@:%-]+")  # words that tab completion offers: a folder may be named `$(command)`
PACKAGE = Path(__file__).resolve().parents[1]
_EXPECTED = "expected a run folder, a .pt file or a trained task"


def checkout() -> Path | None:
    """Return the root of the source checkout; None if installed from a wheel."""
    root = PACKAGE.parent
    return root if (root / "pyproject.toml").is_file() and (root / "tasks").is_dir() else None


def cfg_dir() -> Path:
    """Return the folder of config.yaml and the config groups."""
    return _shipped("cfg")


def tasks_dir() -> Path:
    """Return the folder of tasks, imported as `gpusim_rl.tasks.<file>`."""
    return _shipped("tasks")


def assets_dir() -> Path:
    """Return the folder of our tasks' MJCF files."""
    return tasks_dir() / "assets"


def from_home(name: str) -> Path:
    """Return a path with `~` expanded; ConfigError for an unknown user."""
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise ConfigError(str(error).rstrip("."), key=name, hint="Try an absolute path") from None


def robot_file(name: str) -> str | Path:
    """Resolve a robot setting for `Scene.add`: name in `assets_dir`, .xml or .urdf path, or `menagerie:<robot>`."""
    if name.startswith("menagerie:"):
        return name
    if name.endswith((".xml", ".urdf")):
        return from_home(name)
    file = assets_dir() / f"{name}.xml"
    if not file.is_file():
        hint = did_you_mean(name, [path.stem for path in assets_dir().glob("*.xml")])
        hint += " For other robots, try path/to/robot.xml or menagerie:unitree_go1"
        raise ConfigError(f"no robot {name!r} in tasks/assets", hint=hint)
    return file


ROS_PACKAGES: dict[str, Path] = {}  # folders given by `--packages`, for all robots of the process


def tools_dir() -> Path:
    """Return the folder of the tools; tool `x.py` runs as `gpusim-rl x`."""
    return _shipped("tools")


def demos_dir() -> Path:
    """Return the folder of demo runs, one per task."""
    return PACKAGE / "demos"


def learning_file() -> Path:
    """Return the file of each task's best result, written by `benchmarks/bench.py learn`."""
    return _shipped("benchmarks") / "learn" / "best.json"


def train_file() -> Path:
    """Return the training script; a wheel keeps it with the tools, because `gpusim_rl.train` is a function."""
    return (checkout() or tools_dir()) / "train.py"


def _shipped(name: str) -> Path:
    return (checkout() or PACKAGE) / name


@dataclass(frozen=True)
class Checkpoint:
    """Checkpoint file and its run folder (None for a copied file)."""

    file: Path
    run_dir: Path | None

    @property
    def continues(self) -> bool:
        """True if training resumes in the run folder; other files start a new run folder."""
        return self.run_dir is not None and self.file.name == "last.pt"


def find_checkpoint(name: str, runs: str | Path = "runs") -> Checkpoint:
    """Find a checkpoint by run folder, .pt file, or task (its latest run with a checkpoint) in `runs` (`log.dir`).

    Example names are `runs/Ant/2026-01-31_12-00-00`, `runs/Ant/latest`, `some/file.pt` or `Ant`. Raises ConfigError if
    there is no checkpoint, or the run folder contains links.
    """
    path = _resolve(name, runs, ("checkpoints/*.pt",))
    if path.is_dir():
        if not (path / "checkpoints" / "last.pt").is_file():
            raise _without_last(path)
        refuse_links(path)
        return Checkpoint(path / "checkpoints" / "last.pt", path)
    if not path.is_file():
        raise ConfigError(f"no checkpoint {name!r}: {_EXPECTED}", hint=_nearest(name, path, runs))
    run_dir = path.parent.parent
    if path.parent.name != "checkpoints" or not (run_dir / "config.yaml").is_file():
        return Checkpoint(path, None)
    refuse_links(run_dir)
    return Checkpoint(path, run_dir)


def find_run(name: str, runs: str | Path = "runs") -> Path:
    """Find a run folder (see `find_checkpoint`); a task means its latest run with metrics or a checkpoint."""
    path = _resolve(name, runs, ("metrics.csv", "checkpoints/*.pt"))
    folder = path.parent.parent if path.is_file() else path
    if (folder / "config.yaml").is_file():
        refuse_links(folder)
        return folder
    if not path.exists():
        problem = f"no run {name!r}: expected a run folder or a trained task"
        raise ConfigError(problem, hint=_nearest(name, path, runs))
    raise ConfigError(f"{folder} is not a run folder: expected config.yaml, found {_contents(folder)}")


def newest_first(checkpoints: Iterable[Path]) -> list[Path]:
    """Sort a run's checkpoints, newest first, by name (copying changes file times); best.pt comes last."""
    ranks = {"last": sys.maxsize, "best": -1}

    def rank(file: Path) -> int:
        return ranks.get(file.stem, int(re.sub("[^0-9]", "", file.stem)[:18] or 0))

    return sorted(checkpoints, key=rank, reverse=True)


def _without_last(run: Path) -> ConfigError:
    if checkpoints := [file for file in (run / "checkpoints").glob("*.pt") if file.is_file()]:
        newest = newest_first(checkpoints)[0]
        hint = f"The newest checkpoint in the folder is {newest.name}: try {shlex.quote(f'checkpoint={newest}')}"
        hint += " (for a tool, pass only the path; training from this file starts a new run folder)"
        return ConfigError(f"checkpoints/last.pt is missing from {run}", hint=hint)
    ended = " (the run ended before saving one, or has just started)" if (run / "config.yaml").is_file() else ""
    return ConfigError(f"no checkpoint in {run}{ended}: expected checkpoints/last.pt, found {_contents(run)}")


def _resolve(name: str, runs: str | Path, patterns: Sequence[str]) -> Path:
    """Resolve a typed path, existing or not; a task or experiment means its latest run with a match for `patterns`."""
    try:
        path = Path(name).expanduser()
        if not path.exists() and (Path(runs) / name).is_dir():
            path = Path(runs) / name
    except (OSError, RuntimeError, ValueError) as error:  # too long; no such user; a null byte
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"no run {name!r}: {reason}; {_EXPECTED}") from None
    if (path / "latest").is_dir() and not (path / "config.yaml").exists():  # a run folder has no `latest`
        path = _latest(path, Path(runs), patterns)
    if path.parent.name == "checkpoints" and path.exists():  # on the path as typed: `resolve` follows links
        refuse_link(path.parent)
        refuse_link(path)
    if path.name == "checkpoints" and path.is_dir():
        path = path.parent
    return from_here(path.resolve())  # the same run even if `latest` changes


def _latest(group: Path, base: Path, patterns: Sequence[str]) -> Path:
    """Return the newest run of a task or experiment that has a file matching `patterns`; `latest` if there is none."""
    latest, folder = (group / "latest").resolve(), group.resolve()
    in_experiment = folder.parent == base.resolve() == latest.parent.parent  # a task's run in an experiment's folder
    if latest.parent != folder and not in_experiment:
        problem = f"{group}/latest points to {latest}, outside the folder"
        raise ConfigError(problem, hint="Try the path of a run folder instead")

    def trained(run: Path) -> bool:
        return any(file.is_file() for pattern in patterns for file in run.glob(pattern))

    runs = [] if trained(latest) else [run for run in folder.iterdir() if not run.is_symlink() and trained(run)]
    if not runs:
        return latest
    newest = max(runs, key=lambda run: [int(digits) for digits in re.findall(r"\d+", run.name)])  # names are times
    say(f"{from_here(latest)} has no {' or '.join(patterns)}: using {from_here(newest)}", file=sys.stderr)
    return newest


def run_names(runs: str | Path = "runs") -> list[str]:
    """Return names of tasks and experiments that have a run."""
    return sorted({path.parent.parent.name for path in Path(runs).glob("*/*/config.yaml")})


def complete_run(typed: str, runs: str | Path = "runs") -> list[str]:
    """Return completions of a typed run name: tasks and experiments, else folders and .pt files."""
    # Names that a shell would execute are not offered.
    names = [name for name in run_names(runs) if name.startswith(typed) and SAFE.fullmatch(name)]
    files = [f"{path}/" if Path(path).is_dir() else path for path in sorted(glob.glob(f"{glob.escape(typed)}*"))]
    return names or [path for path in files if path.endswith(("/", ".pt")) and SAFE.fullmatch(path)]


def _nearest(name: str, path: Path, runs: str | Path) -> str:
    """Return a hint that lists the runs in the nearest existing folder and suggests a similar name."""
    nearest = Path(runs) if "/" not in name else next(parent for parent in path.parents if parent.is_dir())
    contents = _contents(nearest, _leads_to_run) if nearest.is_dir() else "no run yet"
    hint = did_you_mean(name, run_names(runs))
    return f"Found in {nearest}: {contents}{hint and '.'}{hint}"


def _leads_to_run(entry: Path) -> bool:
    """Return whether a folder's entry is a checkpoint or run, or contains runs."""
    patterns = ("config.yaml", "*/config.yaml", "*/*/config.yaml")
    return entry.suffix == ".pt" or any(next(entry.glob(pattern), None) for pattern in patterns)


def from_here(path: Path) -> Path:
    """Return `path` relative to the current directory if it lies inside that directory, else unchanged."""
    current = Path.cwd()
    return path.relative_to(current) if current in path.parents else path


def _contents(folder: Path, counts: Callable[[Path], bool] | None = None, limit: int = 6) -> str:
    """Return the names of up to `limit` entries of a folder that `counts` accepts, newest first."""
    entries = sorted(folder.iterdir(), key=lambda entry: entry.lstat().st_mtime, reverse=True)
    names = [entry.name for entry in entries if entry.name[0] != "." and (counts is None or counts(entry))]
    return (", ".join(names[:limit]) + (", …" if len(names) > limit else "")) or ("no run" if counts else "nothing")
