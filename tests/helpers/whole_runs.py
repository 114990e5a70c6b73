"""Laws of whole runs, for trainings of every algorithm."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpusim_rl.run import checkpoint
from gpusim_rl.run.cuda_graph import GraphChoice, Graphs
from gpusim_rl.run.held_objects import generators_of
from gpusim_rl.run.trainer import Trainer
from gpusim_rl.testing.conformance import differences
from gpusim_rl.testing.sync_counter import SyncCounter
from helpers.fake_cuda_graph import Recorder, without_shortcuts
from helpers.training import read_csv, the_run

PARTS = ("policy", "algorithm", "env", "metrics")

Make = Callable[..., Trainer]
"""Makes a training in a folder: `make(folder, max_iterations=4)`."""


def check_resumes(make: Make, resume: Callable[[Path], Trainer], folder: Path, iterations: int = 4) -> dict[str, Any]:
    """Train twice as many iterations at once and in two parts, the second by `resume`; equal bit for bit."""
    make(folder / "whole", max_iterations=2 * iterations).train()
    make(folder / "parts", max_iterations=iterations).train()
    run = the_run(folder / "parts")
    resume(run).train()
    ends = [checkpoint.load(the_run(folder / part) / "checkpoints" / "last.pt") for part in ("whole", "parts")]
    assert [differences(ends[0][part], ends[1][part]) for part in PARTS] == [[], [], [], []]
    assert read_csv(the_run(folder / "whole")) == read_csv(run)
    return ends[1]


def check_replays(make: Make, mode: str, folder: Path, sim: Callable[[Trainer], Any]) -> dict[str, Any]:
    """Train eagerly and by replays of what a CUDA graph would record; equal bit for bit. Returns the eager state."""

    def trained(graphs: type[Graphs], folder: Path) -> dict[str, Any]:
        it = make(folder, max_iterations=8)
        without_shortcuts(sim(it))
        options: dict[str, Any] = {"generators": generators_of(it.algorithm, it.start.device)}
        options |= {"stateful": it.collector.graphs._stateful}
        it.collector.graphs = graphs(GraphChoice(mode, "test"), it.start.device, **options)
        with it.logging() as log:
            for _ in range(8):
                it.iterate(log)
            assert graphs is Graphs or it.collector.graphs._captured.keys() == {mode, "update"}
            return it.state_dict()

    eager, replayed = trained(Graphs, folder / "eager"), trained(Recorder, folder / "replayed")
    assert [differences(eager[part], replayed[part]) for part in PARTS] == [[], [], [], []]
    return eager


def check_no_sync(it: Trainer) -> None:
    """Run an iteration in which the host never waits for the device."""
    with it.logging() as log:
        it.iterate(log)
        with SyncCounter() as syncs:
            it.collector.collect()
            it.algorithm.update()
    assert syncs.total == 0, syncs.locations
