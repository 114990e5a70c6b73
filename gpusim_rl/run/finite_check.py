"""Stops a run when an observation, a reward, a loss or the policy is NaN or infinite, and says which and where.

A NaN in the physics or in an action is another thing: the env is reset, and `env/nan_guard.py` keeps the state before
it. So is a gradient that is not finite: `learn/optimizer.py` skips it. A run ends where nothing else is left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from gpusim_rl.errors import TaskError
from gpusim_rl.learn.algorithm import Algorithm, RecordedTensor, Recorder
from gpusim_rl.run.held_objects import attributes
from gpusim_rl.run.log_interval import LogRow

FLAGS = {"check/obs": "an observation", "check/style": "an observation", "check/reward": "a reward"}
FLAGS |= {"loss/value": "the loss"}

PATIENCE = 3
"""Iterations in a row whose update may leave the policy as it was. One rollout with an absurd number costs one."""


class FiniteCheck:
    """Looks at rows of metrics, and at the policy before it is saved."""

    def __init__(self, task_name: str) -> None:
        self._task_name = task_name
        self._without_learning = 0  # iterations in a row

    def check_row(self, row: LogRow, iteration: int, algorithm: Algorithm) -> None:
        """Stop the run if a number of a row was not finite.

        Records of the algorithm tell where, if they are still of that interval.

        Raises:
            TaskError: The message has what, where (if this is still known) and when.
        """
        numbers = {**row.flags, **row.numbers}
        checked = {name: value for name, value in numbers.items() if name.startswith(("check/", "loss/"))}
        bad = [name for name, value in checked.items() if value is not None and not math.isfinite(value)]
        if bad:
            first = min(bad, key=lambda name: (name.startswith("loss/"), name != "loss/value", name))
            exact = len(row.iterations) == 1 and row.iterations[-1] == iteration
            place = _first_not_finite(_recorded(algorithm)) if exact else None
            among = f" of process {', '.join(map(str, row.processes))}" if row.processes else ""
            raise self._error(f"{place or FLAGS.get(first, first)}{among}", row.iterations)

    def check_samples(self, row: LogRow, num_envs: int, replay: Callable[[], str] | None) -> None:
        """Stop the run where every env diverged in every step of a log interval.

        Raises:
            TaskError: The message has the command that `replay` returns; None for envs of another library.
        """
        if row.flags.get("check/valid", 1.0):
            return
        bad = row.numbers["sim/bad_actions"] == row.numbers["sim/diverged"]
        if replay is None:
            cause = f"{'actions' if bad else 'observations or rewards'} are NaN or infinite"
            advice, shown = "a lower learning rate" if bad else "the env by itself", ""
        else:
            cause = "their actions or controls are NaN or infinite" if bad else "their physics diverged"
            advice = "debug.check_task=true to name them" if bad else "a higher task.physics_hz"
            shown = f"; {replay()} shows the first one"
        raise TaskError(
            f"{self._task_name}: {num_envs} of {num_envs} envs failed in every step of {_when(row.iterations)}, and"
            f" nothing is left to learn from: {cause}. Try {advice}{shown}"
        )

    @property
    def learning(self) -> bool:
        """The newest row tells of an update that changed the policy."""
        return self._without_learning == 0

    def learns(self, row: LogRow) -> bool:
        """Returns whether an update of the last iterations changed the policy; False once every `PATIENCE` of them."""
        idle = row.flags.get("check/learned") == 0.0
        self._without_learning = self._without_learning + len(row.iterations) if idle else 0
        if self._without_learning < PATIENCE:
            return True
        self._without_learning = 0
        return False

    def no_gradient(self, row: LogRow, algorithm: Algorithm, replay: str) -> TaskError:
        """Returns the error that ends a run whose gradients are not finite; `replay` is the command that shows it."""
        recorded = [item for item in _recorded(algorithm) if item.name in FLAGS.values()]
        largest = [f"{item.name} is up to {item.value.abs().max():.3g}" for item in recorded]
        sizes = f" ({', '.join(largest)})" if largest else ""
        return TaskError(
            f"{self._task_name}: no gradient was finite for {PATIENCE} iterations or more, up to"
            f" {row.iterations[-1]}, so nothing is learned{sizes}. Try smaller rewards, smaller coefficients of the"
            f" loss or a lower learning rate; {replay} shows it"
        )

    def check_policy(self, weights: Mapping[str, Tensor], iteration: int) -> None:
        """Raise TaskError before a checkpoint of a policy that is not finite: rows may be late or rare."""
        for name, value in weights.items():
            if not torch.isfinite(value).all():
                raise self._error(f"the policy ({name})", range(iteration, iteration + 1))

    def _error(self, subject: str, iterations: range) -> TaskError:
        return TaskError(
            f"{self._task_name}: {subject} is not finite in {_when(iterations)}; all checkpoints are from before it."
            " Try debug.check_task=true to name the hook and the step"
        )


def _when(iterations: range) -> str:
    first, last = iterations[0], iterations[-1]
    return f"iteration {last}" if first == last else f"iterations {first} to {last}"


def _recorded(algorithm: Algorithm) -> list[RecordedTensor]:
    """Records of this iteration in the memories of an algorithm and of its extensions."""
    owners = algorithm, *getattr(algorithm, "extensions", {}).values()
    memories = {id(x): x for it in owners for x in (it, *attributes(it).values()) if isinstance(x, Recorder)}
    return [item for memory in memories.values() for item in memory.recorded(algorithm.horizon)]


def _first_not_finite(recorded: Sequence[RecordedTensor]) -> str | None:
    """The first tensor with a value that is not finite, and where in it."""
    for item in recorded:
        bad = ~torch.isfinite(item.value)
        if bad.any():
            index = bad.nonzero()[0].tolist()
            where = [f"group {item.group!r}"] * bool(item.group)
            where += [f"{axis} {number}" for axis, number in zip(item.axes, index, strict=True) if axis]
            return f"{item.name} ({', '.join(where)})"
    return None
