"""The folder of a run: holds all it takes to play, resume or repeat it, and is never overwritten.

`runs/<name>/<time>/` holds config.yaml, overrides.yaml, env.json, git.diff, metrics.csv, train.log
and checkpoints/; `runs/<name>/latest` is a link to the newest of them.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import yaml

from gpusim_rl import paths
from gpusim_rl.config import RunSpec
from gpusim_rl.errors import ConfigError
from gpusim_rl.provenance import describe_environment, git_state

OF_A_START = ("time", "command", "versions", "cpu", "gpu", "git")  # what env.json keeps of earlier starts


@dataclass(frozen=True)
class RunDir:
    """Folder of one run and the names in it."""

    path: Path

    @classmethod
    def create(
        cls,
        base: Path,
        name: str,
        task: str,
        *,
        config: Mapping[str, Any],
        overrides: Sequence[str],
    ) -> RunDir:
        """Make `<base>/<name>/<time>/` and write down what the run is made of.

        Args:
            base: Folder of all runs (`log.dir`).
            name: Folder of this run's group: `experiment`, by default the name of the task.
            task: Name of the task's yaml, else of its class. `<base>/<task>/latest` is this run, whatever `name` is.
            config: Composed config, plain values.
            overrides: The command line, as `train.py` reads it back for `checkpoint=<run>`.
        """
        for part in (name, task):
            if not re.fullmatch(r"[A-Za-z0-9._-]+", part) or part in (".", ".."):
                raise ConfigError(f"a run folder's name must be of A-Z a-z 0-9 . _ -, got {part!r}")
        try:
            run = cls(_new_folder(base / name))
        except OSError as error:
            raise ConfigError(
                f"cannot make a run folder in {base / name}: {error.strerror}. Try log.dir=<folder>"
            ) from None
        try:
            run.checkpoints.mkdir()
            run.config_yaml.write_text(yaml.safe_dump(dict(config), sort_keys=False))
            run.overrides_yaml.write_text(yaml.safe_dump(list(overrides)))
            git, diff = git_state(base)
            environment = {**describe_environment(), "git": git}
            run.env_json.write_text(json.dumps(environment, indent=2) + "\n")
            (run.path / "git.diff").write_bytes(diff)
        except OSError as error:
            shutil.rmtree(run.path, ignore_errors=True)  # ours, and a moment old
            raise ConfigError(f"cannot write to {run.path}: {error.strerror}") from None
        for group in {name, task}:
            _link_latest(base / group, run.path)
        return run

    @classmethod
    def of(cls, spec: RunSpec) -> tuple[RunDir, bool]:
        """The folder of a run: its own, if it continues from its last checkpoint, else a new one.

        Returns:
            The folder, and whether an earlier start of the run has made it.
        """
        found = spec.checkpoint
        if found is not None and found.run_dir is not None and found.file.name == "last.pt":
            run_dir = cls.open(found.run_dir)
            run_dir.resume(config=spec.config, overrides=spec.overrides)
            return run_dir, True
        task = chosen_task(spec.overrides) or spec.task_class.__name__
        name, base = spec.cfg.experiment or task, Path(spec.cfg.log.dir)
        return cls.create(base, name, task, config=spec.config, overrides=spec.overrides), False

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """Open an existing run folder, to continue in it or to read it."""
        if not (path / "config.yaml").is_file():
            raise ConfigError(f"{path} is not a run folder: it has no config.yaml")
        return cls(path)

    def resume(self, *, config: Mapping[str, Any], overrides: Sequence[str]) -> None:
        """Note with what, on what and from which code a resumed run continues; earlier starts stay on record.

        The folder alone is then enough the next time too. In env.json, `earlier` lists the starts before this one.
        """
        for path, value in ((self.config_yaml, dict(config)), (self.overrides_yaml, list(overrides))):
            with replacing(path) as file:
                file.write(yaml.safe_dump(value, sort_keys=False).encode())
        try:
            before = self.environment
        except (OSError, ValueError):  # an older run; a file that somebody edited
            before = {}
        earlier = before.get("earlier", [])
        if before:
            earlier = [*earlier, {name: before[name] for name in OF_A_START if name in before}]
        git, diff = git_state(self.path.parent.parent)
        current = self.path / "git.diff"
        old = current.read_bytes() if current.is_file() else b""
        if old not in (b"", diff):
            current.replace(self.path / f"git-{len(earlier)}.diff")
        with replacing(current) as file:
            file.write(diff)
        with replacing(self.env_json) as file:
            metadata = {**before, **describe_environment(), "git": git, "earlier": earlier}
            file.write((json.dumps(metadata, indent=2) + "\n").encode())

    def note(self, metadata: Mapping[str, Any]) -> None:
        """Adds run metadata to env.json; values of the same name, from an earlier start of the run, are replaced."""
        with replacing(self.env_json) as file:
            file.write((json.dumps({**self.environment, **metadata}, indent=2) + "\n").encode())

    def __str__(self) -> str:
        """The path as one would type it here."""
        here, path = Path.cwd(), self.path.absolute()
        return str(path.relative_to(here) if path.is_relative_to(here) else path)

    @property
    def config_yaml(self) -> Path:
        """Composed config."""
        return self.path / "config.yaml"

    @property
    def overrides_yaml(self) -> Path:
        """The command line."""
        return self.path / "overrides.yaml"

    @property
    def env_json(self) -> Path:
        """Command, versions, machine and commit."""
        return self.path / "env.json"

    @property
    def metrics_csv(self) -> Path:
        """One row per log interval."""
        return self.path / "metrics.csv"

    @property
    def train_log(self) -> Path:
        """What the terminal showed, as plain text."""
        return self.path / "train.log"

    @property
    def checkpoints(self) -> Path:
        """Folder of last.pt, best.pt and numbered checkpoints."""
        return self.path / "checkpoints"

    @property
    def config(self) -> dict[str, Any]:
        """Composed config, plain values."""
        return yaml.safe_load(self.config_yaml.read_text())

    @property
    def environment(self) -> dict[str, Any]:
        """Content of env.json."""
        return json.loads(self.env_json.read_text())


def chosen_task(overrides: Sequence[str]) -> str | None:
    """Name of the yaml that a command line chose for the task; None where it named none that can name a folder."""
    names = [text.removeprefix("task=").rpartition("/")[2] for text in overrides if text.startswith("task=")]
    return names[-1] if names and re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", names[-1]) else None


def resolve_run(name: str, base: Path = Path("runs")) -> tuple[RunDir, Path]:
    """Return the run folder and the checkpoint that a user means by `name`.

    Args:
        name: A run folder, a checkpoint in one, or a task's name (its latest run).
        base: Folder of all runs (`log.dir`).
    """
    found = paths.find_checkpoint(name, base)
    if found.run_dir is None:
        raise ConfigError(
            f"{found.file} is not in a run folder: expected <run>/checkpoints/<name>.pt "
            "and <run>/config.yaml. Try the file in the folder of the run that made it"
        )
    return RunDir.open(found.run_dir), found.file


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Write a file that takes the place of `path` only when it is complete and on disk.

    Whatever happens before, a full disk or a kill, leaves the old file as it was.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def _new_folder(parent: Path) -> Path:
    """Make a folder named after the time; further runs of the same second get -2, -3 and so on."""
    parent.mkdir(parents=True, exist_ok=True)
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    for count in itertools.count(1):
        path = parent / (stamp if count == 1 else f"{stamp}-{count}")
        try:
            path.mkdir()  # fails where it exists: two processes never share a folder
        except FileExistsError:
            continue
        return path
    raise AssertionError("unreachable")


def _link_latest(folder: Path, run: Path) -> None:
    """Point `<folder>/latest` at the run. A convenience: where links do not work, there is none."""
    temporary = folder / f".latest-{run.name}-{os.getpid()}"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        temporary.symlink_to(os.path.relpath(run, folder), target_is_directory=True)
        try:
            temporary.replace(folder / "latest")
        except OSError:  # `latest` is a folder of the user's: it stays
            temporary.unlink()
