"""Counter of host syncs and host-device copies; inspects every torch operator, also on the CPU."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gpusim_rl.machine.source_location import locate
from gpusim_rl.run.phases import OUTSIDE, reported_phase

# Operators that need their result or its shape on the host. `_local_scalar_dense` is item(), float(t) and `if t:`;
# `nonzero` also where(mask) and argwhere.
_SCALARS = frozenset({"_local_scalar_dense", "is_nonzero"})
_UNIQUE = frozenset({"_unique", "_unique2", "unique_dim", "unique_consecutive"})
_SHAPES = frozenset({"equal", "allclose", "histc", "nonzero", "masked_select", "bincount", *_UNIQUE})
# masks as indices go through `nonzero`, unlike masked_fill_ and where
_INDEXING = frozenset({"index", "index_put", "index_put_", "_index_put_impl_"})
_COPIES = frozenset({"_to_copy", "copy_"})
_ALLOCATIONS = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
_COUNT_BYTES = 8  # copied to the host for a data-dependent shape
# Calls that have no operator on the CPU. tensor() and as_tensor() copy from pageable host memory.
_CALLS: list[tuple[Any, str]] = [
    *((Tensor, name) for name in ("item", "cpu", "numpy", "tolist", "__array__", "__format__")),
    *((torch, name) for name in ("tensor", "as_tensor")),
]


@dataclass(slots=True)
class CopyTotals:
    """Count and size of the copies in one direction."""

    count: int = 0
    bytes: int = 0

    def add(self, size: int) -> None:
        """Count a copy of `size` bytes."""
        self.count += 1
        self.bytes += size


@dataclass(slots=True)
class Work:
    """Work of host and device in one phase; fields after `operators` are filled only on CUDA."""

    to_device: CopyTotals = field(default_factory=CopyTotals)
    to_host: CopyTotals = field(default_factory=CopyTotals)
    syncs: Counter[str] = field(default_factory=Counter)  # by kind
    operators: int = 0  # torch operators, without views
    launches: int = 0  # of kernels and graphs; a graph of 1000 kernels counts as one
    kernels: int = 0
    wall_s: float = 0.0  # on the device's clock
    busy_s: float = 0.0  # lower bound: of loops in a graph (Warp's solvers), only the first iteration is recorded
    occupied_s: float = 0.0  # upper bound: each graph launch counts from its first to its last record


@dataclass(frozen=True, slots=True)
class SourceLocation:
    """Line of code that syncs or copies."""

    phase: str
    what: str  # operator, call or kind of copy
    where: str  # `file:line` of the caller, or ""

    def __str__(self) -> str:
        return f"{self.what} at {self.where}" if self.where else self.what


class SyncCounter(TorchDispatchMode):
    """Counter of host syncs inside a block.

        with SyncCounter() as syncs:
            algorithm.update()
        assert syncs.total == 0, syncs.locations

    Syncs inside one operator (such as fused Adam) are not counted. `library`: package whose source lines are reported.
    """

    def __init__(self, library: str | None = None) -> None:
        super().__init__()
        self.found: list[SourceLocation] = []
        self.work: defaultdict[str, Work] = defaultdict(Work)  # by phase
        self._library = library
        self._phase = OUTSIDE
        self._paused = 0
        self._originals: list[tuple[Any, str, Any]] = []
        # results of cpu() and views of them: on CUDA, reading them does not sync
        self._on_host: list[Tensor] = []

    @property
    def total(self) -> int:
        """Number of syncs so far."""
        return len(self.found)

    @property
    def locations(self) -> list[str]:
        """`kind at file:line` of each sync, in order."""
        return [str(location) for location in self.found]

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude the block: work that belongs on the host, such as CPU physics."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    @contextmanager
    def around(self, phase: str) -> Iterator[None]:
        """Count the block as a phase, for `PhaseTimer.observe`; nested phases count separately."""
        outer, self._phase = self._phase, reported_phase(phase)
        self.work.setdefault(self._phase, Work())
        try:
            yield
        finally:
            self._phase = outer

    def __enter__(self) -> SyncCounter:
        self._originals = [(owner, name, getattr(owner, name)) for owner, name in _CALLS]
        for owner, name, original in self._originals:
            setattr(owner, name, self._counted(name, original))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for original in self._originals:
            setattr(*original)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if self._paused:
            return func(*args, **kwargs)
        name, view = func.overloadpacket.__name__, getattr(func, "is_view", False)
        if not view and name not in _ALLOCATIONS and func.namespace != "profiler":
            self.work[self._phase].operators += 1
        if _syncs(name, args, kwargs):
            self._record(name)
            self._count_copy(name, args)
        result = func(*args, **kwargs)
        if self._on_host:
            on_host = any(args[0] is tensor for tensor in self._on_host) if args else False
            self._on_host = [*self._on_host, result] if view and on_host else []
        return result

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(first: Any, *args: Any, **kwargs: Any) -> Any:
            stays = name == "as_tensor" and isinstance(first, Tensor)
            counts = not (self._paused or stays or any(first is tensor for tensor in self._on_host))
            if counts:
                self._record(name)
            with self.pause():  # one call, one sync
                result = call(first, *args, **kwargs)
            if counts and isinstance(first, Tensor):
                self.work[self._phase].to_host.add(first.nbytes)
                if name == "cpu":
                    self._on_host.append(result)
            elif counts:
                self.work[self._phase].to_device.add(result.nbytes)
            return result

        return counted

    def _record(self, name: str) -> None:
        self.work[self._phase].syncs[name] += 1
        self.found.append(SourceLocation(self._phase, name, locate(sys._getframe(), self._library)))

    def _count_copy(self, name: str, args: tuple[Any, ...]) -> None:
        work = self.work[self._phase]
        if name in _SCALARS:
            work.to_host.add(args[0].element_size())
        elif name in _COPIES:
            source = args[1 if name == "copy_" else 0]
            (work.to_device if source.device.type == "cpu" else work.to_host).add(source.nbytes)
        else:
            work.to_host.add(_COUNT_BYTES)


def _syncs(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    if name in _SCALARS or name in _SHAPES:
        return True
    if name == "repeat_interleave":  # the sum of the repeats is the length of the result
        return kwargs.get("output_size") is None and any(isinstance(a, Tensor) for a in args)
    if name in _INDEXING:
        indices = (i for i in args[1] if isinstance(i, Tensor))
        return any(index.dtype in (torch.bool, torch.uint8) for index in indices)
    if name in _COPIES:
        devices = {leaf.device.type for leaf in tree_leaves(args) if isinstance(leaf, Tensor)}
        if kwargs.get("device") is not None:
            devices.add(torch.device(kwargs["device"]).type)
        return len(devices) > 1 and "cpu" in devices
    return False
