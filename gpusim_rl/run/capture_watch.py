"""Detection of values that a CUDA graph would freeze: two eager calls are compared operator by operator."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gpusim_rl.machine.source_location import locate

LIFT = torch.ops.aten.lift_fresh.default  # makes torch.tensor(numbers)
PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, type(None))  # of a generator, torch makes wrappers
SHORT = 16  # maximum elements of such a tensor, to compare values
CHANGED = "a graph would repeat the same. Try a tensor that is written in place"


class CaptureWatch(TorchDispatchMode):
    """Record of the operators in a block; with `before`, each is compared with the record of an earlier block.

    A graph repeats an operator with the same numbers and addresses. Thus neither may differ: arguments that are no
    tensors, host tensors of one number, and addresses of tensors that an operator reads and the block hasn't made.
    Tensors in attributes of `stateful` objects may be replaced (`in_place`): their names count instead.

    Attributes:
        difference: First difference from `before`, with operator and source line; "" if there is none.
    """

    def __init__(self, before: CaptureWatch | None = None, stateful: Sequence[object] = ()) -> None:
        super().__init__()
        self.difference = ""
        self._names: dict[int, str] = {}
        for owner in stateful:
            for name, value in vars(owner).items():
                for tensor in value if isinstance(value, tuple) else (value,):
                    if isinstance(tensor, Tensor):
                        self._names.setdefault(storage_of(tensor), f"{type(owner).__name__}.{name}")
        self._records: list[tuple[Any, list[str], list[Any]]] = []
        self._expected = iter(before._records) if before is not None else None
        self._made: set[int] = set()  # addresses of the block's own storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        storages = [storage_of(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
        if func.namespace not in ("prim", "profiler") and not self.difference:
            self._check(func, leaves)
        result = func(*args, **kwargs)
        given = storages if func is not LIFT else ()
        self._made |= {storage_of(x) for x in tree_leaves(result) if isinstance(x, Tensor)}.difference(given)
        return result

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self._expected is not None and not self.difference and (left := next(self._expected, None)):
            self.difference = f"a call ends before {left[0]}, which followed in the call before it: {CHANGED}"

    def _check(self, func: Any, leaves: list[Any]) -> None:
        on_device = any(isinstance(leaf, Tensor) and leaf.device.type != "cpu" for leaf in leaves)
        numbers, read = [], []
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                numbers.append(repr(leaf) if isinstance(leaf, PLAIN) else type(leaf).__name__)
            elif leaf.device.type == "cpu" and (
                (leaf.dim() == 0 and on_device) or (func is LIFT and leaf.numel() <= SHORT)
            ):
                numbers.append(repr(leaf.tolist()))
            elif storage_of(leaf) not in self._made:
                address = storage_of(leaf)
                read.append((self._names.get(address, address), leaf.storage_offset()))
        if self._expected is None:
            self._records.append((func, numbers, read))
            return
        expected = next(self._expected, (None, [], []))
        if (func, numbers, read) == expected:
            return
        if func is not expected[0]:
            changed = f"follows, not {expected[0]} as in the call before"
        elif numbers != expected[1]:
            new, old = next((a, b) for a, b in zip(numbers, expected[1], strict=False) if a != b)
            changed = f"uses {new}, not {old} as in the call before"
        else:
            changed = "reads another tensor than in the call before"
        self.difference = f"{func} at {locate(sys._getframe()) or 'an unknown line'} {changed}: {CHANGED}"


def storage_of(tensor: Tensor) -> int:
    """Return the address of a tensor's memory, without its offset."""
    return tensor.untyped_storage().data_ptr()
