"""CUDA graphs: capture the kernels of an iteration once, then replay them without waiting for Python."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from gpusim_rl.learn.collective import ALONE, Collective
from gpusim_rl.machine.source_location import describe
from gpusim_rl.run.stop_signal import IterationLeftError

T = TypeVar("T")

Pieces = list[Callable[[], None]]
"""Graph replays and the launches (of the simulator or of a collective) between them, in order."""

LaunchesApart = Callable[[Callable[[Callable[[], None]], None]], AbstractContextManager[None]]
"""Context manager that passes launches in its block to a function."""

logger = logging.getLogger("gpusim_rl.run")

WARM_UP = 2  # eager calls before a capture: they create optimiser state, workspaces, kernels and Warp's own graphs

MOST_PHYSICS_STEPS = 150
"""Physics evaluations per graph up to which `auto` captures a rollout: capture time and memory grow with them."""

SEGMENTS = {
    "rollout": ("rollout", "update"),
    "step": ("step", "update"),
    "split": ("split", "update"),
    "rollout only": ("rollout",),
    "step only": ("step",),
    "split only": ("split",),
    "update": ("update",),
    "off": (),
}
"""Captured segments by mode. `split` is a control step in pieces, with graphs of the simulator between them. Modes that
the setting `graph` does not accept result from physics on another device or failed captures.
"""

WORDS = {
    "rollout": "whole rollout",
    "step": "control step",
    "split": "control step in pieces",
    "update": "whole update",
}


class NotCapturableError(RuntimeError):
    """Work that a graph would replay differently from eager code."""


@dataclass(frozen=True, slots=True)
class GraphChoice:
    """Mode of the CUDA graphs and its reason."""

    mode: str
    reason: str

    def __str__(self) -> str:
        return f"{' and '.join(WORDS[segment] for segment in SEGMENTS[self.mode]) or 'off'} ({self.reason})"


def choose_graph(
    wanted: str,
    device: torch.device,
    sim_device: torch.device,
    *,
    physics_steps: int,
    check_task: bool,
    library: str | None = None,
) -> GraphChoice:
    """Choose the mode for the setting `graph`.

    `physics_steps` is per rollout. Another `library` that steps its envs on this device may capture graphs of its own.
    """
    many = f"auto: more than {MOST_PHYSICS_STEPS} evaluations of the physics in a rollout"
    rules = (
        (wanted == "off", "off", "as configured"),
        (device.type != "cuda", "off", "CUDA graphs need a GPU"),
        (sim_device != device, "update", f"physics on {sim_device}"),
        (library is not None, "update", f"a step is {library}'s own"),
        (check_task, "update", "debug.check_task reads every step"),
        (wanted != "auto", wanted, "as configured"),
        (physics_steps > MOST_PHYSICS_STEPS, "step", many),
        (True, "rollout", "auto: CUDA device"),
    )
    return next(GraphChoice(mode, reason) for holds, mode, reason in rules if holds)


class Graphs:
    """Runner of the segments of an iteration: on CUDA each is captured into a torch graph, then replayed.

    A segment must use the same memory at every call, except in attributes of `stateful` objects: a reassigned tensor
    (or tuple of tensors) is copied to its old address. A Python number that changes there prevents the capture, because a
    graph would freeze it. Lists and nested objects are not inspected.

    A failed capture warns, restores state and generators, and falls back: from the rollout to the control step, to the
    step in pieces (torch's and the simulator's graphs alternate, so that torch's hold no Warp loops), to eager.

    Args:
        choice: Mode, which names the segments to capture.
        device: Device of the learner.
        generators: Random generators of the algorithm. A graph registers only those that its warm-up used: torch
            launches two kernels per registered generator before each replay.
        stateful: The task and the algorithm.
        collective: Processes that learn together. Sums run between pieces of the update: in a graph, NCCL depends on
            its version and hangs on failure.

    Attributes:
        choice: Current mode; a failed capture changes it.
    """

    def __init__(
        self,
        choice: GraphChoice,
        device: torch.device,
        *,
        generators: Sequence[torch.Generator] = (),
        stateful: Sequence[object] = (),
        collective: Collective = ALONE,
    ) -> None:
        self.choice, self._device, self._collective = choice, device, collective
        self._generators, self._stateful = list(generators), list(stateful)
        self._drawn: dict[str, list[torch.Generator]] = {}  # from which, by segment
        self._registered = self._generators  # those of the present capture
        self._segments = SEGMENTS[choice.mode]
        self._calls: dict[str, int] = {}
        self._captured: dict[str, tuple[Pieces, Any]] = {}
        self._capturing = False
        self._memory: list[Any] = []  # pools of the graphs
        # The legacy default stream cannot be captured, and what is captured must be ordered after what ran before.
        self._stream = torch.cuda.Stream(device) if self._segments and device.type == "cuda" else None

    @property
    def whole_rollout(self) -> bool:
        """Whether the phases of a control step are, or will be, hidden in a graph."""
        return not {"rollout", "step", "split"}.isdisjoint(self._segments)

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Order the device's work; all code around the segments must run in the block."""
        if self._stream is None:
            yield
            return
        outside = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outside)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            outside.wait_stream(self._stream)

    def run(self, segment: str, body: Callable[[], T]) -> T:
        """Run or replay `body` as the segment `rollout`, `step` or `update`; a replay overwrites the last result."""
        if segment == "step" and "split" in self._segments:
            segment = "split"
        if segment not in self._segments or self._capturing:
            return body()
        if self._stream is not None and torch.cuda.current_stream(self._device) != self._stream:
            raise RuntimeError("Graphs.run() outside of Graphs.stream(): the device would work out of order")
        if segment not in self._captured:
            calls = self._calls[segment] = self._calls.get(segment, 0) + 1
            if calls <= WARM_UP:
                with self._watching(segment):
                    return body()
            if not self._try_to_capture(segment, body):
                return self.run(segment, body)  # the fallback
        pieces, output = self._captured[segment]
        for replay in pieces:
            replay()
        return output

    def _try_to_capture(self, segment: str, body: Callable[[], Any]) -> bool:
        states = [generator.get_state() for generator in self._generators]
        try:
            self._captured[segment] = self._capture(segment, body)
            return True
        except IterationLeftError:  # a signal, not a failure
            raise
        except Exception as error:  # Warp raises bare exceptions too; an error of the body's own comes again eagerly
            if self._device.type == "cuda":
                self._free_generators()
            for generator, state in zip(self._generators, states, strict=True):
                generator.set_state(state)
            self._fall_back(segment, _reason(error))
            return False

    def _capture(self, segment: str, body: Callable[[], T]) -> tuple[Pieces, T]:
        def body_in_place() -> T:
            with in_place(self._stateful):
                return body()

        self._registered = self._drawn.get(segment, self._generators)
        collecting = gc.isenabled()
        gc.disable()  # a Warp graph that Python's collector destroys in the middle of a capture breaks it
        self._capturing = True
        try:
            if segment == "split":
                from gpusim_rl.sim import warp  # a simulator without Warp needs none

                return self._record_pieces(body_in_place, warp.launches_apart)
            if segment == "update" and self._collective.size > 1:
                return self._record_pieces(body_in_place, self._collective.launches_apart)
            return self._record(body_in_place)
        finally:
            self._capturing = False
            if collecting:
                gc.enable()

    def _record(self, body: Callable[[], T]) -> tuple[Pieces, T]:
        with self._recording() as graph:
            return [graph.replay], body()

    def _record_pieces(self, body: Callable[[], T], launches_apart: LaunchesApart) -> tuple[Pieces, T]:
        with ExitStack() as recording:
            graph = recording.enter_context(self._recording())
            pieces: Pieces = [graph.replay]

            def launch_between(launch: Callable[[], None]) -> None:
                nonlocal graph
                recording.close()
                graph = recording.enter_context(self._recording(graph))
                pieces.extend([launch, graph.replay])

            with launches_apart(launch_between):
                return pieces, body()

    @contextmanager
    def _recording(self, before: torch.cuda.CUDAGraph | None = None) -> Iterator[torch.cuda.CUDAGraph]:
        """Capture the block into a graph that shares the memory pool of `before`."""
        graph, strays = torch.cuda.CUDAGraph(), torch.cuda.MemPool()
        pool = before.pool() if before is not None else torch.cuda.graph_pool_handle()
        for generator in self._registered:
            graph.register_generator_state(generator)
        try:
            with (
                warnings.catch_warnings(),
                # thread_local: threads that watch the machine or write logs may call CUDA meanwhile
                torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"),
                # Torch knows by the capture's id which memory is the graph's. Warp's loops interrupt the capture. If
                # its id changed, memory of a graph would be given to others: it is held here.
                torch.cuda.use_mem_pool(strays),
            ):
                warnings.filterwarnings("ignore", message="The CUDA Graph is empty")  # a piece may be
                yield graph
            self._memory.append(strays)
        except BaseException:
            # In torch 2.11 and 2.12 (pytorch#180395) the allocator believes that a capture that was broken off lasts,
            # and refuses to prepare for another one. Where it knows better, it complains.
            with suppress(RuntimeError, AttributeError):  # it is not public
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
            raise

    def _free_generators(self) -> None:
        # In torch 2.11 and 2.12 generators believe it too, torch's own included, until a capture with them ends well.
        # A new state would not do: graphs that exist already continue to use the old one.
        with suppress(RuntimeError):
            self._capture("all", lambda: torch.zeros((), device=self._device))

    def _fall_back(self, segment: str, reason: str, *, step_too: bool = False) -> None:
        lower = {"rollout": "step", "step": "split"}.get(segment)
        if lower is not None and not step_too:
            self._segments = tuple(lower if other == segment else other for other in self._segments)
            then = f"capturing {'single control steps' if lower == 'step' else 'it in pieces'} instead"
        elif segment == "update":
            self._segments, then = tuple(s for s in self._segments if s != segment), "updating eagerly (slow)"
        else:
            self._segments, then = tuple(s for s in self._segments if s == "update"), "stepping eagerly (slow)"
        mode = next(mode for mode, segments in SEGMENTS.items() if segments == self._segments)
        name = "step in pieces" if segment == "split" else segment
        self.choice = GraphChoice(mode, f"the {name} cannot be captured: {reason}")
        logger.warning("CUDA graph of the %s failed, %s: %s", name, then, reason)

    @contextmanager
    def _watching(self, segment: str) -> Iterator[None]:
        """Detect the generators that an eager segment draws from and the Python numbers that it changes."""
        states = [generator.get_state() for generator in self._generators]
        numbers = [_numbers(stateful) for stateful in self._stateful]
        yield
        drawn = self._drawn.setdefault(segment, [])
        for generator, state in zip(self._generators, states, strict=True):
            if generator not in drawn and not torch.equal(generator.get_state(), state):
                drawn.append(generator)
        if self._calls[segment] < WARM_UP:
            return  # the first call may still be setting up
        for stateful, old in zip(self._stateful, numbers, strict=True):
            changed = [name for name, value in _numbers(stateful).items() if name not in old or old[name] != value]
            if changed:
                names = " and ".join(f"{type(stateful).__name__}.{name}" for name in changed)
                self._fall_back(segment, f"{names} changes from call to call and is no tensor; try one", step_too=True)
                return


