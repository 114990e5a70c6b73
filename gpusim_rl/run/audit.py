"""Finds host syncs: what makes the host wait for the device, or moves data between them."""

from __future__ import annotations

import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operators whose result, or whose result's shape, must be known on the host.
_OPERATORS = frozenset(
    {
        "_local_scalar_dense",  # item(), float(t), int(t), bool(t), `if t:`
        "is_nonzero",
        "equal",
        "allclose",
        "nonzero",  # also where(mask), argwhere
        "masked_select",
        "_unique",
        "_unique2",
        "unique_dim",
        "unique_consecutive",
        "bincount",
    }
)
# An index that is a mask goes through `nonzero`. masked_fill_ and where do not.
_INDEXING = frozenset({"index", "index_put", "index_put_", "_index_put_impl_"})
_COPIES = frozenset({"_to_copy", "copy_"})
# On the CPU these move memory without an operator of their own, so they are caught where Python
# calls them. tensor() and as_tensor() copy from pageable host memory.
_CALLS: tuple[tuple[Any, str], ...] = (
    (Tensor, "item"),
    (Tensor, "cpu"),
    (Tensor, "numpy"),
    (Tensor, "tolist"),
    (Tensor, "__array__"),
    (torch, "tensor"),
    (torch, "as_tensor"),
)
# Frames between the operator and the line that asked for it.
_LIBRARY = re.compile(r"[/\\](torch|jaxtyping|beartype)[/\\]|^<")


class SyncCounter(TorchDispatchMode):
    """Counts host syncs while it is entered; on a CPU it tests code that is meant for CUDA.

    What happens inside one operator of the library is not seen, and need not be: the fused Adam
    step, for example, is one operator, whose CPU kernel reads step counter and learning rate from
    memory as the CUDA kernel reads them on the device. Adam's unfused step is counted.

    Attributes:
        counts: How often each kind of sync happened.
        places: `kind at file:line` of each, in order.

    Example:
        with SyncCounter() as syncs:
            ppo.update(rollout, last_obs, last_hidden)
        assert syncs.total == 0, syncs.places
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.places: list[str] = []
        self._paused = 0
        self._originals: list[tuple[Any, str, Any]] = []

    @property
    def total(self) -> int:
        """Syncs so far."""
        return sum(self.counts.values())

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Does not count inside: for what belongs on the host, such as physics on CPU threads."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def __enter__(self) -> SyncCounter:
        for owner, name in _CALLS:
            original = getattr(owner, name)
            self._originals.append((owner, name, original))
            setattr(owner, name, self._counted(name, original))
        super().__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        while self._originals:
            setattr(*self._originals.pop())

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Looks at one operator, then runs it."""
        kwargs = dict(kwargs or {})
        if not self._paused:
            name = func.overloadpacket.__name__
            if _syncs(name, args, kwargs):
                self._record(name)
        return func(*args, **kwargs)

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(first: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._paused and not (name == "as_tensor" and isinstance(first, Tensor)):
                self._record(name)
            with self.pause():  # one call, one sync
                return call(first, *args, **kwargs)

        return counted

    def _record(self, name: str) -> None:
        self.counts[name] += 1
        ours = [
            frame
            for frame in traceback.extract_stack(limit=40)
            if frame.filename != __file__ and not _LIBRARY.search(frame.filename)
        ]
        self.places.append(f"{name} at {ours[-1].filename}:{ours[-1].lineno}" if ours else name)


def _syncs(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    if name in _OPERATORS:
        return True
    if name == "repeat_interleave":  # the length of the result is the sum of the repeats
        return kwargs.get("output_size") is None and any(isinstance(a, Tensor) for a in args)
    if name in _INDEXING:
        indices = (i for i in args[1] if isinstance(i, Tensor))
        return any(index.dtype in (torch.bool, torch.uint8) for index in indices)
    if name in _COPIES:
        devices = {leaf.device.type for leaf in tree_leaves(args) if isinstance(leaf, Tensor)}
        target = kwargs.get("device")
        if target is not None:
            devices.add(torch.device(target).type)
        return len(devices) > 1 and "cpu" in devices
    return False
