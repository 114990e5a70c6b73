"""Action noise for exploration, white or correlated over time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from gpusim_rl.errors import ConfigError
from gpusim_rl.learn.algorithm import EnvSpec
from gpusim_rl.settings.schema import NoiseConfig
from gpusim_rl.spaces import Box


class ActionNoise:
    """Standard normal noise for the actions of all envs, optionally correlated over control steps.

    White noise averages out: it cannot hold a gripper closed. Correlated noise has the same marginal distribution, so
    log-probabilities are unchanged (Hollenstein et al. 2024, arXiv 2312.11091); its correlation over k steps is
    (1 - 1 / steps)^k:

        held      z' = z, or with probability 1 / steps a new number
        coloured  z' = (1 - 1 / steps) z + sqrt(1 - (1 - 1 / steps)^2) x a new number

    Each episode starts with fresh noise. `columns` beyond the actions are always white.
    """

    def __init__(
        self, cfg: NoiseConfig, env: EnvSpec, key: str, *, horizon: int, columns: int, device: torch.device
    ) -> None:
        space, num_envs = env.action_space, env.num_envs
        self._lasts, self._held = any(steps > 1.0 for steps in cfg.steps), cfg.kind == "held"
        if self._lasts and not isinstance(space, Box):
            hint = f"Try {key}.steps=[1]"
            raise ConfigError("values above 1 require continuous actions", key=f"{key}.steps", got=cfg.steps, hint=hint)
        if len(cfg.steps) not in (1, space.size):
            expected = "1 number" if space.size == 1 else f"1 or {space.size} numbers"
            hint = f"Try {key}.steps=[{cfg.steps[0]:g}], which applies to all actions"
            raise ConfigError(key=f"{key}.steps", expected=expected, got=cfg.steps, hint=hint)
        self._actions = space.size
        more = space.size if self._lasts and self._held else 0  # numbers that choose between new and held noise
        self._drawn = torch.zeros(horizon, num_envs, columns + more, device=device)
        self.now = torch.zeros(num_envs, columns, device=device)  # noise of the next step
        self._ended = torch.ones(num_envs, dtype=torch.bool, device=device)
        rate = 1.0 / torch.tensor(cfg.steps, device=device)
        self._keep, self._mix = 1.0 - rate, (1.0 - (1.0 - rate).square()).sqrt()
        self._quantile = torch.special.ndtri(rate)  # a normal number is below it with probability 1 / steps

    def begin_rollout(self, draw: Callable[[Tensor], object]) -> None:
        """Draw the noise of all steps with `draw`."""
        draw(self._drawn)
        self._next(0)

    def advance(self, t: int, done: Bool[Tensor, " envs"]) -> None:
        """Advance to step t of the rollout (after its last step: t = 0, no new noise); `done` marks ended episodes."""
        if self._lasts:
            self._ended.copy_(done)
        if t:  # fixed addresses, for CUDA graphs of single steps
            self._next(t)

    def begin_episodes(self) -> None:
        """Start new episodes in all envs."""
        self._ended.fill_(True)

    def _next(self, t: int) -> None:
        drawn, columns = self._drawn[t], self.now.shape[1]
        if not self._lasts:
            self.now.copy_(drawn)
            return
        new, old = drawn[:, : self._actions], self.now[:, : self._actions]
        if self._held:
            lasting = torch.where(drawn[:, columns:] < self._quantile, new, old)
        else:
            lasting = self._keep * old + self._mix * new
        lasting = torch.where(self._ended[:, None], new, lasting)
        self.now.copy_(torch.cat([lasting, drawn[:, self._actions : columns]], dim=1))

    def state_dict(self) -> dict[str, Any]:
        """Return the current noise and the mask of ended episodes; empty if the noise is white."""
        return {"now": self.now.clone(), "ended": self._ended.clone()} if self._lasts else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`, unless the noise is white now or was white in the checkpoint."""
        if state and self._lasts:
            self.now.copy_(state["now"])
            self._ended.copy_(state["ended"])
