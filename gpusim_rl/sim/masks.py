"""Writing by masks."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Shaped
from torch import Tensor


def write_where(mask: Bool[Tensor, "..."], value: Shaped[Tensor, "..."], target: Shaped[Tensor, "..."]) -> None:
    """Writes `value` into `target` where the mask is true; all three broadcast to the target's shape."""
    if torch.compiler.is_compiling():  # the compiler takes no view as `out`, and makes one kernel of the two
        target.copy_(torch.where(mask, value, target))
    else:
        torch.where(mask, value, target, out=target)
