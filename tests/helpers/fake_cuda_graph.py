"""What a CUDA graph does, on the CPU: operations are recorded once, with their memory, and repeated without Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gpusim_rl.run.cuda_graph import Graphs, LaunchesApart
from gpusim_rl.sim import warp
from gpusim_rl.sim.warp import WarpGraphs

Call = Callable[[], Any]


class Recording(TorchDispatchMode):
    """Records every operation while it is entered; `replay` does them again on the same memory.

    As in a CUDA graph, Python values are frozen, new tensors keep the place that they had, and what Python does besides
    (count, branch, assign) does not happen again. Warp's launches are recorded as well. Unlike in a CUDA
    graph, the operations also run while they are recorded.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        writes = func._schema.is_mutable
        if not writes and all(x.untyped_storage().data_ptr() in given for x in outputs):
            return result  # views

        learning = torch.is_grad_enabled()  # some kernels keep more for a backward pass

        def again() -> None:
            with torch.set_grad_enabled(learning), torch._C._AutoDispatchBelowAutograd():
                new = [x for x in tree_leaves(func(*args, **kwargs)) if isinstance(x, Tensor)]
                if not writes:
                    for old, value in zip(outputs, new, strict=True):
                        old.copy_(value)

        self.calls.append(again)
        return result

    def replay(self) -> None:
        """Runs all operations again."""
        for call in self.calls:
            call()


class Recorded:
    """A recording with the interface of a CUDA graph: what ran while it was recorded counts as the first replay."""

    def __init__(self, again: Call) -> None:
        self._again = again
        self.replays = 0

    def replay(self) -> None:
        if self.replays:
            self._again()
        self.replays += 1


class Recorder(Graphs):
    """`Graphs` that record operations where they would capture a CUDA graph.

    Attributes:
        registered: The generators of each recording.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.registered: list[list[torch.Generator]] = []

    @contextmanager
    def _recording(self, before: Any = None) -> Iterator[Recorded]:
        self.registered.append(list(self._registered))
        recording, outside = Recording(), WarpGraphs.run

        def record_launches(graphs: WarpGraphs, key: Any, launches: Call) -> None:
            if warp._apart:  # `_record_pieces` has them
                return RUN(graphs, key, launches)
            with torch._C._DisableTorchDispatch():
                RUN(graphs, key, launches)
            recording.calls.append(lambda: RUN(graphs, key, launches))

        WarpGraphs.run = record_launches  # type: ignore[method-assign]
        try:
            with recording:
                yield Recorded(recording.replay)
        finally:
            WarpGraphs.run = outside  # type: ignore[method-assign]

    def _record_pieces(self, body: Call, launches_apart: LaunchesApart) -> Any:
        return super()._record_pieces(body, lambda take: launches_apart(launching_too(take)))


def without_shortcuts(sim: Any) -> None:
    """Takes from a Warp simulator on the CPU what CUDA has not: it reads masks, which no graph would do."""
    for name in ("_written_on_host", "_stale_on_host"):
        assert getattr(sim, name) is not None
        setattr(sim, name, None)


RUN = WarpGraphs.run


def launching_too(take: Callable[[Call], None]) -> Callable[[Call], None]:
    """What launches also while it is recorded."""

    def launch_and_take(launch: Call) -> None:
        with pytest.MonkeyPatch.context() as patch, torch._C._DisableTorchDispatch():
            patch.setattr(warp, "_apart", [])
            patch.setattr(WarpGraphs, "run", RUN)
            launch()
        take(Recorded(launch).replay)

    return launch_and_take
