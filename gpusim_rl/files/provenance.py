"""Provenance of a run or measurement: code, versions and machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import psutil
from packaging.requirements import Requirement

from gpusim_rl.errors import ConfigError
from gpusim_rl.files import paths
from gpusim_rl.machine.hardware import available_cpus, describe_gpus
from gpusim_rl.public import __version__

PACKAGES = ("torch", "numpy", "mujoco", "mujoco-warp", "warp-lang", "newton", "hydra-core", "omegaconf", "wandb")
GIT_TIMEOUT_S, GIT_OUTPUT_LIMIT = 10, 4 * 2**20  # the limit in bytes
SOURCES = ("*.py", "*.yaml", "*.yml", "*.toml", "*.xml", "*.urdf")  # new files in git.diff


def describe_environment() -> dict[str, Any]:
    """Return a run's command, versions and hardware, without the host name because run folders are shared."""
    versions = {package: version for package in PACKAGES if (version := installed_version(package))}
    cores, threads = psutil.cpu_count(logical=False), psutil.cpu_count()
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": shlex.join(["python", *sys.argv]),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "versions": {"gpusim-rl": __version__, **versions},
        "cpu": {"model": _cpu_model(), "cores": cores, "threads": threads, "available": available_cpus()},
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "gpu": describe_gpus(),
    }


@cache  # takes 5 ms, and every simulator calls it
def installed_version(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_versions(needed_by: str, needs: Sequence[str], advice: str = "") -> None:
    """Raise ConfigError if an installed package violates `needs`; `advice` follows the pip command in the hint."""
    for need in needs:
        requirement = Requirement(need)
        version = installed_version(requirement.name)
        if version is not None and not requirement.specifier.contains(version, prereleases=True):
            hint = f"Try: pip install {' '.join(repr(each) for each in needs)}{advice}"
            raise ConfigError(f"{needed_by} needs {need}, but {version} is installed", hint=hint)


def _cpu_model() -> str:
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text()
        if match := re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE):
            return match.group(1)
    return platform.processor() or platform.machine()


def git_state(*exclude: Path) -> tuple[dict[str, Any] | None, bytes]:
    """Return `{"sha", "dirty"}` and the diff of the checkout (else the current folder), without paths in `exclude`.

    The diff includes new source files. Return None and an empty diff outside a repository, before its first commit, or
    without git.
    """
    folder = paths.checkout() or Path.cwd()
    try:
        words = _git(folder, "rev-parse", "--show-toplevel", "HEAD", "--git-path", "index")
        top, sha, index = words.decode().splitlines()
        root = Path(top)
        excluded = [path.absolute() for path in exclude]
        skip = [f":(exclude,top){p.relative_to(root)}" for p in excluded if p.is_relative_to(root) and p != root]
        new = _git(root, "ls-files", "--others", "--exclude-standard", "-z", "--", *SOURCES, *skip)
        with tempfile.TemporaryDirectory() as scratch:
            # Add new files to a copy of the index, so that the diff shows them and the user's index stays unchanged.
            # copy2 keeps the index's mtime, from which git infers which files may have changed since.
            env = {**os.environ, "GIT_INDEX_FILE": shutil.copy2(folder / index, f"{scratch}/index")}
            if new:
                files = new.decode().rstrip("\0").split("\0")
                _git(root, "add", "--intent-to-add", "--", *files, env=env)
            diff = _git(root, "diff", "--no-ext-diff", "HEAD", "--", ".", *skip, env=env)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None, b""
    return {"sha": sha, "dirty": bool(diff)}, diff


def _git(folder: Path, *arguments: str, env: Mapping[str, str] | None = None) -> bytes:
    """Return git's output, cut at `GIT_OUTPUT_LIMIT`."""
    with tempfile.TemporaryFile() as output:
        streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.DEVNULL}
        subprocess.run(["git", *arguments], cwd=folder, env=env, timeout=GIT_TIMEOUT_S, check=True, **streams)
        output.seek(0)
        text = output.read(GIT_OUTPUT_LIMIT)
        return text + b"\n[cut here]\n" if output.read(1) else text
