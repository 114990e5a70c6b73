"""Writing by masks, and to some columns of an array."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Shaped
from torch import Tensor


def write_where(mask: Bool[Tensor, "..."], value: Shaped[Tensor, "..."], target: Shaped[Tensor, "..."]) -> None:
    """Writes `value` into `target` where the mask is true; all three broadcast to the target's shape."""
    if torch.compiler.is_compiling():  # the compiler takes no view as `out`, and makes one kernel of the two
        target.copy_(torch.where(mask, value, target))
    else:
        torch.where(mask, value, target, out=target)


def columns(numbers: Sequence[int], device: torch.device) -> slice | Tensor:
    """Returns the columns of these numbers: a slice, which gives views, if they are one run; else an index."""
    if not numbers or list(numbers) == list(range(numbers[0], numbers[0] + len(numbers))):
        return slice(numbers[0], numbers[0] + len(numbers)) if numbers else slice(0, 0)
    return torch.tensor(numbers, dtype=torch.int64, device=device)


def read_columns(source: Shaped[Tensor, "envs all *rest"], found: slice | Tensor) -> Shaped[Tensor, "envs some *rest"]:
    """Returns `columns` of an array: a view of a slice, else a copy."""
    return source[:, found] if isinstance(found, slice) else source.index_select(1, found)


def write_columns(
    target: Shaped[Tensor, "envs all *rest"], found: slice | Tensor, value: Shaped[Tensor, "envs some *rest"]
) -> None:
    """Writes values into `columns` of an array."""
    if isinstance(found, slice):
        target[:, found].copy_(value)
    else:
        target.index_copy_(1, found, value.to(target.dtype))
