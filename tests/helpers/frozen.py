"""Networks of a user's own, some layers of which do not learn."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class HalfFrozen(nn.Sequential):
    """Two layers, the first of which is frozen."""

    def __init__(self, size: int, cfg: Any) -> None:
        super().__init__(nn.Linear(size, 8).requires_grad_(False), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.out_size = 8


class Frozen(HalfFrozen):
    """Layers that are all frozen: what is behind them learns."""

    def __init__(self, size: int, cfg: Any) -> None:
        super().__init__(size, cfg)
        self.requires_grad_(False)


class Detached(HalfFrozen):
    """Layers without a gradient, although their parameters want one."""

    def forward(self, input: Tensor) -> Tensor:
        with torch.no_grad():
            return super().forward(input)


class FrozenEncoder(nn.Module):
    """The mean of an image, through a frozen layer."""

    def __init__(self, shape: Any, cfg: Any) -> None:
        super().__init__()
        self.layer, self.out_size = nn.Linear(shape[2], 4).requires_grad_(False), 4

    def forward(self, images: Tensor) -> Tensor:
        return self.layer(images.mean(dim=(2, 3)))
