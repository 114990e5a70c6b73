"""Demonstration files: recorded episodes, written by `tools/collect.py`."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpusim_rl.errors import ConfigError
from gpusim_rl.files import npz_file
from gpusim_rl.files.budgets import DEMONSTRATIONS_BYTES
from gpusim_rl.learn.algorithm import EnvSpec
from gpusim_rl.learn.replay import Replay, Trajectory
from gpusim_rl.spaces import MultiDiscrete

FLAGS = ("terminated", "truncated", "diverged")
"""Causes of an episode's end, as in `Transition`."""
AGAIN = "Try python tools/collect.py, which makes one"

Array = NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstrations:
    """Successive whole episodes and their description; mapping entries are `<field>/<group>` in a file.

    Raises:
        ConfigError: Array shapes disagree, or a number is not finite.
    """

    task: str
    """Class name of the task."""
    commit: str
    """Commit of the recording code; empty if unknown."""
    dt: float
    """Control step [s]."""
    episode_length: int
    """Time limit [control steps]."""
    num_envs: int
    executed: bool
    """Whether all actions were executed; else some are labels for states that a policy visited."""
    obs: Mapping[str, Array]
    """Raw observations before each control step by group, [steps, size]."""
    final_obs: Mapping[str, Array]
    """Observations at the end of each episode by group, [episodes, size]."""
    obs_names: Mapping[str, Array]
    """Column names of the observations by group, [size]."""
    action: Array
    """Actions as the envs take them, [steps, actions]; integers if they are choices."""
    action_names: Array
    """Column names of the actions, [actions]."""
    reward: Array
    """[steps]."""
    terminated: Array
    """The task ended the episode with this step, [steps]."""
    truncated: Array
    """The time limit or the end of the recording did, [steps]."""
    diverged: Array
    """The simulation failed in this step, [steps]."""

    def __post_init__(self) -> None:
        steps = len(self.reward)
        if not (steps and self.ends[-1]):
            raise ConfigError(f"{steps} control steps do not end with the end of an episode")
        if not 0.0 < self.dt < math.inf:
            raise ConfigError(f"dt is {self.dt:g} s, expected a control step of more than 0 s")
        shapes: dict[str, tuple[Array, tuple[int, ...]]]
        shapes = {name: (self._named(name), (steps,)) for name in ("reward", *FLAGS)}
        shapes["action"] = self.action, (steps, len(self.action_names))
        for group, names in self.obs_names.items():
            shapes[f"obs/{group}"] = self._named("obs", group), (steps, len(names))
            shapes[f"final_obs/{group}"] = self._named("final_obs", group), (self.episodes, len(names))
        for name, (array, shape) in shapes.items():
            if array.shape != shape:
                raise ConfigError(f"{name} is {list(array.shape)}, expected {list(shape)}")
            if array.dtype.kind not in ("b" if name in FLAGS else "fi"):
                raise ConfigError(f"{name} has values of type {array.dtype}")
            bad = np.argwhere(~np.isfinite(array))
            if len(bad):
                row, *column = bad[0].tolist()
                names = self.action_names if name == "action" else self.obs_names.get(name.partition("/")[2], ())
                where = f"{'episode' if name.startswith('final_obs') else 'control step'} {row}"
                where += f", {names[column[0]]}" if column else ""
                raise ConfigError(f"{name} has a number that is not finite: {where}")

    def _named(self, name: str, group: str | None = None) -> Array:
        array = getattr(self, name) if group is None else getattr(self, name).get(group)
        if not isinstance(array, np.ndarray):
            raise ConfigError(f"{name}{f'/{group}' if group else ''} is missing")
        return array

    @property
    def ends(self) -> Array:
        """Whether an episode ends with each step, [steps]."""
        return self.terminated | self.truncated | self.diverged

    @property
    def episodes(self) -> int:
        """Number of episodes."""
        return int(self.ends.sum())


def save(path: Path, shown: Demonstrations) -> None:
    """Write a file.

    Raises:
        OSError: The file cannot be written.
        ConfigError: It would exceed the size that `read` accepts.
    """
    entries = _by_entry(shown)
    size = sum(value.nbytes for value in entries.values() if isinstance(value, np.ndarray))
    if size > DEMONSTRATIONS_BYTES:
        raise ConfigError(
            f"{path} would have {size / 1e9:.1f} GB, {DEMONSTRATIONS_BYTES / 1e9:.1f} GB at most. Try fewer episodes"
        )
    npz_file.save(path, entries)


def concatenate(first: Demonstrations, then: Demonstrations) -> Demonstrations:
    """Join the episodes of both; commit, time limit and number of envs are the second's.

    Raises:
        ConfigError: Tasks, control steps or names differ.
    """
    one, two = _by_entry(first), _by_entry(then)
    same = [name for name in two if name in ("task", "dt") or name.startswith(("obs_names/", "action_names"))]
    differ = one.keys() ^ two.keys() or [name for name in same if not np.array_equal(one[name], two[name])]
    if differ:
        raise ConfigError(f"its {', '.join(sorted(differ))} is not that of the new episodes")
    rows = [name for name, value in two.items() if isinstance(value, np.ndarray) and name not in same]
    both = {name: np.concatenate([one[name], two[name]]) for name in rows}
    return Demonstrations(**_by_field({**two, **both, "executed": first.executed and then.executed}))


def _by_entry(shown: Demonstrations) -> dict[str, Any]:
    entries = {}
    for field in fields(shown):
        value = getattr(shown, field.name)
        grouped = isinstance(value, Mapping)
        entries |= {f"{field.name}/{key}": each for key, each in value.items()} if grouped else {field.name: value}
    return entries


