"""What a task asks of each env: commands that a policy shall follow, and levels of difficulty."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gpusim_rl.env.task import Task, TaskPart
from gpusim_rl.errors import ConfigError


class Commands(TaskPart):
    """Named numbers that the policy is told to follow, drawn uniformly from their ranges for each env.

    Args:
        task: The task that they belong to; its random numbers are used.
        ranges: Name of each command and the interval that it is drawn from.
        interval: After this long [s] an env gets new commands; None leaves them until `resample`.

    Attributes:
        value: The commands in the order of `ranges`, shape [num_envs, num_commands]; zero until `resample`.

    Raises:
        ConfigError: A range is not (low, high), or the interval is shorter than a control step.

    Example:
        self.commands = Commands(self, {"speed": (0.0, 2.0), "turn": (-1.0, 1.0)}, interval=10.0)  # in __init__
        self.commands.resample(where)  # in reset
        self.commands.advance()  # in advance
    """

    def __init__(
        self, task: Task[Any], ranges: Mapping[str, Sequence[float]], *, interval: float | None = None
    ) -> None:
        for name, limits in ranges.items():
            if len(limits) != 2 or limits[0] > limits[1]:
                raise ConfigError(f"command {name!r}: expected a range [low, high], got {list(limits)}")
        if interval is not None and interval < task.dt:
            raise ConfigError(f"commands: expected an interval of at least a step of {task.dt:g} s, got {interval:g}")
        self.names = list(ranges)
        self._random = task.random
        self._low, self._high = torch.tensor(list(ranges.values()), device=task.device).float().unbind(dim=1)
        self._steps = None if interval is None else round(interval / task.dt)
        self._age = torch.zeros(task.num_envs, dtype=torch.int64, device=task.device)  # control steps since drawn
        self.value: Float[Tensor, "envs commands"] = torch.zeros(task.num_envs, len(ranges), device=task.device)

    def __getitem__(self, name: str) -> Float[Tensor, " envs"]:
        """One command; a view."""
        return self.value[:, self.names.index(name)]

    def resample(self, where: Bool[Tensor, " envs"]) -> None:
        """Draws new commands in the envs of the mask."""
        new = self._random.uniform(self._low, self._high, len(self.names))
        self.value.copy_(torch.where(where[:, None], new, self.value))
        self._age.masked_fill_(where, 0)

    def advance(self) -> None:
        """Counts a control step; envs whose interval is over get new commands."""
        if self._steps is not None:
            self._age += 1
            self.resample(self._age >= self._steps)


class Levels(TaskPart):
    """How difficult each env is: a curriculum that goes up where the policy copes, and down where it fails.

    An env that masters the top goes on at a random level, so that no level is forgotten (Rudin et al. 2021, Learning
    to Walk in Minutes, arXiv 2109.11978, section 3).

    Args:
        task: The task that they belong to; its random numbers are used.
        count: Number of levels.
        initial: Level of each env at the start.

    Attributes:
        value: Level of each env, int64 [num_envs], in [0, count).
    """

    def __init__(self, task: Task[Any], count: int, *, initial: Int[Tensor, " envs"]) -> None:
        self.count = count
        self._random = task.random
        self.value = initial.to(task.device, torch.int64).clamp(0, count - 1)

    def move(self, *, up: Bool[Tensor, " envs"], down: Bool[Tensor, " envs"]) -> None:
        """Moves the envs of the masks one level up or down; in both masks they stay, and so below the lowest."""
        level = (self.value + up.long() - down.long()).clamp(min=0)
        self.value.copy_(torch.where(level < self.count, level, self._random.integers(0, self.count)))
