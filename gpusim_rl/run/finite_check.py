"""Stops a run when an observation, a reward, a loss or the policy is NaN or infinite, and says which and where.

A NaN in the physics is another thing: `Sim.diverged` finds it, the env is reset, and `env/nan_guard.py` keeps the state
before it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gpusim_rl.errors import TaskError
from gpusim_rl.learn.algorithm import Algorithm, Recorded
from gpusim_rl.run.log_interval import LogRow

FLAGS = {"check/obs": "an observation", "check/reward": "a reward", "loss/value": "the loss"}


class FiniteCheck:
    """Looks at rows of metrics, and at the policy before it is saved.

    Args:
        task_name: For the message.
    """

    def __init__(self, task_name: str) -> None:
        self._task_name = task_name

    def check_row(self, row: LogRow, iteration: int, algorithm: Algorithm) -> None:
        """Stops the run if a row says that something was not finite.

        Args:
            row: Of a log interval.
            iteration: Iterations done.
            algorithm: What it has recorded tells where, if it is still of that interval.

        Raises:
            TaskError: With what it was, where (if this is still known) and when.
        """
        numbers = {**row.flags, **row.numbers}
        checked = [name for name in numbers if name.startswith(("check/", "loss/"))]
        bad = sorted(
            (n for n in checked if not _is_finite(numbers[n])),
            key=lambda n: (n.startswith("loss/"), n != "loss/value", n),
        )
        if bad:
            exact = len(row.iterations) == 1 and row.iterations[-1] == iteration
            found = _first_not_finite(algorithm.recorded()) if exact else None
            raise self._error(found or FLAGS.get(bad[0], bad[0]), row.iterations)

    def check_policy(self, weights: Mapping[str, Tensor], iteration: int) -> None:
        """Stops the run before a checkpoint of a policy that is not finite: rows may be late or rare.

        Raises:
            TaskError: With the first bad tensor.
        """
        for name, value in weights.items():
            if not torch.isfinite(value).all():
                raise self._error(f"the policy ({name})", range(iteration, iteration + 1))

    def _error(self, what: str, iterations: range) -> TaskError:
        first, last = iterations[0], iterations[-1]
        when = f"iteration {last}" if first == last else f"iterations {first} to {last}"
        return TaskError(
            f"{self._task_name}: {what} is not finite in {when}; all checkpoints are from before it."
            " Try debug.check_task=true to name the hook and the step"
        )


def _first_not_finite(recorded: Sequence[Recorded]) -> str | None:
    """The first tensor with a value that is not finite, and where in it."""
    for item in recorded:
        bad = ~torch.isfinite(item.value)
        if bad.any():
            index = bad.nonzero()[0].tolist()
            where = [f"group {item.group!r}"] * bool(item.group)
            where += [f"{axis} {number}" for axis, number in zip(item.axes, index, strict=True) if axis]
            return f"{item.what} ({', '.join(where)})"
    return None


def _is_finite(value: float | None) -> bool:
    return value is None or math.isfinite(value)
