"""Masked and indexed writes, and shape checks of task inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Shaped
from torch import Tensor

from gpusim_rl.errors import TaskError


def write_where(mask: Bool[Tensor, "..."], value: Shaped[Tensor, "..."], target: Shaped[Tensor, "..."]) -> None:
    """Write `value` into `target` where the mask is true; mask and value broadcast."""
    write_result(target, torch.where, mask, value, target)


def write_result(target: Shaped[Tensor, "..."], function: Callable[..., Tensor], *arguments: Tensor) -> None:
    """Write the result of a torch function with an `out` argument into `target`, which may be a view."""
    if torch.compiler.is_compiling():  # the compiler fuses these operations, but rejects views as `out`
        target.copy_(function(*arguments))
    else:
        function(*arguments, out=target)


def columns(numbers: Sequence[int], device: torch.device) -> slice | Tensor:
    """Return an index of these columns: a slice if they are contiguous (for views, not copies), else a tensor."""
    if not numbers or list(numbers) == list(range(numbers[0], numbers[0] + len(numbers))):
        return slice(numbers[0], numbers[0] + len(numbers)) if numbers else slice(0, 0)
    return torch.tensor(numbers, dtype=torch.int64, device=device)


def read_columns(source: Shaped[Tensor, "envs all *rest"], found: slice | Tensor) -> Shaped[Tensor, "envs some *rest"]:
    """Return the columns of an array that an index from `columns` selects: a view for a slice, else a copy."""
    return source[:, found] if isinstance(found, slice) else source.index_select(1, found)


def write_columns(
    target: Shaped[Tensor, "envs all *rest"], found: slice | Tensor, value: Shaped[Tensor, "envs some *rest"]
) -> None:
    """Write values into the columns of an array that an index from `columns` selects."""
    if isinstance(found, slice):
        target[:, found].copy_(value)
    else:
        target.index_copy_(1, found, value.to(target.dtype))


def check_shape(key: str, value: object, shape: tuple[int, ...], names: Sequence[str] = (), hint: str = "") -> None:
    """Raise TaskError unless `value` is a tensor of this shape; torch would broadcast a smaller one."""
    if isinstance(value, Tensor) and value.shape == shape:
        return
    got = list(value.shape) if isinstance(value, Tensor) else type(value)
    if isinstance(value, Tensor) and value.shape in (shape[1:], (1, *shape[1:])):
        hint = f"Try .expand({', '.join(map(str, shape))}) to use the same value in all envs"
    of = f" for {list(names)}" if names else ""
    raise TaskError(key=key, expected=f"a tensor of shape {list(shape)}{of}", got=got, hint=hint)
