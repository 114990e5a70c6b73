"""CUDA graphs emulated on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gpusim_rl.run.cuda_graph import Graphs

Call = Callable[[], Any]


class Recording(TorchDispatchMode):
    """Recorder of all operations in a block; `replay` repeats them on the same memory, without the Python code."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        writes = func._schema.is_mutable
        outputs = [] if writes else [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        if not writes:
            given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
            if all(x.untyped_storage().data_ptr() in given for x in outputs):
                return result  # views

        learning = torch.is_grad_enabled()  # some kernels save more for a backward pass

        def again() -> None:
            with torch.set_grad_enabled(learning), torch._C._AutoDispatchBelowAutograd():
                repeated = func(*args, **kwargs)
                new = [] if writes else [x for x in tree_leaves(repeated) if isinstance(x, Tensor)]
                for old, value in zip(outputs, new, strict=True):
                    old.copy_(value)

        self.calls.append(again)
        return result

    def replay(self) -> None:
        """Run all operations again."""
        for call in self.calls:
            call()


class Recorded:
    """Recording in place of a CUDA graph; the recorded run counts as the first replay."""

    def __init__(self, again: Call) -> None:
        self._again = again
        self.replays = 0

    def replay(self) -> None:
        """Replay the recording; the first call is a no-op."""
        if self.replays:
            self._again()
        self.replays += 1


class RecordedGraphs(Graphs):
    """`Graphs` that record operations instead of capturing CUDA graphs."""

    @contextmanager
    def _recording(self, before: Any = None) -> Iterator[Any]:
        with Recording() as recording:
            yield Recorded(recording.replay)
