"""User-defined networks with frozen layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class HalfFrozen(nn.Sequential):
    def __init__(self, size: int, cfg: Any) -> None:
        super().__init__(nn.Linear(size, 8).requires_grad_(False), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.out_size = 8


class Frozen(HalfFrozen):
    def __init__(self, size: int, cfg: Any) -> None:
        super().__init__(size, cfg)
        self.requires_grad_(False)


class Detached(HalfFrozen):
    """Layers without a gradient although their parameters require one."""

    def forward(self, input: Tensor) -> Tensor:
        with torch.no_grad():
            return super().forward(input)


class FrozenEncoder(nn.Module):
    """Mean of an image, through a frozen layer."""

    def __init__(self, shape: Any, cfg: Any) -> None:
        super().__init__()
        self.layer, self.out_size = nn.Linear(shape[2], 4).requires_grad_(False), 4

    def forward(self, images: Tensor) -> Tensor:
        return self.layer(images.mean(dim=(2, 3)))
