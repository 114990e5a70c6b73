"""Demonstration files: recorded episodes, written by `gpusim-rl collect`."""

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

FLAGS = ("terminated", "truncated", "diverged")  # causes of an episode's end, as in `Transition`
RECORD = "Try gpusim-rl collect"

Array = NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstrations:
    """Complete recorded episodes, concatenated; in a file, entries of mappings are named `<field>/<group>`.

    Raises:
        ConfigError: Array shapes are inconsistent, or a value is not finite.
    """

    task: str  # class name
    commit: str  # commit of the recording code; empty if unknown
    dt: float  # control step [s]
    episode_length: int  # time limit [control steps]
    num_envs: int
    executed: bool  # False if some actions are labels for states that a policy visited
    obs: Mapping[str, Array]  # raw observations before each control step, [steps, size]
    final_obs: Mapping[str, Array]  # raw observations at the end of each episode, [episodes, size]
    obs_names: Mapping[str, Array]  # names of the columns, [size]
    action: Array  # actions passed to the envs, [steps, actions]; integers if discrete
    action_names: Array  # names of the columns, [actions]
    reward: Array  # [steps]
    terminated: Array  # ended by the task in this step, [steps]
    truncated: Array  # ended by the time limit or the end of the recording, [steps]
    diverged: Array  # the simulation failed in this step, [steps]

    def __post_init__(self) -> None:
        steps = len(self.reward)
        if not (steps and self.ends[-1]):
            raise ConfigError("the last episode is incomplete" if steps else "no control steps")
        if not 0.0 < self.dt < math.inf:
            raise ConfigError(key="dt", expected="a positive control step [s]", got=self.dt)
        arrays: dict[str, tuple[Any, tuple[int, ...]]] = {name: (getattr(self, name), (steps,)) for name in FLAGS}
        arrays |= {"reward": (self.reward, (steps,)), "action": (self.action, (steps, len(self.action_names)))}
        for group, names in self.obs_names.items():
            arrays[f"obs/{group}"] = self.obs.get(group), (steps, len(names))
            arrays[f"final_obs/{group}"] = self.final_obs.get(group), (self.episodes, len(names))
        for name, (array, shape) in arrays.items():
            if not isinstance(array, np.ndarray):
                raise ConfigError("missing array", key=name)
            if array.shape != shape:
                raise ConfigError(key=name, expected=f"shape {shape}", got=array.shape)
            if array.dtype.kind not in ("b" if name in FLAGS else "fi"):
                raise ConfigError(key=name, expected="bool" if name in FLAGS else "numbers", got=str(array.dtype))
            bad = np.argwhere(~np.isfinite(array))
            if len(bad):
                row, *column = bad[0].tolist()
                names = self.action_names if name == "action" else self.obs_names.get(name.partition("/")[2], ())
                where = f"{'episode' if name.startswith('final_obs') else 'control step'} {row}"
                where += f", {names[column[0]]}" if column else ""
                raise ConfigError(f"NaN or infinity in {where}", key=name)

    @property
    def ends(self) -> Array:
        """Mask of steps that end an episode, [steps]."""
        return self.terminated | self.truncated | self.diverged

    @property
    def episodes(self) -> int:
        """Number of episodes."""
        return int(self.ends.sum())


def save(path: Path, shown: Demonstrations) -> None:
    """Write demonstrations to a file; raise OSError, or ConfigError if they are larger than `read` accepts."""
    entries = _by_entry(shown)
    size = sum(value.nbytes for value in entries.values() if isinstance(value, np.ndarray))
    if size > DEMONSTRATIONS_BYTES:
        problem = f"{size / 1e9:.1f} GB of data exceeds the limit of {DEMONSTRATIONS_BYTES / 1e9:.1f} GB per file"
        raise ConfigError(problem, hint="Try fewer episodes")
    npz_file.save(path, entries)