def _reason(error: BaseException) -> str:
    """Return the first error of a failed capture: those that torch and Warp raise afterwards carry no information."""
    while error.__context__ is not None and not error.__suppress_context__:
        error = error.__context__
    return str(error) if isinstance(error, NotCapturableError) else describe(error)


def _numbers(stateful: object) -> dict[str, Any]:
    return {name: value for name, value in _attributes(stateful).items() if isinstance(value, (bool, int, float))}


def _attributes(stateful: object) -> dict[str, Any]:
    return getattr(stateful, "__dict__", {})


@contextmanager
def in_place(objects: Sequence[object]) -> Iterator[None]:
    """Copy tensors that the block reassigns to attributes back to their old addresses; restore attributes if it fails.

    Raises:
        NotCapturableError: A tensor changed its shape or dtype.
    """
    before = [dict(_attributes(stateful)) for stateful in objects]
    try:
        yield
        for stateful, attributes in zip(objects, before, strict=True):
            _put_back_tensors(stateful, attributes)
    except BaseException:
        for stateful, attributes in zip(objects, before, strict=True):
            _attributes(stateful).clear()
            _attributes(stateful).update(attributes)
        raise


def _put_back_tensors(stateful: object, before: dict[str, Any]) -> None:
    copies: list[tuple[Tensor, Tensor]] = []
    back: dict[str, Any] = {}
    for name, old in before.items():
        new = getattr(stateful, name, None)
        olds: Any = (old,) if isinstance(old, Tensor) else old
        news: Any = (new,) if isinstance(old, Tensor) else new
        if new is old or not (isinstance(olds, tuple) and olds and all(isinstance(x, Tensor) for x in olds)):
            continue
        if not isinstance(news, tuple) or [_kind(x) for x in news] != [_kind(x) for x in olds]:
            raise NotCapturableError(f"{type(stateful).__name__}.{name} changes its shape or type")
        # A copy first: one attribute may now hold what was another's (previous = current; current = new).
        copies += [(place, value.clone()) for place, value in zip(olds, news, strict=True)]
        back[name] = old
    for place, value in copies:
        place.copy_(value)
    _attributes(stateful).update(back)


def _kind(value: Any) -> Any:
    return (value.shape, value.dtype) if isinstance(value, Tensor) else None
