"""Replay buffer on the host with prefetching."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from gpusim_rl.learn.algorithm import make_generator, restore_generator
from gpusim_rl.learn.replay import Replay, Trajectory, Transitions

CPU = torch.device("cpu")


class HostReplay:
    """`Replay` on the host for a learner on another device.

    `exchange` passes a rollout to a thread, which stores it and draws the next update's transitions while the device
    runs this update and the next rollout. So an update learns from data stored before its own rollout. On CUDA,
    transitions pass through pinned memory on a separate stream; `exchange` runs between CUDA graphs.
    """

    def __init__(self, memory: Replay, steps: Trajectory, *, device: torch.device, size: int, seed: int) -> None:
        self.memory, self.steps, self._device, self._size = memory, steps, device, size
        self._generator = make_generator(CPU, seed)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="replay")
        self._pending: Future[None] | None = None
        self._drawn_with = self._generator.get_state()  # state before the prefetched sample
        drawn = self._sample(), torch.zeros((), dtype=torch.int64)
        self._drawn, self._arriving = (tree_map(lambda x: x.to(device, copy=True), drawn) for _ in range(2))
        self.fill = self._drawn[1]  # stored steps when this update's transitions were drawn
        self._cuda = device.type == "cuda"

        def staging(x: Tensor) -> Tensor:
            return torch.empty(x.shape, dtype=x.dtype, device=CPU, pin_memory=self._cuda)

        self._staged_steps, self._staged = tree_map(staging, (self.steps, drawn))
        if self._cuda:
            self._stream = torch.cuda.Stream(device)
            self._exchanged, self._arrived = torch.cuda.Event(), torch.cuda.Event()

    def extend(self, steps: Trajectory) -> None:
        """Do nothing; `exchange` transfers `steps`."""

    def sample(self, size: int, generator: torch.Generator) -> Transitions:
        """Return the prefetched transitions; `generator` is ignored."""
        assert size == self._size
        return self._drawn[0]

    def with_frames(self, drawn: Transitions) -> None:
        """Do nothing; images are prefetched."""

    def latest(self, steps: int) -> tuple[dict[str, Tensor], Bool[Tensor, "steps envs"], Float[Tensor, "steps envs"]]:
        """Return this rollout in the format of `Replay.latest`."""
        return self.steps.latest()

    @torch.no_grad()
    def exchange(self) -> None:
        """Fetch the prefetched transitions for the next update, and hand the rollout to the thread."""
        self._wait()
        if self._cuda:
            torch.cuda.current_stream(self._device).wait_event(self._arrived)
        _copy(self._arriving, self._drawn)
        _copy(self.steps, self._staged_steps)
        if self._cuda:
            self._exchanged.record(torch.cuda.current_stream(self._device))
        self._pending = self._thread.submit(self._store_and_draw)

    def _wait(self) -> None:
        """Wait for the thread and re-raise its error."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _store_and_draw(self) -> None:
        if self._cuda:
            self._exchanged.synchronize()
        self.memory.extend(self._staged_steps)
        self._draw()

    def _sample(self) -> Transitions:
        drawn = self.memory.sample(self._size, self._generator)
        self.memory.with_frames(drawn)
        return drawn

    @torch.no_grad()
    def _draw(self) -> None:
        """Draw transitions for the next update and send them to the device."""
        self._drawn_with = self._generator.get_state()
        drawn = self._sample(), self.memory.fill
        if not self._cuda:
            _copy(drawn, self._arriving)
            return
        self._arrived.synchronize()  # the pinned memory is free again
        _copy(drawn, self._staged)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._exchanged)
            _copy(self._staged, self._arriving)
            self._arrived.record(self._stream)

    def cut(self) -> None:
        """End all n-step windows at the last step."""
        self._wait()
        self.memory.cut()

    def clear(self) -> None:
        """Remove all transitions, including the prefetched ones."""
        self._wait()
        self.memory.clear()
        self._draw()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the buffer, and of the generator before the prefetched sample."""
        self._wait()
        return {**self.memory.state_dict(), "generator": self._drawn_with.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict` and prefetch again."""
        self._wait()
        self.memory.load_state_dict(state)
        if "generator" in state:  # else the memory was on the device
            restore_generator(self._generator, state["generator"])
        self._draw()


def _copy(source: Any, target: Any) -> None:
    for x, y in zip(tree_leaves(source), tree_leaves(target), strict=True):
        y.copy_(x, non_blocking=True)
