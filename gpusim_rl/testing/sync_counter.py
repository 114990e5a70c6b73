"""Counter of host syncs and host-device copies; works on the CPU by inspecting every torch operator."""

from __future__ import annotations

import sys
from collections import Counter
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
_ALLOCATIONS = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
_COUNT_BYTES = 8  # what comes to the host where the shape of a result depends on data
# On the CPU these move memory without an operator of their own, so they are caught where Python
# calls them. tensor() and as_tensor() copy from pageable host memory.
_CALLS: list[tuple[Any, str]] = [
    *((Tensor, name) for name in ("item", "cpu", "numpy", "tolist", "__array__")),
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
    """Work of host and device in one phase; fields after `operators` need CUDA."""

    to_device: CopyTotals = field(default_factory=CopyTotals)
    to_host: CopyTotals = field(default_factory=CopyTotals)
    syncs: Counter[str] = field(default_factory=Counter)  # calls that made the host wait, by kind
    operators: int = 0  # of torch, that compute something
    launches: int = 0  # calls that gave work to the device: a graph of a thousand kernels is one
    kernels: int = 0
    wall_s: float = 0.0  # time of the phase on the device's clock
    busy_s: float = 0.0  # part of it in which the device is known to have been at work
    # The same, with all time between the first and the last record of a graph's launch: of a loop in a graph (as of
    # Warp's solvers) only the first round is recorded, so the truth is between the two.
    occupied_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SourceLocation:
    """Line of code that waits or copies."""

    phase: str
    what: str  # operator, call or kind of copy
    where: str  # `file:line` of who asked for it; empty where that is not known

    def __str__(self) -> str:
        return f"{self.what} at {self.where}" if self.where else self.what


class SyncCounter(TorchDispatchMode):
    """Counter of host syncs inside a block.

        with SyncCounter() as syncs:
            algorithm.update()
        assert syncs.total == 0, syncs.locations

    Work inside one operator is invisible: fused Adam reads its step counter on the device; unfused Adam is counted.

    Args:
        library: Package whose own lines are reported rather than its callers' or callees'.
    """

    def __init__(self, library: str | None = None) -> None:
        super().__init__()
        self.found: list[SourceLocation] = []  # each sync, in order
        self.work: dict[str, Work] = {}  # by phase
        self._library = library
        self._phase = OUTSIDE
        self._paused = 0
        self._originals: list[tuple[Any, str, Any]] = []
        # What cpu() has just returned: on CUDA it would be in the host's memory, and reading it no sync.
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
        """Skip the block, for work that belongs on the host such as CPU physics."""
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
        for owner, name in _CALLS:
            original = getattr(owner, name)
            self._originals.append((owner, name, original))
            setattr(owner, name, self._counted(name, original))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        while self._originals:
            setattr(*self._originals.pop())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if self._paused:
            return func(*args, **kwargs)
        name, view = func.overloadpacket.__name__, getattr(func, "is_view", False)
        if not view and name not in _ALLOCATIONS and func.namespace != "profiler":
            self._of_phase().operators += 1
        if _syncs(name, args, kwargs):
            self._record(name)
            self._count_copy(name, args)
        result = func(*args, **kwargs)
        if self._on_host:
            of_host = any(args[0] is tensor for tensor in self._on_host) if args else False
            self._on_host = [*self._on_host, result] if view and of_host else []
        return result

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(first: Any, *args: Any, **kwargs: Any) -> Any:
            stays = name == "as_tensor" and isinstance(first, Tensor)
            stays = stays or any(first is tensor for tensor in self._on_host)
            counts = not self._paused and not stays
            if counts:
                self._record(name)
            with self.pause():  # one call, one sync
                result = call(first, *args, **kwargs)
            if counts and isinstance(first, Tensor):
                self._of_phase().to_host.add(first.nbytes)
                if name == "cpu":
                    self._on_host.append(result)
            elif counts:
                self._of_phase().to_device.add(result.nbytes)
            return result

        return counted

    def _of_phase(self) -> Work:
        return self.work.setdefault(self._phase, Work())

    def _record(self, name: str) -> None:
        self._of_phase().syncs[name] += 1
        self.found.append(SourceLocation(self._phase, name, locate(sys._getframe(), self._library)))

    def _count_copy(self, name: str, args: tuple[Any, ...]) -> None:
        work = self._of_phase()
        if name in ("_local_scalar_dense", "is_nonzero"):
            work.to_host.add(args[0].element_size())
        elif name in _COPIES:
            source = args[1 if name == "copy_" else 0]
            (work.to_device if source.device.type == "cpu" else work.to_host).add(source.nbytes)
        else:
            work.to_host.add(_COUNT_BYTES)


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
