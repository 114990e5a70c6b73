"""The folder of a run: holds all it takes to play, resume or repeat it, and is never overwritten.

`runs/<name>/<time>/` holds config.yaml, overrides.yaml, env.json, git.diff, metrics.csv, train.log
and checkpoints/; `runs/<name>/latest` is a link to the newest of them.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil
import yaml

import gpusim_rl
from gpusim_rl import paths
from gpusim_rl.errors import ConfigError
from gpusim_rl.hardware import available_cpus
from gpusim_rl.run.system import describe_gpus

PACKAGES = (  # whose versions env.json tells
    "torch",
    "numpy",
    "mujoco",
    "mujoco-warp",
    "warp-lang",
    "newton",
    "hydra-core",
    "omegaconf",
    "wandb",
)
OF_A_START = ("time", "command", "versions", "cpu", "gpu", "git")  # what env.json keeps of earlier starts
GIT_TIMEOUT_S = 10
GIT_OUTPUT_LIMIT = 4 * 2**20  # bytes
SOURCES = ("*.py", "*.yaml", "*.yml", "*.toml", "*.xml", "*.urdf")  # new files in git.diff


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


def describe_environment() -> dict[str, Any]:
    """What a run depends on besides its config. Without the host's name: run folders are shared."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": shlex.join(["python", *sys.argv]),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "versions": {
            "gpusim-rl": gpusim_rl.__version__,
            **{package: version for package in PACKAGES if (version := _version(package))},
        },
        "cpu": {
            "model": _cpu_model(),
            "cores": psutil.cpu_count(logical=False),
            "threads": psutil.cpu_count(),
            "available": available_cpus(),
        },
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "gpu": describe_gpus(),
    }


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


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text()
        if found := re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE):
            return found.group(1)
    return platform.processor() or platform.machine()


def git_state(*exclude: Path) -> tuple[dict[str, Any] | None, bytes]:
    """Commit of the project's checkout (else of the current folder) and what differs from it.

    Args:
        exclude: What the caller writes itself, files or folders: that of all runs, results. May lie in the checkout.

    Returns:
        `{"sha", "dirty"}` and a diff with new source files in it; None and no diff outside a
        repository, before its first commit or without git.
    """
    folder = paths.checkout() or Path.cwd()
    try:
        root = Path(_git(folder, "rev-parse", "--show-toplevel").decode().rstrip("\n"))
        sha = _git(root, "rev-parse", "HEAD").decode().strip()
        written = [path.absolute() for path in exclude]
        skip = [f":(exclude,top){p.relative_to(root)}" for p in written if p.is_relative_to(root) and p != root]
        listing = ("ls-files", "--others", "--exclude-standard", "-z", "--", *SOURCES, *skip)
        new = _git(root, *listing)
        index = root / _git(root, "rev-parse", "--git-path", "index").decode().rstrip("\n")
        with tempfile.TemporaryDirectory() as scratch:
            # Announced in a copy of the index, new files show in the diff; the user's index stays.
            env = {**os.environ, "GIT_INDEX_FILE": shutil.copyfile(index, f"{scratch}/index")}
            if new:
                files = new.decode().rstrip("\0").split("\0")
                _git(root, "add", "--intent-to-add", "--", *files, env=env)
            diff = _git(root, "diff", "--no-ext-diff", "HEAD", "--", ".", *skip, env=env)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None, b""
    return {"sha": sha, "dirty": bool(diff)}, diff


def _git(folder: Path, *arguments: str, env: Mapping[str, str] | None = None) -> bytes:
    """Run git and return what it prints, cut at GIT_OUTPUT_LIMIT."""
    with tempfile.TemporaryFile() as output:
        subprocess.run(
            ["git", *arguments],
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.DEVNULL,
            timeout=GIT_TIMEOUT_S,
            check=True,
        )
        output.seek(0)
        text = output.read(GIT_OUTPUT_LIMIT)
        return text + b"\n[cut here]\n" if output.read(1) else text
