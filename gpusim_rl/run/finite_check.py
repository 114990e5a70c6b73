"""Checks that stop a run if observations, rewards, loss or policy are NaN or infinite.

NaN in physics or actions only resets the env (env/nan_guard.py); learn/optimizer.py skips non-finite gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gpusim_rl.errors import TaskError
from gpusim_rl.learn.algorithm import Algorithm, RecordedTensor, Recorder
from gpusim_rl.run.held_objects import attributes
from gpusim_rl.run.log_interval import LogRow

FLAGS = {"check/obs": "an observation", "check/style": "an observation"}
FLAGS |= {"check/reward": "a reward", "loss/value": "the loss"}
PATIENCE = 3  # consecutive iterations without an update before the learner is restored; an outlier can cost one


class FiniteCheck:
    """Checks of metrics rows, and of the policy before it is saved."""

    def __init__(self, task_name: str) -> None:
        self._task_name = task_name
        self._without_learning = 0  # consecutive iterations without an update

    def check_row(self, row: LogRow, iteration: int, algorithm: Algorithm) -> None:
        """Raise TaskError for a non-finite value in a row, with its location if the algorithm still holds it."""
        numbers = {**row.flags, **row.numbers}
        checked = {name: value for name, value in numbers.items() if name.startswith(("check/", "loss/"))}
        bad = [name for name, value in checked.items() if value is not None and not math.isfinite(value)]
        if bad:
            first = min(bad, key=lambda name: (name.startswith("loss/"), name != "loss/value", name))
            exact = len(row.iterations) == 1 and row.iterations[-1] == iteration
            place = _first_not_finite(_recorded(algorithm)) if exact else None
            ranks = f" of process {', '.join(map(str, row.processes))}" if row.processes else ""
            raise self._error(f"{place or FLAGS.get(first, first)}{ranks}", row.iterations)

    def check_samples(self, row: LogRow, num_envs: int, replay: str | None) -> None:
        """Raise TaskError if every env diverged in every step of the interval; `replay`: command to replay it."""
        if row.flags.get("check/valid", 1.0):
            return
        bad = row.numbers["sim/bad_actions"] == row.numbers["sim/diverged"]
        if replay is None:
            cause = f"{'actions' if bad else 'observations or rewards'} are NaN or infinite"
            hint = "Try a lower learning rate" if bad else "Try running the env without a policy"
        else:
            cause = "actions or controls are NaN or infinite" if bad else "physics diverged"
            advice = "debug.check_task=true to locate the first such value" if bad else "a higher task.physics_hz"
            hint = f"Try {advice}. To replay the first failure: {replay}"
        problem = f"all {num_envs} envs failed in every step of {_when(row.iterations)}: {cause}"
        raise TaskError(problem, key=self._task_name, hint=hint)

    @property
    def learning(self) -> bool:
        """True if the newest update changed the policy."""
        return self._without_learning == 0

    def learns(self, row: LogRow) -> bool:
        """Return False each time the policy has not changed for `PATIENCE` iterations."""
        idle = row.flags.get("check/learned") == 0.0
        self._without_learning = self._without_learning + len(row.iterations) if idle else 0
        if self._without_learning < PATIENCE:
            return True
        self._without_learning = 0
        return False

    def no_gradient(self, row: LogRow, algorithm: Algorithm, replay: str) -> TaskError:
        """Build the error for a run without finite gradients."""
        recorded = [item for item in _recorded(algorithm) if item.name in FLAGS.values()]
        largest = [f"{item.name} reaches {item.value.abs().max():.3g}" for item in recorded]
        sizes = f" ({', '.join(largest)})" if largest else ""
        problem = f"no finite gradient in {PATIENCE} or more iterations, up to iteration {row.iterations[-1]}{sizes}"
        hint = f"Try smaller rewards or loss coefficients, or a lower learning rate. To replay the iteration: {replay}"
        return TaskError(problem, key=self._task_name, hint=hint)

    def check_policy(self, weights: Mapping[str, Tensor], iteration: int) -> None:
        """Raise TaskError for non-finite policy weights; call before saving, since metrics rows may be late."""
        for name, value in weights.items():
            if not torch.isfinite(value).all():
                raise self._error(f"the policy ({name})", range(iteration, iteration + 1))

    def _error(self, subject: str, iterations: range) -> TaskError:
        problem = f"{subject} is not finite in {_when(iterations)}; all checkpoints are from earlier iterations"
        return TaskError(problem, key=self._task_name, hint="Try debug.check_task=true to report the hook and step")


def _when(iterations: range) -> str:
    first, last = iterations[0], iterations[-1]
    return f"iteration {last}" if first == last else f"iterations {first} to {last}"


def _recorded(algorithm: Algorithm) -> list[RecordedTensor]:
    """Return this iteration's observations and rewards, as stored by an algorithm and its extensions."""
    owners = algorithm, *getattr(algorithm, "extensions", {}).values()
    memories = {id(x): x for it in owners for x in (it, *attributes(it).values()) if isinstance(x, Recorder)}
    return [item for memory in memories.values() for item in memory.recorded(algorithm.horizon)]


def _first_not_finite(recorded: Sequence[RecordedTensor]) -> str | None:
    """Describe the first non-finite value and its index; None if all are finite."""
    for item in recorded:
        bad = ~torch.isfinite(item.value)
        if bad.any():
            index = bad.nonzero()[0].tolist()
            where = [f"group {item.group!r}"] * bool(item.group)
            where += [f"{axis} {number}" for axis, number in zip(item.axes, index, strict=True) if axis]
            return f"{item.name} ({', '.join(where)})"
    return None
