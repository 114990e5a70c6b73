"""A rollout in which half of the envs step while the policy chooses actions for the other half."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from gpusim_rl.env import Step
from gpusim_rl.env.device_env import moved
from gpusim_rl.env.half_batches import HalfBatches, joined
from gpusim_rl.learn.algorithm import Algorithm
from gpusim_rl.run.timing import PhaseTimer


@runtime_checkable
class Divisible(Protocol):
    """An algorithm that can act for half of the envs while the other half steps."""

    def view(self, envs: slice) -> Algorithm:
        """Returns the same algorithm for some rows of envs: its `act` and `record` use the memory of this one."""
        ...


def overlapped_steps(
    env: HalfBatches, halves: Sequence[Algorithm], obs: dict[str, Tensor], device: torch.device, timer: PhaseTimer
) -> Iterator[Step]:
    """Yields the control steps of a rollout. Each half is recorded as soon as it has stepped, and then acts at once.

    Args:
        env: Environments that step in halves.
        halves: `Divisible.view` of each half.
        obs: Observations of all envs to act on; overwritten, at the end by those to act on next.
        device: Device of the learner.
        timer: Timer, whose `simulate` is the time in which the policy waits.
    """
    horizon, actions = halves[0].horizon, [torch.empty(0)] * len(halves)
    views = [{group: value[rows] for group, value in obs.items()} for rows in env.rows]
    for number in range(horizon + 1):
        steps = []
        for half, (algorithm, view) in enumerate(zip(halves, views, strict=True)):
            if number > 0:
                with timer("simulate"):
                    steps.append(moved(env.end(half), device))
                with timer("policy"):
                    algorithm.record(actions[half], steps[half])
                    for group, value in view.items():
                        value.copy_(steps[half].obs[group])
            if number < horizon:
                with timer("policy"):
                    actions[half] = algorithm.act(view)
                env.begin(half, actions[half].to(env.device))
        if number > 0:
            yield joined(steps)