def concatenate(first: Demonstrations, then: Demonstrations) -> Demonstrations:
    """Append `then`, whose commit, time limit and num_envs are kept; raise ConfigError if task, dt or names differ."""
    one, two = _by_entry(first), _by_entry(then)
    same = [name for name in two if name in ("task", "dt") or name.startswith(("obs_names/", "action_names"))]
    differ = one.keys() ^ two.keys() or [name for name in same if not np.array_equal(one[name], two[name])]
    if differ:
        raise ConfigError(f"old and new episodes differ in {', '.join(sorted(differ))}")
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
    """Return a file's demonstrations and digest; raise ConfigError if the file is missing, invalid or inconsistent."""
    arrays, digest = npz_file.load(path, DEMONSTRATIONS_BYTES)
    if any(name.endswith("/data.pkl") for name in arrays):
        raise ConfigError("not a demonstration file, or one from an older version", key=str(path), hint=RECORD)
    values = _by_field(arrays)
    values.setdefault("executed", np.array(True))  # missing in older files
    try:
        kinds = {"task": str, "commit": str, "dt": float, "episode_length": int, "num_envs": int, "executed": bool}
        values |= {name: kind(values[name].item()) for name, kind in kinds.items()}
        if any(values[flag].dtype != bool for flag in FLAGS) or len({len(values[flag]) for flag in FLAGS}) > 1:
            raise ConfigError(key=", ".join(FLAGS), expected="bool arrays of equal length")
        return Demonstrations(**{field.name: values[field.name] for field in fields(Demonstrations)}), digest
    except ConfigError as error:
        raise error.within(str(path)) from None
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ConfigError(f"not a demonstration file: {error!r}", key=str(path), hint=RECORD) from None


def load(file: str, env: EnvSpec, groups: Collection[str]) -> tuple[Demonstrations, str]:
    """Return a file's demonstrations and digest; raise ConfigError unless they match the envs."""
    shown, digest = read(Path(file))
    check_fits(shown, file, env, groups)
    return shown, digest


def check_fits(shown: Demonstrations, file: str, env: EnvSpec, groups: Collection[str]) -> None:
    """Raise ConfigError unless demonstrations match the envs in these observation groups."""

    def require(what: str, expected: object, got: object, hint: str = "") -> None:
        if got != expected:
            raise ConfigError(f"mismatched {what}", key=file, expected=f"{expected}", got=got, hint=hint)

    if env.task:
        require("task", env.task, shown.task)
        dt = env.dt if math.isclose(shown.dt, env.dt, rel_tol=1e-6) else shown.dt
        require("control step [s]", env.dt, dt, f"Try task.control_hz={1.0 / shown.dt:.6g}")
    for group in groups:
        require(f"size of observation {group!r}", env.obs_sizes[group], len(shown.obs_names.get(group, ())))
        for i, name in enumerate(env.obs_names.get(group, ())):
            require(f"column {i} of observation {group!r}", name, str(shown.obs_names[group][i]), RECORD)
    space, sizes = env.action_space, (len(shown.action_names), env.action_space.size)
    discrete = (shown.action.dtype.kind == "i", isinstance(space, MultiDiscrete))
    got, expected = (f"{n} {'discrete' if d else 'continuous'}" for n, d in zip(sizes, discrete, strict=True))
    require("actions", expected, got)
    if isinstance(space, MultiDiscrete) and ((shown.action < 0) | (shown.action >= np.array(space.counts))).any():
        raise ConfigError("action index out of range", key=file, expected=f"0 to n - 1 for n in {list(space.counts)}")


def tensor(array: Array, device: torch.device) -> Tensor:
    """Copy an array from a file to a device: float32, or int64 for discrete actions."""
    return torch.as_tensor(
        np.ascontiguousarray(array, np.int64 if array.dtype.kind == "i" else np.float32), device=device
    )


def make_replay(
    shown: Demonstrations, env: EnvSpec, groups: Collection[str], *, n_step: int, gamma: float, device: torch.device
) -> Replay:
    """Build a `Replay` of one env from all episodes; raise ConfigError for too few steps or labelled actions."""
    if not shown.executed:
        raise ConfigError("recorded with --actor: the rewards do not match the actions", hint="Try algo=bc")
    steps = len(shown.reward)
    if steps <= n_step:
        raise ConfigError(f"too few control steps for n_step={n_step}", expected=f"at least {n_step + 1}", got=steps)
    cut = np.flatnonzero(shown.truncated & ~(shown.terminated | shown.diverged))
    apart = int(np.diff(cut).min()) if len(cut) > 1 else steps  # so at most one final observation per `apart` steps
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
