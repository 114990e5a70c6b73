"""Run folder: all files needed to play, resume or repeat a run (docs/outputs.md). It is never overwritten."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from gpusim_rl.errors import ConfigError, first_line, warn
from gpusim_rl.files import paths, safe_open
from gpusim_rl.files.provenance import describe_environment, git_state
from gpusim_rl.run.run_spec import RunSpec

ENCODER = "encoder.pt"  # copy of a frozen encoder's file
LOCK = "lock"  # file in a run folder while a process trains there
SAVE_ALL = "GPUSIM_RL_SAVE_ALL"  # environment variable: no time budget for numbered checkpoints, which a search copies
MAX_EARLIER = 100  # maximum number of earlier starts listed in env.json
PER_START = ("time", "command", "versions", "cpu", "gpu", "git")  # entries that env.json keeps for earlier starts


class RunDir:
    """Folder of one run and its files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_yaml, self.overrides_yaml = path / "config.yaml", path / "overrides.yaml"
        self.env_json, self.train_log = path / "env.json", path / "train.log"
        self.metrics_csv, self.checkpoints = path / "metrics.csv", path / "checkpoints"

    @classmethod
    def create(cls, base: Path, name: str, task: str, *, config: Mapping[str, Any], overrides: Sequence[str]) -> RunDir:
        """Make `<base>/<name>/<time>/` with the files that describe the run; `<base>/<task>/latest` links to it."""
        for part in (name, task):
            if not re.fullmatch(r"[A-Za-z0-9._-]+", part) or part in (".", ".."):
                raise ConfigError("invalid run folder name", expected="only A-Z a-z 0-9 . _ -", got=part)
        run = None
        try:
            run = cls(_new_folder(base / name))
            run.checkpoints.mkdir()
            run._describe(config, overrides, {})
        except OSError as error:
            if run is not None:
                shutil.rmtree(run.path, ignore_errors=True)  # just made
            problem = f"cannot create the run folder: {error.strerror}"
            raise ConfigError(problem, key=str(base / name), hint="Try log.dir=<folder>") from None
        for group in {name, task}:
            _link_latest(base / group, run.path)
        return run

    @classmethod
    @contextmanager
    def of(cls, spec: RunSpec, digest: str | None = None, *, trains: bool = True) -> Iterator[tuple[RunDir, bool]]:
        """Lock a run folder, the existing one if the run continues from last.pt; yield it and whether it existed.

        `digest` identifies the loaded checkpoint. Unless the run `trains`, the folder keeps its settings: a smaller
        `max_iterations` would end the next start immediately.
        """
        from gpusim_rl.files.checkpoint_file import digest_of  # torch

        start = spec.checkpoint
        if start is None or start.run_dir is None or not start.continues:
            task = _name_of_task(spec)
            name, base = spec.cfg.experiment or task, Path(spec.cfg.log.dir)
            run_dir = cls.create(base, name, task, config=spec.config, overrides=spec.overrides)
            encoder = encoder_for(spec)
            if spec.cfg.pretrained.freeze and encoder is not None and Path(encoder).is_file():
                with safe_open.writing(run_dir.path / ENCODER) as file:
                    file.write(Path(encoder).read_bytes())
            with run_dir.locked():
                yield run_dir, False
            return
        run_dir = cls(start.run_dir)
        with run_dir.locked():
            if digest_of(start.file) != digest:
                problem = "another process has just continued this run"
                raise ConfigError(problem, key=str(run_dir), hint="Try the command again")
            try:
                for folder in (run_dir.path, run_dir.checkpoints):
                    safe_open.remove_temporary(folder)
                if trains:
                    run_dir.resume(config=spec.config, overrides=spec.overrides)
            except OSError as error:
                raise run_dir._unwritable(error) from None
            yield run_dir, True

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder's lock, which the OS releases when the process dies."""
        try:
            file = self._lock()
        except OSError as error:
            raise self._unwritable(error) from None
        with file:
            try:
                yield
            finally:
                with suppress(OSError):
                    (self.path / LOCK).unlink()

    def _lock(self) -> IO[bytes]:
        path = self.path / LOCK
        while True:
            file = safe_open.open_file(path, "ab+", buffering=0)
            try:
                free = safe_open.lock(file)
            except OSError as error:
                free = True
                warn(f"cannot lock {self} ({error.strerror}): do not start another training run in this folder")
            if not free:
                file.seek(0)
                holder = file.read(200).decode(errors="replace").strip()
                file.close()
                problem = f"{holder or 'another process'} is already training in this folder"
                raise ConfigError(problem, key=str(self), hint=self._branch())
            with suppress(FileNotFoundError):
                if path.stat().st_ino == os.fstat(file.fileno()).st_ino:
                    break
            file.close()  # the previous holder has just deleted it
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        return file

    def _unwritable(self, error: OSError) -> ConfigError:
        hint = f"Try a copy of the folder. {self._branch(' log.dir=<folder>')}"
        return ConfigError(f"cannot write: {error.strerror}", key=str(self), hint=hint)

    def _branch(self, more: str = "") -> str:
        """Return a hint to continue from another checkpoint in a new folder; empty if there is no other checkpoint."""
        others = sorted(path.name for path in self.checkpoints.glob("*.pt") if path.name != "last.pt")
        word = shlex.quote(f"checkpoint={self}/checkpoints/{others[-1]}") if others else ""
        return f"Try {word}{more}, which starts a new folder" if others else ""

    def resume(self, *, config: Mapping[str, Any], overrides: Sequence[str]) -> None:
        """Record settings, machine and code of a resumed run; `earlier` in env.json lists previous starts."""
        for path in (self.config_yaml, self.overrides_yaml):
            if path.exists() and safe_open.read_intact(path) is None:
                warn(f"replacing {path}, which was modified; the old file is kept as {safe_open.keep_damaged(path)}")
        try:
            before = self.environment
        except (OSError, ValueError) as error:  # edited or lost
            reason = error.strerror if isinstance(error, OSError) else first_line(error)
            warn(f"cannot read {self.env_json} ({reason}): the records of earlier starts are lost")
            before = {}
        listed = before.get("earlier")
        earlier = listed[-MAX_EARLIER:] if isinstance(listed, list) else []
        earlier += [{name: before[name] for name in PER_START if name in before}] if before else []
        self._describe(config, overrides, {**before, "earlier": earlier})

    def _describe(self, config: Mapping[str, Any], overrides: Sequence[str], before: Mapping[str, Any]) -> None:
        """Record settings, code version and machine of a start; `before` holds entries of env.json to keep."""
        for path, value in ((self.config_yaml, dict(config)), (self.overrides_yaml, list(overrides))):
            with safe_open.replacing(path) as file:
                file.write(safe_open.dump_yaml(value))
        git, diff = git_state(self.path.parent.parent)
        current = self.path / "git.diff"
        if current.is_file():
            with safe_open.open_file(current) as file:
                old = file.read(len(diff) + 1)
            if old not in (b"", diff):
                current.replace(self.path / f"git-{len(before['earlier'])}.diff")
        with safe_open.replacing(current) as file:
            file.write(diff)
        self._write_environment({**before, **describe_environment(), "git": git})

    def note(self, metadata: Mapping[str, Any]) -> None:
        """Add or replace entries of env.json."""
        self._write_environment({**self.environment, **metadata})

    def _write_environment(self, environment: Mapping[str, Any]) -> None:
        with safe_open.replacing(self.env_json) as file:
            file.write((json.dumps(environment, indent=2) + "\n").encode())

    def __str__(self) -> str:
        """Return the path, relative to the current folder if it lies inside that folder, else absolute."""
        here, path = Path.cwd(), self.path.absolute()
        return str(path.relative_to(here) if path.is_relative_to(here) else path)

    @property
    def config(self) -> dict[str, Any]:
        """Composed config as plain values."""
        return safe_open.load_yaml(self.config_yaml)

    @property
    def environment(self) -> dict[str, Any]:
        """Content of env.json."""
        return safe_open.load_json(self.env_json)


