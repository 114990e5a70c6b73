"""Image noise: a random shift and brightness for each env and control step.

Policies act on and learn from the same noisy bytes, so that PPO's ratio is 1 before its first update.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from gpusim_rl.env.random import EnvRandom
from gpusim_rl.env.stateful import SeededDraws
from gpusim_rl.errors import ConfigError
from gpusim_rl.images import shifted
from gpusim_rl.settings.checks import build
from gpusim_rl.settings.schema import Natural, Rule
from gpusim_rl.spaces import ImageShape


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSettings:
    """Settings of an image group in `task.observations`."""

    shift: Natural = 0  # maximum along each axis [pixels]; the border is repeated
    brightness: Annotated[
        tuple[float, float], Rule("[min, max] with 0 <= min <= max", lambda x: 0.0 <= x[0] <= x[1] < math.inf)
    ] = (1.0, 1.0)  # range of the factor on all bytes; the results are clamped to 0..255


class ImageNoise(SeededDraws):
    """Noise of the image groups in `task.observations`: current `shifts` [pixels] and brightness `factors` by group."""

    _stream = 1 << 34

    def __init__(
        self,
        settings: Mapping[str, Any],
        images: Mapping[str, ImageShape],
        num_envs: int,
        device: torch.device,
        seed: int,
    ) -> None:
        specs = {group: build(ImageSettings, node, f"task.observations.{group}") for group, node in settings.items()}
        for group, spec in specs.items():
            height, width, _ = images[group]
            if spec.shift >= min(height, width):
                expected = f"less than the shorter side of the image ({height} x {width} pixels)"
                raise ConfigError(
                    key=f"task.observations.{group}.shift", expected=expected, got=spec.shift, hint="Try 2"
                )
        self._settings = {group: dataclasses.asdict(spec) for group, spec in specs.items()}
        self._moves = {group: spec.shift for group, spec in specs.items() if spec.shift}
        self._ranges = {group: spec.brightness for group, spec in specs.items() if spec.brightness != (1.0, 1.0)}
        self._random = EnvRandom(num_envs, device, seed + self._stream)
        self.shifts = {group: torch.zeros(num_envs, 2, dtype=torch.int64, device=device) for group in self._moves}
        self.factors = {group: torch.ones(num_envs, 1, 1, 1, device=device) for group in self._ranges}
        self.draw()

    def draw(self) -> None:
        """Draw the noise for the next frames; call it once per control step, before the frames are rendered."""
        for group, most in self._moves.items():
            self.shifts[group].copy_(self._random.integers(-most, most + 1, 2))
        for group, (low, high) in self._ranges.items():
            self.factors[group].copy_(self._random.uniform(low, high, 1, 1, 1))

    def apply(self, group: str, images: Tensor) -> Tensor:
        """Apply the current noise to a group's images, uint8 [num_envs, height, width, channels]."""
        if group in self.shifts:
            images = shifted(images, *self.shifts[group].unbind(dim=1))
        if group in self.factors:  # rounded: a factor of 1 changes nothing
            images = (images * self.factors[group]).round_().clamp_(0.0, 255.0).to(torch.uint8)
        return images

    _draw_step = draw
