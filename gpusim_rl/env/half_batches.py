"""Two halves of the envs: one steps while the policy chooses actions for the other one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpusim_rl.env.environment import Environment, Observation, Step
from gpusim_rl.spaces import ActionSpace


class HalfBatches(Environment):
    """Envs of another library in two halves, each stepped in a thread of its own.

    A thread waits for processes, or for code that needs no Python, and meanwhile Python computes the actions of the
    other half. So this pays where the library has processes or threads: Gymnasium's `AsyncVectorEnv`, EnvPool.

    `step` works as that of every environment. `begin` and `end` are its two parts, for one half.

    Args:
        first: Of envs 0 to N/2 - 1.
        second: Of the others.

    Attributes:
        rows: Which envs are in each half.
    """

    resumable = False

    def __init__(self, first: Environment, second: Environment) -> None:
        self._halves = first, second
        half = first.num_envs
        self.rows = slice(0, half), slice(half, half + second.num_envs)
        self.num_envs, self.num_actions = half + second.num_envs, first.num_actions
        self.device, self.obs_sizes = first.device, first.obs_sizes
        # each half always in the same thread
        self._threads = [ThreadPoolExecutor(1, thread_name_prefix=f"half {number}") for number in range(2)]
        self._pending: list[Future[Step] | None] = [None, None]

    def begin(self, half: int, action: Tensor) -> None:
        """Begins a control step.

        Args:
            half: Of which half, 0 or 1.
            action: Its actions, [N/2, num_actions].
        """
        self._pending[half] = self._threads[half].submit(self._halves[half].step, action)

    def end(self, half: int) -> Step:
        """Waits for the end of the step that began; raises what `step` of the half raises."""
        pending, self._pending[half] = self._pending[half], None
        assert pending is not None, "begin() comes before end()"
        return pending.result()

    def step(self, action: Tensor) -> Step:
        """Advances all envs by one control step, both halves at once."""
        for half, rows in enumerate(self.rows):
            self.begin(half, action[rows])
        return joined([self.end(half) for half in range(2)])

    def reset(self) -> Observation:
        """Begins an episode in every env."""
        for half, pending in enumerate(self._pending):
            if pending is not None:  # a signal came between begin() and end()
                self.end(half)
        parts = [env.reset() for env in self._halves]
        return {group: torch.cat([part[group] for part in parts]) for group in parts[0]}

    @property
    def action_space(self) -> ActionSpace:
        """The actions that `step` takes."""
        return self._halves[0].action_space

    @property
    def max_episode_length(self) -> int:
        """Time limit of an episode [control steps]."""
        return self._halves[0].max_episode_length

    @property
    def steps_between_truncations(self) -> int:
        """An env is truncated at most once in so many control steps."""
        return self._halves[0].steps_between_truncations

    @property
    def summary(self) -> str:
        """What the start of a run tells of it."""
        return f"{self._halves[0].summary}, two halves in turn"

    @property
    def frames_per_s(self) -> float:
        """Control steps in a second of what `render` shows [Hz]."""
        return self._halves[0].frames_per_s

    def render(self) -> list[np.ndarray]:
        """Pictures of the envs."""
        return [picture for env in self._halves for picture in env.render()]

    def state_dict(self) -> dict[str, Any]:
        """Nothing: no library lets envs be saved."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> Observation:
        """Begins new episodes."""
        return self.reset()

    def begin_from(self, state: dict[str, Any]) -> Observation:
        """Begins new episodes; nothing of another run is of use."""
        return self.reset()

    def close(self) -> None:
        """Ends the envs."""
        for thread in self._threads:
            thread.shutdown()
        for env in self._halves:
            env.close()


def joined(steps: Sequence[Step]) -> Step:
    """Steps of some envs each, as one of all of them."""

    def together(values: Sequence[Any]) -> Any:
        if isinstance(values[0], dict):
            return {key: together([value[key] for value in values]) for key in values[0]}
        return None if values[0] is None else torch.cat(list(values))

    return Step(*(together([getattr(step, field.name) for step in steps]) for field in dataclasses.fields(Step)))
