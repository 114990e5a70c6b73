"""Replay memory on the host, for one that a GPU has no room for: a thread draws from it ahead of each update."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from gpusim_rl.learn.algorithm import EnvSpec, Observation, Transition, make_generator, restore_generator
from gpusim_rl.learn.recorded import RecordedTensor
from gpusim_rl.learn.replay import Replay, Transitions, named
from gpusim_rl.learn.trajectory import Trajectory

CPU = torch.device("cpu")


@dataclass(slots=True)
class _Pinned:
    """What is on its way between host and device, in memory of the host that CUDA copies from and to by itself."""

    steps: Trajectory
    drawn: Transitions
    fill: Tensor
    generator: Tensor
    """State of the generator that what is under way was drawn with."""
    device: torch.device = CPU


class HostReplay:
    """A `Replay` on the host, for a learner on another device.

    What a rollout records stays on the device until `exchange`. A thread then stores it and draws the transitions of
    the next update, while the device does this update and the next rollout. So the device waits for the host only
    where drawing takes longer than both. An update learns from what was stored before its own rollout.

    On CUDA the transitions come through pinned memory, on a stream of their own. CUDA graphs may hold `write`,
    `sample` and `latest`; `exchange` is called between graphs.

    Args:
        num_steps: T; more than `n_step`.
        env: The environments.
        groups: Names of the observation groups to keep.
        n_step: Steps in a window, at most.
        gamma: Discount per step.
        storage: Type of observations in memory.
        device: Where the learner is.
        horizon: Control steps of a rollout.
        size: Transitions of an update.
        seed: Of what draws them.

    Attributes:
        memory: What is stored.
        num_steps: T.
        num_envs: N.
        fill: Steps that were stored when the transitions of this update were drawn, int64 [], on the device.
    """

    def __init__(
        self,
        num_steps: int,
        env: EnvSpec,
        groups: Iterable[str],
        *,
        n_step: int,
        gamma: float,
        storage: torch.dtype,
        device: torch.device,
        horizon: int,
        size: int,
        seed: int,
    ) -> None:
        self.memory = Replay(num_steps, env, groups, n_step=n_step, gamma=gamma, storage=storage, device=CPU)
        self.num_steps, self.num_envs = num_steps, env.num_envs
        self._device, self._horizon, self._size = device, horizon, size
        self._generator = make_generator(CPU, seed)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="replay")
        self._pending: Future[None] | None = None

        self._steps = Trajectory.empty(horizon, env, self.memory.obs, device)
        drawn, fill = self.memory.sample(size, self._generator), torch.zeros((), dtype=torch.int64)
        self._drawn, self._arriving = (_each(drawn, lambda x: x.to(device, copy=True)) for _ in range(2))
        self.fill, self._arriving_fill = (fill.to(device, copy=True) for _ in range(2))
        self._cuda = device.type == "cuda"
        host = _on_host(self._cuda)
        state = make_generator(CPU, seed).get_state()
        self._pinned = _Pinned(_each(self._steps, host), _each(drawn, host), host(fill), state)
        if self._cuda:
            self._stream = torch.cuda.Stream(device)
            self._recorded, self._arrived, self._taken = (torch.cuda.Event() for _ in range(3))

    @property
    def num_bytes(self) -> int:
        """Memory of the host that it takes."""
        return self.memory.num_bytes

    # On the device

    def begin_rollout(self) -> None:
        """The next step is the first one of a rollout, also where the last one was left in the middle."""
        self._steps.begin_rollout()

    def write(self, obs: Observation, action: Tensor, step: Transition) -> None:
        """Keeps a control step of this rollout; takes what `Replay.write` takes."""
        self._steps.write(obs, action, step)

    def sample(self, size: int, generator: torch.Generator) -> Transitions:
        """The transitions that were drawn for this update.

        Args:
            size: How many: what `__init__` was told.
            generator: Not used: the host has one of its own.
        """
        assert size == self._size
        return self._drawn

    def latest(self, steps: int) -> tuple[dict[str, Tensor], Bool[Tensor, "steps envs"], Float[Tensor, "steps envs"]]:
        """This rollout: observations [steps, N, size], which of them did not diverge, and rewards."""
        assert steps == self._horizon
        return self._steps.latest()

    def recorded(self, steps: int) -> list[RecordedTensor]:
        """Observations and rewards of this rollout."""
        return named(*self.latest(steps))

    # Between device and host

    @torch.no_grad()
    def exchange(self) -> None:
        """After a rollout: takes the transitions for the next update, and hands the rollout over to the thread."""
        self._wait()
        stream = torch.cuda.current_stream(self._device) if self._cuda else None
        if stream is not None:
            stream.wait_event(self._arrived)
        _copy(self._arriving, self._drawn)
        self.fill.copy_(self._arriving_fill)
        _copy(self._steps, self._pinned.steps)
        if stream is not None:
            self._taken.record(stream)
            self._recorded.record(stream)
        self._pending = self._thread.submit(self._store_and_draw)

    def _wait(self) -> None:
        """Until the thread has done its work; raises what it raised."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _store_and_draw(self) -> None:
        if self._cuda:
            self._recorded.synchronize()
        steps = self._pinned.steps
        for t in range(self._horizon):
            step = steps.at(t)
            self.memory.write(step.acted_on, step.action, step)  # type: ignore[reportArgumentType]
        self._draw()

    @torch.no_grad()
    def _draw(self) -> None:
        """Draws for the next update, and sends it to the device."""
        self._pinned.generator = self._generator.get_state()
        drawn = self.memory.sample(self._size, self._generator)
        if not self._cuda:
            _copy(drawn, self._arriving)
            self._arriving_fill.copy_(self.memory.fill)
            return
        self._arrived.synchronize()  # the last ones have left the pinned memory
        _copy(drawn, self._pinned.drawn)
        self._pinned.fill.copy_(self.memory.fill)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._taken)
            _copy(self._pinned.drawn, self._arriving)
            self._arriving_fill.copy_(self._pinned.fill, non_blocking=True)
            self._arrived.record(self._stream)

    # Changes and resume

    def cut(self) -> None:
        """The next step does not follow from the last one: no window reaches across."""
        self._wait()
        self.memory.cut()

    def clear(self) -> None:
        """Forgets everything."""
        self._wait()
        self.memory.clear()
        self._draw()

    def state_dict(self) -> dict[str, Any]:
        """All that is stored, and what draws. Waits for the thread."""
        self._wait()
        return {**self.memory.state_dict(), "generator": self._pinned.generator.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict`; draws again what had been drawn."""
        self._wait()
        self.memory.load_state_dict(state)
        if "generator" in state:  # else the memory was on the device
            restore_generator(self._generator, state["generator"])
        self._draw()


def _each(source: Any, do: Callable[[Tensor], Tensor]) -> Any:
    """The same dataclass, of other tensors."""
    values = (getattr(source, field.name) for field in dataclasses.fields(source))
    return type(source)(*(tree_map_only(Tensor, do, value) for value in values))


def _copy(source: Any, target: Any) -> None:
    """Copies the tensors of a dataclass to those of another one; with CUDA the host does not wait."""
    for field in dataclasses.fields(source):
        values = tree_leaves(getattr(source, field.name)), tree_leaves(getattr(target, field.name))
        for x, y in zip(*values, strict=True):
            if isinstance(x, Tensor):
                y.copy_(x, non_blocking=True)


def _on_host(pinned: bool) -> Callable[[Tensor], Tensor]:
    """Makes room on the host for a tensor."""
    return lambda x: torch.empty(x.shape, dtype=x.dtype, device=CPU, pin_memory=pinned)
