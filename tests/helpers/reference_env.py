"""Reference env, equal to the one inside an adapter under test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import gpusim_rl
from gpusim_rl.env import Step, VecEnv
from gpusim_rl.testing.sync_counter import SyncCounter
from helpers.training import Faulty, FaultyConfig

NUM_ENVS = 8


def make(**task: Any) -> VecEnv:
    """Build a Cartpole with 8 envs and a time limit of 12 steps; `task` has settings of `FaultyConfig`."""
    cfg = FaultyConfig(
        **{"episode_length": 12, "randomize_episode_start": False, "max_force": 100.0, "reset_distance": 0.3, **task}
    )
    return gpusim_rl.make_env(Faulty, cfg, num_envs=NUM_ENVS, device="cpu", seed=3)


class ReferenceEnv:
    def __init__(self, **task: Any) -> None:
        self.env = make(**task)
        self.before = self.env.reset()  # an adapter resets too
        self._actions = torch.Generator().manual_seed(0)

    def action(self) -> Tensor:
        return torch.empty(NUM_ENVS, self.env.num_actions).uniform_(-1.5, 1.5, generator=self._actions)

    def step(self, action: Tensor) -> Step:
        step = self.env.step(action)
        self.before = step.obs
        return step


def count_syncs(env: VecEnv, call: Callable[[], Any]) -> SyncCounter:
    """Count the syncs of `call` without CPU physics."""
    with SyncCounter() as syncs:
        for method in ("step", "reset", "refresh", "draw"):
            original = getattr(env.sim, method)

            def without_counting(*args: Any, original: Callable[..., Any] = original) -> None:
                with syncs.pause():
                    original(*args)

            setattr(env.sim, method, without_counting)
        call()
    return syncs