def encoder_for(spec: RunSpec) -> str | None:
    """Return `pretrained.init_from`, or the run folder's copy of that file."""
    run = spec.checkpoint.run_dir if spec.checkpoint is not None else None
    copied = run is not None and spec.cfg.pretrained.freeze and (run / ENCODER).is_file()
    return str(run / ENCODER) if run is not None and copied else spec.cfg.pretrained.init_from


def _name_of_task(spec: RunSpec) -> str:
    """Return the name of the task's yaml, or of another library's env: `Pong-v5` for `ale_py:ALE/Pong-v5`."""
    name = chosen_task(spec.overrides) or spec.task_class.__name__
    env_id = spec.cfg.env.id if name in ("Gymnasium", "IsaacLab", "MjLab") else None
    return re.split("[:/]", env_id)[-1] if env_id else name


def chosen_task(overrides: Sequence[str]) -> str | None:
    """Return the task name in overrides; None if there is none, or if it cannot name a folder."""
    names = [text.removeprefix("task=").rpartition("/")[2] for text in overrides if text.startswith("task=")]
    return names[-1] if names and re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", names[-1]) else None


def resolve_run(name: str, base: Path = Path("runs")) -> tuple[RunDir, Path]:
    """Resolve a run folder, a checkpoint or a task to its run folder and checkpoint."""
    checkpoint = paths.find_checkpoint(name, base)
    if checkpoint.run_dir is None or not (checkpoint.run_dir / "config.yaml").is_file():
        problem, expected = "not in a run folder", "<run>/checkpoints/<name>.pt and <run>/config.yaml"
        hint = "Try the checkpoint in its own run folder"
        raise ConfigError(problem, key=str(checkpoint.file), expected=expected, hint=hint)
    return RunDir(checkpoint.run_dir), checkpoint.file


def _new_folder(parent: Path) -> Path:
    """Make a folder named after the time; a second folder in the same second gets the suffix -2."""
    parent.mkdir(parents=True, exist_ok=True)
    while True:
        path = safe_open.free_name(parent / time.strftime("%Y-%m-%d_%H-%M-%S"))
        with suppress(FileExistsError):  # made by another process
            path.mkdir()
            return path


def _link_latest(folder: Path, run: Path) -> None:
    """Point `<folder>/latest` at the run, if the file system supports links."""
    temporary = folder / f".latest-{run.name}-{os.getpid()}"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        temporary.symlink_to(os.path.relpath(run, folder), target_is_directory=True)
        try:
            temporary.replace(folder / "latest")
        except OSError:  # `latest` is the user's folder
            temporary.unlink()