def _by_field(entries: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {"obs": {}, "final_obs": {}, "obs_names": {}}
    for name, value in entries.items():
        field, _, group = name.partition("/")
        if group and field in values:
            values[field][group] = value
        else:
            values[name] = value
    return values


def read(path: Path) -> tuple[Demonstrations, str]:
    """Read a file as data; return its digest too.

    Raises:
        ConfigError: The file is missing, of another kind, or inconsistent.
    """
    found, digest = npz_file.load(path, DEMONSTRATIONS_BYTES)
    if any(name.endswith("/data.pkl") for name in found):
        raise ConfigError(f"{path} is a checkpoint, or demonstrations of an older version. {AGAIN} anew")
    values = _by_field(found)
    values.setdefault("executed", np.array(True))  # older files have no entry: all were
    missing = [field.name for field in fields(Demonstrations) if field.name not in values]
    if missing:
        raise ConfigError(f"{path} holds no demonstrations: {missing[0]} is missing. {AGAIN}")
    try:
        kinds = {"task": str, "commit": str, "dt": float, "episode_length": int, "num_envs": int, "executed": bool}
        for name, kind in kinds.items():
            values[name] = kind(values[name].item())
        if any(values[flag].dtype != bool for flag in FLAGS) or not len({len(values[flag]) for flag in FLAGS}) == 1:
            raise ConfigError(f"{', '.join(FLAGS)} are not flags of the same control steps")
        return Demonstrations(**{field.name: values[field.name] for field in fields(Demonstrations)}), digest
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ConfigError(f"{path} holds no demonstrations: {error}. {AGAIN}") from None


def load(file: str, env: EnvSpec, groups: Collection[str]) -> tuple[Demonstrations, str]:
    """Read demonstrations and require them to fit the envs; return the digest too.

    Raises:
        ConfigError: `read` rejects the file, or it does not fit.
    """
    shown, digest = read(Path(file))
    check_fits(shown, file, env, groups)
    return shown, digest


def check_fits(shown: Demonstrations, file: str, env: EnvSpec, groups: Collection[str]) -> None:
    """Raise ConfigError unless demonstrations fit the envs in these observation groups."""
    if env.task and shown.task != env.task:
        raise ConfigError(f"{file} is of task {shown.task}, and this is {env.task}")
    if env.task and not math.isclose(shown.dt, env.dt, rel_tol=1e-6):
        theirs, ours = f"{shown.dt:.4g} s", f"{env.dt:.4g} s"
        hint = f"Try task.control_hz={1.0 / shown.dt:.6g}"
        raise ConfigError(f"{file} has control steps of {theirs}, and the task of {ours}. {hint}")
    for group in groups:
        theirs, ours = len(shown.obs_names.get(group, ())), env.obs_sizes[group]
        if theirs != ours:
            raise ConfigError(f"{file} has {theirs} numbers in observation {group!r}, and the task {ours}")
        for number, name in enumerate(env.obs_names.get(group, ())):
            if shown.obs_names[group][number] != name:
                theirs, where = shown.obs_names[group][number], f"number {number} of observation {group!r}"
                raise ConfigError(f"{file} has {theirs} as {where}, and the task {name}. {AGAIN} anew")
    theirs, space = len(shown.action_names), env.action_space
    choices = isinstance(space, MultiDiscrete)
    if theirs != space.size or (shown.action.dtype.kind == "i") != choices:
        kinds = {False: "numbers", True: "choices"}
        theirs_is = f"{theirs} {kinds[shown.action.dtype.kind == 'i']}"
        raise ConfigError(f"{file} has actions of {theirs_is}, and the task of {space.size} {kinds[choices]}")
    if isinstance(space, MultiDiscrete) and ((shown.action < 0) | (shown.action >= np.array(space.counts))).any():
        raise ConfigError(f"{file} has an action beyond the options of the task, {list(space.counts)}")


def tensor(array: Array, device: torch.device) -> Tensor:
    """Return an array of a file on a device: float32, or int64 for choices."""
    return torch.as_tensor(
        np.ascontiguousarray(array, np.int64 if array.dtype.kind == "i" else np.float32), device=device
    )


def make_replay(
    shown: Demonstrations, env: EnvSpec, groups: Collection[str], *, n_step: int, gamma: float, device: torch.device
) -> Replay:
    """Build a `Replay` of demonstrations, as of one env with successive episodes.

    Raises:
        ConfigError: They are too few, or not all executed.
    """
    if not shown.executed:
        raise ConfigError("a policy acted there, so that rewards are not those of the actions (--actor). Try algo=bc")
    steps = len(shown.reward)
    if steps <= n_step:
        raise ConfigError(f"there are {steps} control steps, and n_step={n_step} needs more")
    cut = np.flatnonzero(shown.truncated & ~(shown.terminated | shown.diverged))
    apart = int(np.diff(cut).min()) if len(cut) > 1 else steps  # final observations have a row for each so many steps
    spec = EnvSpec(1, env.obs_sizes, env.action_space, apart)
    replay = Replay(steps, spec, groups, n_step=n_step, gamma=gamma, storage=torch.float32, device=device)

    def column(array: Array) -> Tensor:
        return tensor(array, device)[:, None]

    obs = {group: column(shown.obs[group]) for group in replay.groups}
    final_obs = {}
    for group in replay.groups:
        after = np.zeros_like(shown.obs[group])
        after[shown.ends] = shown.final_obs[group]
        final_obs[group] = column(after)
    flags = (column(getattr(shown, flag)).bool() for flag in FLAGS)
    replay.extend(Trajectory(obs, column(shown.action).float(), final_obs, column(shown.reward), *flags))
    return replay
