"""Random envs for tests of algorithms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gpusim_rl.spaces import ImageShape


@dataclass
class RandomStep:
    """Result of a control step of `RandomEnv`, like `gpusim_rl.env.Step`."""

    obs: dict[str, Tensor]
    final_obs: dict[str, Tensor]
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    diverged: Tensor

    @property
    def done(self) -> Tensor:
        """Mask of envs in which a new episode begins, bool [num_envs]."""
        return self.terminated | self.truncated | self.diverged


class RandomEnv:
    """Envs with random observations and rewards; `ends`: fractions of terminated, truncated and diverged steps."""

    def __init__(
        self,
        num_envs: int,
        obs_sizes: Mapping[str, int] | None = None,
        num_actions: int = 3,
        *,
        seed: int = 0,
        ends: tuple[float, float, float] = (0.1, 0.1, 0.05),
        device: str = "cpu",
        images: Mapping[str, ImageShape] | None = None,
    ) -> None:
        self.num_envs, self.num_actions, self.ends, self.device = num_envs, num_actions, ends, device
        self.obs_sizes, self.images = dict(obs_sizes or {"policy": 5}), dict(images or {})
        self.generator = torch.Generator().manual_seed(seed)

    def _obs(self) -> dict[str, Tensor]:
        # an offset and a scale, so that normalisation has something to do
        shapes = {group: (self.num_envs, size) for group, size in self.obs_sizes.items()}
        obs = {group: 3.0 + 2.0 * torch.randn(shape, generator=self.generator) for group, shape in shapes.items()}
        for group, shape in self.images.items():
            size = (self.num_envs, *shape)
            obs[group] = torch.randint(256, size, dtype=torch.uint8, generator=self.generator)
        return {group: value.to(self.device) for group, value in obs.items()}

    def reset(self) -> dict[str, Tensor]:
        """Return observations [num_envs, size] and images."""
        return self._obs()

    def step(self, action: Tensor) -> RandomStep:
        """Return a random control step; actions have no effect."""
        kind = torch.rand(self.num_envs, generator=self.generator)
        bounds = torch.tensor(self.ends).cumsum(0)
        terminated, diverged = kind < bounds[0], (kind >= bounds[1]) & (kind < bounds[2])
        truncated = (kind >= bounds[0]) & (kind < bounds[1])
        reward = torch.randn(self.num_envs, generator=self.generator) * ~diverged
        masks = (value.to(self.device) for value in (reward, terminated, truncated, diverged))
        return RandomStep(self._obs(), self._obs(), *masks)
