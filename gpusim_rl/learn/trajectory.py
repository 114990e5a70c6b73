"""The control steps of a rollout, before a replay memory stores them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.utils._pytree import register_dataclass, tree_map

from gpusim_rl.learn.algorithm import EnvSpec, Observation, Outcome


@dataclass(slots=True)
class Trajectory:
    """Control steps, [T, N, ...] each, or one of them: what a `Replay` stores, and no more.

    It is written as a `Replay` is, for one that is elsewhere: on the host, or with the learner of an actor.
    """

    acted_on: dict[str, Tensor]
    action: Tensor
    final_obs: dict[str, Tensor]
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    diverged: Tensor
    t: int = field(default=0, init=False)
    """Control step that is written next."""

    @classmethod
    def empty(cls, horizon: int, env: EnvSpec, groups: Iterable[str], device: torch.device) -> Trajectory:
        """Makes room for a rollout of `horizon` steps, with these observation groups."""

        def zeros(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(horizon, env.num_envs, *size, dtype=dtype, device=device)

        groups = sorted(groups)
        obs, final_obs = ({group: zeros(env.obs_sizes[group]) for group in groups} for _ in range(2))
        terminated, truncated, diverged = (zeros(dtype=torch.bool) for _ in range(3))
        return cls(obs, zeros(env.action_space.size), final_obs, zeros(), terminated, truncated, diverged)

    def at(self, t: int) -> Trajectory:
        """Returns step t."""
        return tree_map(lambda x: x[t], self)

    def cut(self) -> None:
        """Does nothing: no rollout follows from another one."""

    def begin_rollout(self) -> None:
        """Makes the next step the first one of a rollout, also where the last one was left in the middle."""
        self.t = 0

    @torch.no_grad()
    def write(self, obs: Observation, action: Tensor, step: Outcome) -> None:
        """Keeps a control step; takes what `Replay.write` takes."""
        t, self.t = self.t, (self.t + 1) % len(self.reward)
        for group, memory in self.acted_on.items():
            memory[t].copy_(obs[group])
            self.final_obs[group][t].copy_(step.final_obs[group])
        self.action[t].copy_(action)
        for name in ("reward", "terminated", "truncated", "diverged"):
            getattr(self, name)[t].copy_(getattr(step, name))

    def latest(self) -> tuple[dict[str, Tensor], Bool[Tensor, "steps envs"], Float[Tensor, "steps envs"]]:
        """Returns observations [T, N, size], which of them did not diverge, and rewards."""
        return self.acted_on, ~self.diverged, self.reward


register_dataclass(Trajectory)
