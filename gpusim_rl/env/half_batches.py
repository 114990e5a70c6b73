"""Two halves of the envs: one steps while the policy chooses actions for the other one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from queue import SimpleQueue
from threading import Thread
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpusim_rl.env.environment import Environment, Observation, Step

CLOSE_S = 2.0
"""How long the end of a training waits for a control step that is under way [s]."""


class _Stepper:
    """Steps envs in a thread. It ends with the process, also where a step never does."""

    def __init__(self, env: Environment, name: str) -> None:
        self._env = env
        self._actions: SimpleQueue[Tensor | None] = SimpleQueue()
        self._results: SimpleQueue[Step | Exception] = SimpleQueue()
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (action := self._actions.get()) is not None:
            try:
                self._results.put(self._env.step(action))
            except Exception as error:
                self._results.put(error)

    def begin(self, action: Tensor) -> None:
        self._actions.put(action)

    def end(self) -> Step:
        result = self._results.get()
        if isinstance(result, Exception):
            raise result
        return result

    def close(self) -> None:
        self._actions.put(None)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._env.close()


class HalfBatches(Environment):
    """Envs of another library in two halves, each stepped in a thread of its own.

    A thread waits for processes, or for code that needs no Python, and meanwhile Python computes the actions of the
    other half. So this pays where the library has processes or threads: Gymnasium's `AsyncVectorEnv`, EnvPool.

    `step` works as that of every environment. `begin` and `end` do it for one half. The first half has the envs 0 to
    N/2 - 1.

    Attributes:
        rows: Numbers of the envs in each half.
    """

    resumable = False

    def __init__(self, first: Environment, second: Environment) -> None:
        self._halves = first, second
        half = first.num_envs
        self.rows = slice(0, half), slice(half, half + second.num_envs)
        self.num_envs, self.device, self.obs_sizes = half + second.num_envs, first.device, first.obs_sizes
        self.images, self.final_images = first.images, first.final_images
        self.action_space, self.num_actions = first.action_space, first.num_actions
        self.max_episode_length = first.max_episode_length
        self.steps_between_truncations = first.steps_between_truncations
        self.frames_per_s, self.summary = first.frames_per_s, f"{first.summary}, two halves in turn"
        self._steppers = [_Stepper(env, f"half {number}") for number, env in enumerate(self._halves)]

    def begin(self, half: int, action: Tensor) -> None:
        """Begins a control step of half 0 or 1, with its actions, shape [N/2, num_actions]."""
        self._steppers[half].begin(action)

    def end(self, half: int) -> Step:
        """Waits for the end of the step that began; raises what `step` of the half raises."""
        return self._steppers[half].end()

    def step(self, action: Tensor) -> Step:
        """Advances all envs by one control step, both halves at once."""
        for half, rows in enumerate(self.rows):
            self.begin(half, action[rows])
        return joined([self.end(half) for half in range(2)])

    def reset(self) -> Observation:
        """Begins an episode in every env."""
        first, second = (env.reset() for env in self._halves)
        return {group: torch.cat([value, second[group]]) for group, value in first.items()}

    def render(self) -> list[np.ndarray]:
        """Returns pictures of the envs."""
        return [picture for env in self._halves for picture in env.render()]

    def close(self) -> None:
        """Ends the envs."""
        for stepper in self._steppers:
            stepper.close()


def joined(steps: Sequence[Step]) -> Step:
    """Returns steps of some envs each as one step of all of them."""

    def together(values: Sequence[Any]) -> Any:
        if isinstance(values[0], dict):
            like = {key: item for value in reversed(values) for key, item in value.items()}
            missing = {key: torch.full_like(item, torch.nan) for key, item in like.items() if item.is_floating_point()}
            return {key: together([value.get(key, missing.get(key)) for value in values]) for key in like}
        return None if values[0] is None else torch.cat(list(values))

    return Step(*(together([getattr(step, field.name) for step in steps]) for field in dataclasses.fields(Step)))
