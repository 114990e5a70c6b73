"""Measures three ways to draw from a prioritised replay memory; writes prioritized.json.

    python benchmarks/prioritized.py

- blocks: what gpusim_rl.learn.prioritized does. Sums of blocks of 64 slots, then a cumulative sum within the block.
- cumsum: a cumulative sum of all priorities in float64, and a binary search in it.
- tree: a tree of sums in one tensor, level by level; a change of priorities forms the sums above them anew.

Measured is a draw of indices, and a change of the priorities of one batch. `iteration` is a draw for 8 updates at once,
as an algorithm of ours draws, and 8 changes. Medians, with one thread and with all.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

SLOTS = [2**exponent for exponent in range(17, 25)]
BATCHES = (512, 8192)
ENVS, UPDATES, SECONDS = 64, 8, 0.15


class Way(Protocol):
    """A way to draw."""

    def draw(self, size: int) -> Any:
        """Indices in proportion to their priorities."""
        ...

    def change(self, index: Any, priority: Any) -> None:
        """Gives them other priorities."""
        ...


def ways(slots: int) -> dict[str, Way]:
    """All three, with the same priorities."""
    import torch
    from torch import Tensor

    from gpusim_rl.learn.algorithm import EnvSpec
    from gpusim_rl.learn.prioritized import Priorities
    from gpusim_rl.learn.replay import Replay
    from gpusim_rl.spaces import Box

    generator = torch.Generator().manual_seed(0)
    first = torch.rand(slots, generator=generator)

    class Blocks:
        def __init__(self) -> None:
            spec, cpu = EnvSpec(ENVS, {"policy": 1}, Box(1), 1000), torch.device("cpu")
            replay = Replay(slots // ENVS, spec, [], n_step=1, gamma=0.99, storage=torch.float32, device=cpu)
            self.priorities = Priorities(replay, alpha=1.0)
            self.priorities.values[:slots] = first

        def draw(self, size: int) -> Tensor:
            return self.priorities._draw(size, generator)

        def change(self, index: Tensor, priority: Tensor) -> None:
            self.priorities.values.scatter_reduce_(0, index, priority, "amax", include_self=False)

    class Cumsum:
        def __init__(self) -> None:
            self.values = first.clone()

        def draw(self, size: int) -> Tensor:
            upper = self.values.cumsum(0, dtype=torch.float64)
            u = torch.rand(size, dtype=torch.float64, generator=generator).mul_(upper[-1])
            return torch.searchsorted(upper, u, right=True).clamp_(max=slots - 1)

        def change(self, index: Tensor, priority: Tensor) -> None:
            self.values.scatter_reduce_(0, index, priority, "amax", include_self=False)

    class Tree:
        """Node 1 is the root; those of node i are 2 i and 2 i + 1; leaf k is node `slots` + k."""

        def __init__(self) -> None:
            self.sums = torch.zeros(2 * slots, dtype=torch.float64)
            self.sums[slots:] = first
            level = slots
            while level > 1:
                level //= 2
                self.sums[level : 2 * level] = self.sums[2 * level : 4 * level].view(-1, 2).sum(1)

        def draw(self, size: int) -> Tensor:
            u = torch.rand(size, dtype=torch.float64, generator=generator).mul_(self.sums[1])
            node = torch.ones(size, dtype=torch.int64)
            for _ in range(slots.bit_length() - 1):
                node.mul_(2)
                left = self.sums.take(node)
                right = u >= left
                u.sub_(left.mul_(right))
                node.add_(right)
            return node.sub_(slots)

        def change(self, index: Tensor, priority: Tensor) -> None:
            node = index + slots
            self.sums.scatter_reduce_(0, node, priority.double(), "amax", include_self=False)
            for _ in range(slots.bit_length() - 1):
                node = node.div(2, rounding_mode="floor")
                children = self.sums.take(2 * node)
                self.sums.index_copy_(0, node, children.add_(self.sums.take(2 * node + 1)))

    return {"blocks": Blocks(), "cumsum": Cumsum(), "tree": Tree()}


def milliseconds(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median time of each call, in turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    ends = time.perf_counter() + SECONDS * len(calls)
    while time.perf_counter() < ends or len(next(iter(times.values()))) < 4:
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            times[name].append(1e3 * (time.perf_counter() - started))
    return {name: round(statistics.median(values[1:]), 4) for name, values in times.items()}


def measure(slots: int) -> dict[str, dict[str, dict[str, float]]]:
    """Milliseconds by batch, part and way."""
    import torch

    found: dict[str, dict[str, dict[str, float]]] = {}
    made = ways(slots)
    for batch in BATCHES:
        index, priority = torch.randint(slots, (batch,)), torch.rand(batch)

        def iteration(way: Way, batch: int = batch, priority: Any = priority) -> None:
            for drawn in way.draw(UPDATES * batch).split(batch):
                way.change(drawn, priority)

        parts: dict[str, Callable[[Way], Callable[[], object]]] = {
            "draw": lambda way, batch=batch: lambda: way.draw(batch),
            "change": lambda way, index=index, priority=priority: lambda: way.change(index, priority),
            "iteration": lambda way, iteration=iteration: lambda: iteration(way),
        }
        found[str(batch)] = {
            part: milliseconds({name: call(way) for name, way in made.items()}) for part, call in parts.items()
        }
    return found


def main() -> None:
    """Measures and writes."""
    from gpusim_rl.machine.hardware import available_cpus, limit_openmp_spin

    limit_openmp_spin()
    import torch

    from gpusim_rl.files.provenance import describe_environment, git_state

    by_threads: dict[str, Any] = {}
    for threads in sorted({1, available_cpus()}):
        torch.set_num_threads(threads)
        by_threads[str(threads)] = {}
        for slots in SLOTS:
            found = by_threads[str(threads)][str(slots)] = measure(slots)
            for batch, parts in found.items():
                print(f"threads {threads}, 2^{slots.bit_length() - 1} slots, batch {batch}: {parts}", flush=True)
    result = {
        "command": "python benchmarks/prioritized.py",
        "git": git_state(Path("runs"))[0],
        "environment": describe_environment(),
        "updates_in_an_iteration": UPDATES,
        "milliseconds_by_threads_slots_batch_part_and_way": by_threads,
    }
    Path(__file__).with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, installed or not
    main()
