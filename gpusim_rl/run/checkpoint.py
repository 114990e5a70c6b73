"""Checkpoints: data only (`weights_only=True` reads them), versioned, whole or not there at all."""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import gpusim_rl
from gpusim_rl.config import RunSpec
from gpusim_rl.errors import ConfigError
from gpusim_rl.run.run_dir import replacing

FORMAT = 3
SCALARS = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
"""Types that `weights_only=True` reads beside tensors and containers; not classes derived from them (numpy's float)."""


def save(path: Path, payload: Mapping[str, Any]) -> None:
    """Write a checkpoint in place of `path`, atomically.

    Args:
        path: File to write.
        payload: Nested dicts and lists of tensors, numbers, strings and None.

    Raises:
        OSError: The disk is full or the folder is gone. The old file is as it was.
        ConfigError: `load` could not read it again.
    """
    check_is_data(payload)
    versioned = {"format": FORMAT, "gpusim_rl": gpusim_rl.__version__, **payload}
    with replacing(path) as file:
        try:
            torch.save(versioned, file)
        except RuntimeError as error:
            # torch closes its archive after a failed write, and that failure hides the reason.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def check_is_data(node: Any, path: str = "") -> None:
    """Stop where a state has something that `load` would refuse.

    Args:
        node: What is to be saved.
        path: Where it stands in the state.
    """
    kind = type(node)
    if kind in (dict, OrderedDict):
        for key, value in node.items():
            if type(key) not in SCALARS:
                raise _not_data(key, f"a key of {path or '/'}")
            check_is_data(value, f"{path}/{key}" if path else str(key))
    elif kind in (list, tuple, set):
        for index, value in enumerate(node):
            check_is_data(value, f"{path}/{index}")
    elif kind not in (torch.Tensor, torch.nn.Parameter, *SCALARS):
        raise _not_data(node, path)


def _not_data(value: Any, where: str) -> ConfigError:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return ConfigError(
        f"the state to save has a {name} at {where}; a checkpoint holds tensors, numbers, strings, lists and dicts"
    )


def load(path: Path, map_location: str | torch.device = "cpu") -> dict[str, Any]:
    """Read a checkpoint of this format.

    Args:
        path: File to read.
        map_location: Device of the tensors. Random-generator states must stay on the CPU.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise ConfigError(f"cannot read checkpoint {path}: {error.strerror}") from None
    with file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about foreign files, which the error is about too
        try:
            payload = torch.load(file, map_location=map_location, weights_only=True)
        except Exception:  # torch's reader fails on foreign bytes in a dozen ways, in words that help nobody
            raise ConfigError(f"cannot read checkpoint {path}: damaged, or not a checkpoint") from None
    ours = isinstance(payload, dict) and "gpusim_rl" in payload
    version = payload.get("format") if ours else None
    if not isinstance(version, int) or version < 1:
        raise ConfigError(f"{path} is not a checkpoint of gpusim_rl: another program wrote it")
    if version != FORMAT:
        raise ConfigError(
            f"checkpoint {path} has format {version} of gpusim_rl {payload['gpusim_rl']}; this is gpusim_rl"
            f" {gpusim_rl.__version__}, which reads format {FORMAT}. Try the version that wrote it (env.json of the run"
            " names its commit)"
        )
    return payload


def load_for(spec: RunSpec) -> dict[str, Any] | None:
    """Read the checkpoint that a run continues from, and check that it fits the run's configuration.

    Returns:
        What `save` wrote; None for a run that begins from nothing.

    Raises:
        ConfigError: There is none to evaluate, or it is of another task or other networks.
    """
    if spec.checkpoint is None:
        if spec.cfg.test:
            raise ConfigError("test=true needs checkpoint=<run folder or .pt file>")
        return None
    file, task_name = spec.checkpoint.file, spec.task_class.__name__
    state = load(file)
    missing = {"task", "config", "seed", "policy"} - state.keys()
    if missing:
        raise ConfigError(f"{file} is not a checkpoint of a training: it has no {', '.join(sorted(missing))}")
    if state["task"] != task_name:
        raise ConfigError(f"checkpoint {file} is of task {state['task']}, not {task_name}; try task={state['task']}")
    algorithm = spec.algorithm_class
    keys = algorithm.policy_structure if spec.cfg.test else algorithm.structure
    keys = ["algo", *([] if spec.cfg.test else ["num_envs"]), *(f"{spec.cfg.algo}.{key}" for key in keys)]
    different = structural_difference(state["config"], spec.config, keys)
    if different:
        raise ConfigError(f"checkpoint {file} does not fit this configuration: {'; '.join(different)}")
    return state


class Checkpoints:
    """The checkpoints folder of a run: last.pt, best.pt and every so often a numbered one.

    An iteration is serialised once: `save_last` writes, `save_best` and `save_numbered` give the
    file that it wrote a second name. All raise OSError when the disk is full, and damage no file.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        """Use an existing folder.

        Args:
            folder: `<run>/checkpoints`.
            keep: Numbered checkpoints to keep, the newest; 0 keeps all.
        """
        self.last = folder / "last.pt"
        self.best = folder / "best.pt"
        self._folder = folder
        self._keep = keep

    def save_last(self, payload: Mapping[str, Any]) -> Path:
        """Write last.pt."""
        save(self.last, payload)
        return self.last

    def save_best(self) -> Path:
        """Make what `save_last` wrote the best one so far."""
        return self._name_last(self.best)

    def save_numbered(self, iteration: int) -> Path:
        """Keep what `save_last` wrote under its number; delete the oldest numbers beyond `keep`."""
        path = self._name_last(self._folder / f"{iteration:06d}.pt")
        numbered = {
            int(file.stem): file
            for file in self._folder.glob("*.pt")
            if re.fullmatch(r"\d{6,}", file.stem)  # only names that we give
        }
        # Numbers above this one are of a run that was set back: not older, so not deleted.
        oldest_first = sorted(number for number in numbered if number <= iteration)
        for number in oldest_first[: -self._keep] if self._keep else []:
            numbered[number].unlink(missing_ok=True)
        return path

    def _name_last(self, path: Path) -> Path:
        temporary = path.with_name(f"{path.name}.tmp")
        try:
            temporary.unlink(missing_ok=True)
            try:
                os.link(self.last, temporary)
            except OSError:  # a file system without hard links
                shutil.copyfile(self.last, temporary)
            temporary.replace(path)
        finally:
            # Still there after an error, and when `path` was this very file: rename(2) leaves both.
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
        return path


def structural_difference(saved: Mapping[str, Any], now: Mapping[str, Any], keys: Sequence[str]) -> list[str]:
    """Compare two configs where they must agree; return one line for each value that differs.

    Args:
        saved: Config of the checkpoint.
        now: Config of this run.
        keys: Keys that must agree, dotted: `num_envs`, `ppo.horizon`. A section (`ppo.network`)
            means all keys in it.
    """
    lines = []
    for key in keys:
        old, new = _leaves(saved, key), _leaves(now, key)
        lines += [
            f"{name}: saved {old.get(name)}, now {new.get(name)}"
            for name in dict.fromkeys([*old, *new])
            if old.get(name) != new.get(name)
        ]
    return lines


def _leaves(config: Any, key: str) -> dict[str, Any]:
    """Values at and below a dotted key, by full key; nothing where the key is missing."""
    node = config
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return {}
        node = node[part]
    if not isinstance(node, Mapping):
        return {key: node}
    return {full: leaf for part in node for full, leaf in _leaves(config, f"{key}.{part}").items()}
