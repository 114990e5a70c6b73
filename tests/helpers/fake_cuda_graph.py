"""Recorded graphs, on the CPU, of trainings with a Warp simulator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from gpusim_rl.run.cuda_graph import GraphChoice, Graphs, LaunchesApart
from gpusim_rl.run.held_objects import generators_of
from gpusim_rl.run.trainer import Trainer
from gpusim_rl.sim import warp
from gpusim_rl.sim.warp import WarpGraphs
from gpusim_rl.testing.conformance import differences
from gpusim_rl.testing.recorded_graphs import Call, Recorded, RecordedGraphs, Recording


class Recorder(RecordedGraphs):
    """`RecordedGraphs` that include Warp's launches; `registered` holds each recording's generators."""

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

    def _record_pieces(self, body: Call, defer_launches: LaunchesApart) -> Any:
        return super()._record_pieces(body, lambda take: defer_launches(launching_too(take)))


def differences_of_replays(make: Callable[[Path], Trainer], mode: str, folder: Path) -> list[str]:
    """Return the paths at which a running and a replayed training differ."""

    def trained(graphs: type[Graphs]) -> dict[str, Any]:
        it: Any = make(folder / graphs.__name__)
        without_shortcuts(getattr(it.env, "env", it.env).sim)  # images may be encoded
        options: dict[str, Any] = {"generators": generators_of(it.algorithm, it.start.device)}
        options |= {"stateful": it.collector.graphs._stateful}
        it.collector.graphs = graphs(GraphChoice(mode, "test"), it.start.device, **options)
        with it.logging() as log:
            for _ in range(7):
                it.iterate(log)
            assert graphs is Graphs or it.collector.graphs._captured.keys() == {mode, "update"}
            return {part: it.state_dict()[part] for part in ("policy", "algorithm", "env", "metrics")}

    return differences(trained(Graphs), trained(Recorder))


def without_shortcuts(sim: Any) -> None:
    """Disable CPU shortcuts of a Warp simulator that read masks."""
    for name in ("_written_on_host", "_stale_on_host"):
        assert getattr(sim, name) is not None
        setattr(sim, name, None)


RUN = WarpGraphs.run


def launching_too(take: Callable[[Call], None]) -> Callable[[Call], None]:
    """Make `take` also run a launch while it is recorded."""

    def launch_and_take(launch: Call) -> None:
        with pytest.MonkeyPatch.context() as patch, torch._C._DisableTorchDispatch():
            patch.setattr(warp, "_apart", [])
            patch.setattr(WarpGraphs, "run", RUN)
            launch()
        take(Recorded(launch).replay)

    return launch_and_take
