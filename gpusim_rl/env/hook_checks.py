"""Checks of what a task's hooks return: a wrong type, shape, device or value is one line that names the hook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gpusim_rl.env.observations import ObservationPart
from gpusim_rl.env.task import Task, TaskConfig
from gpusim_rl.errors import ConfigError, TaskError
from gpusim_rl.spaces import ActionSpace, Box, MultiDiscrete


class HookChecks:
    """Checks the hooks of one task.

    Checks of types and shapes cost nothing and run in every step. Checks of values (`finite`, `finite_value`) wait for
    the device. What hooks return is `Any` here: its type has not been checked yet.

    Args:
        name: Name of the task's class, for messages.
        num_envs: Number of envs.
        device: Device of the task's tensors.
    """

    def __init__(self, name: str, num_envs: int, device: torch.device) -> None:
        self._name = name
        self._num_envs = num_envs
        self._device = device

    def observation(self, obs: Any, sizes: Mapping[str, int], parts: Mapping[str, Sequence[ObservationPart]]) -> None:
        """Checks the result of `Task.observe`, a dict of groups.

        Args:
            obs: The observation groups.
            sizes: Known size of each group; empty before the first observation.
            parts: Known parts of the groups that name them; empty before the first observation.

        Raises:
            TaskError: A group is missing or wrong, or its parts are others than before.
        """
        hook = f"{self._name}.observe()"
        if not isinstance(obs, dict):
            kind = type(obs).__name__
            raise TaskError(f"{hook} returned {kind}, expected a tensor of shape [{self._num_envs}, size] or a dict")
        if "policy" not in obs:
            raise TaskError(f"{hook} returned the groups {list(obs)}, expected a group 'policy' among them")
        for group, value in obs.items():
            label = hook if list(obs) == ["policy"] else f"{hook}[{group!r}]"
            if not isinstance(value, dict):
                self.tensor(label, value, (self._num_envs, sizes.get(group)), torch.float32)
                continue
            known = {part.name: part.size for part in parts.get(group, ())}
            if not value or (known and list(value) != list(known)):
                raise TaskError(f"{label} returned the parts {list(value)}, expected {list(known) or 'at least one'}")
            for name, numbers in value.items():
                self.tensor(f"{label}[{name!r}]", numbers, (self._num_envs, known.get(name)), torch.float32)

    def reward_terms(self, terms: Any) -> None:
        """Checks the result of `Task.rewards`.

        Args:
            terms: Terms of the reward, by name.

        Raises:
            TaskError: It is no dict of tensors [num_envs], float32.
        """
        hook = f"{self._name}.rewards()"
        if not isinstance(terms, dict):
            raise TaskError(f"{hook} returned {type(terms).__name__}, expected a dict of named terms")
        if not terms:
            raise TaskError(f"{hook} returned no terms, expected a dict with at least one")
        for name, term in terms.items():
            self.tensor(f"{hook}[{name!r}]", term, (self._num_envs,), torch.float32)

    def stats(self, stats: Mapping[str, Any]) -> None:
        """Checks the result of `Task.stats`; raises TaskError where a number is no tensor [num_envs], float32."""
        for name, value in stats.items():
            self.tensor(f"{self._name}.stats()[{name!r}]", value, (self._num_envs,), torch.float32)

    def mask(self, hook: str, mask: Any) -> None:
        """Checks the result of a hook that selects envs; raises TaskError where it is no tensor [num_envs], bool."""
        self.tensor(f"{self._name}.{hook}()", mask, (self._num_envs,), torch.bool)

    def tensor(self, label: str, value: Any, shape: tuple[int | None, ...], dtype: torch.dtype) -> None:
        """Checks that a value is a tensor.

        Args:
            label: Name of the value, for the message.
            value: The value.
            shape: Expected shape; None = any size.
            dtype: Expected type of the numbers.

        Raises:
            TaskError: It is no tensor, or its shape, type or device is another one.
        """
        expected = "[" + ", ".join("size" if size is None else str(size) for size in shape) + "]"
        if not isinstance(value, Tensor):
            raise TaskError(f"{label} returned {type(value).__name__}, expected a tensor of shape {expected}")
        if value.ndim != len(shape) or any(n not in (None, m) for n, m in zip(shape, value.shape, strict=True)):
            raise TaskError(f"{label} returned shape {list(value.shape)}, expected {expected}")
        if value.dtype != dtype:
            raise TaskError(f"{label} returned {value.dtype}, expected {dtype}")
        if value.device.type != self._device.type:
            raise TaskError(f"{label} returned a tensor on {value.device}, expected {self._device}")

    def finite(
        self,
        hook: str,
        values: Mapping[str, Tensor],
        parts: Mapping[str, Sequence[ObservationPart]] | None = None,
    ) -> None:
        """Checks that all numbers are finite; waits for the device.

        Args:
            hook: Name of the hook, without brackets.
            values: Tensors by name, shape [num_envs] or [num_envs, size].
            parts: Named parts of the tensors' columns, for the message.

        Raises:
            TaskError: A number is NaN or infinite; the message names env and column.
        """
        for name, value in values.items():
            columns = [part.name for part in (parts or {}).get(name, ()) for _ in range(part.size * part.history)]
            self.finite_value(f"{self._name}.{hook}(): {name!r}", value, columns)

    def finite_value(self, label: str, value: Tensor, columns: Sequence[str] = ()) -> None:
        """Checks that all numbers of one tensor are finite; waits for the device.

        Args:
            label: Name of the tensor, for the message.
            value: The tensor, shape [num_envs] or [num_envs, size].
            columns: Name of the part that each column belongs to.

        Raises:
            TaskError: A number is NaN or infinite.
        """
        bad = ~torch.isfinite(value)
        if bool(bad.any()):
            env_id = int(bad.reshape(self._num_envs, -1).any(dim=1).int().argmax())
            number = int(bad[env_id].int().argmax()) if value.ndim > 1 else 0
            column = "" if value.ndim == 1 else f", column {number}"
            column += f" of {columns[number]!r}" if columns else ""
            raise TaskError(f"{label} is not finite (env {env_id}{column})")


def action_space(task: Task[Any], cfg: TaskConfig) -> ActionSpace:
    """The actions of a task, from its `num_actions` and `choices`.

    Raises:
        TaskError: The task did not set them, or to something else than positive ints.
        ConfigError: Discrete actions shall be noisy or late.
    """
    name = type(task).__name__
    num_actions = getattr(task, "num_actions", None)
    if not isinstance(num_actions, int) or num_actions < 1:
        raise TaskError(f"{name}.__init__ must set self.num_actions to a positive int, got {num_actions!r}")
    if task.choices is None:
        return Box(num_actions)
    counts = tuple(task.choices)
    if len(counts) != num_actions or not all(isinstance(count, int) and count > 1 for count in counts):
        raise TaskError(f"{name}.choices must be {num_actions} ints above 1, got {task.choices!r}")
    if cfg.randomize and not cfg.randomization_params.keys().isdisjoint(("actions", "latency")):
        raise ConfigError(
            f"task.randomization_params: {name} has discrete actions, which cannot be noisy or late here; try without"
            " actions and latency"
        )
    return MultiDiscrete(counts)
