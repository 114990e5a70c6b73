"""Detection of values that a CUDA graph would freeze, by comparing two eager calls operator by operator."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gpusim_rl.machine.source_location import locate

LIFT = torch.ops.aten.lift_fresh.default  # called by torch.tensor(values)
SHORT = 16  # maximum number of elements up to which torch.tensor(values) is compared by value
PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, type(None))  # argument types compared by value
CHANGED = "a CUDA graph would repeat the captured call. Try a tensor, updated in place"


class CaptureWatch(TorchDispatchMode):
    """Recorder of a call's operators; with `before`, finds the first difference from the earlier call.

    A CUDA graph repeats operators with the arguments and addresses of its capture. Two calls must therefore agree in
    arguments other than tensors, in host scalars, and in the addresses of tensors allocated before the call. Tensors in
    attributes of `stateful` objects may be replaced (`in_place` copies them back): they are compared by name.

    Attributes:
        difference: First difference, with operator and source line; "" if there is none.
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
        self._made: set[int] = set()  # addresses of storages allocated in this call

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
            self.difference = f"{left[0]} ran in the previous call only: {CHANGED}"

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
            changed = f"runs, but the previous call ran {expected[0] or 'no further operator'}"
        elif numbers != expected[1]:
            new, old = next((a, b) for a, b in zip(numbers, expected[1], strict=False) if a != b)
            changed = f"uses {new}, but the previous call used {old}"
        else:
            changed = "reads a different tensor than the previous call"
        self.difference = f"{func} at {locate(sys._getframe()) or 'an unknown line'} {changed}: {CHANGED}"


def storage_of(tensor: Tensor) -> int:
    """Return the address of a tensor's storage, which its views share."""
    return tensor.untyped_storage().data_ptr()
