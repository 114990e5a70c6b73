"""CUDA graphs: capture the kernels of an iteration once, then replay them without Python overhead."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from gpusim_rl.errors import TaskError
from gpusim_rl.learn.collective import ALONE, Collective
from gpusim_rl.machine.source_location import describe
from gpusim_rl.run.capture_watch import CaptureWatch
from gpusim_rl.run.stop_signal import IterationLeftError

T = TypeVar("T")

Pieces = list[Callable[[], None]]  # graph replays and the simulator's or collective's launches between them
# Context manager that passes launches in its block to a function.
LaunchesApart = Callable[[Callable[[Callable[[], None]], None]], AbstractContextManager[None]]

logger = logging.getLogger("gpusim_rl.run")

WARM_UP = 3  # eager calls before a capture: the first creates state and kernels, the others are compared
MOST_PHYSICS_STEPS = 150  # maximum physics evaluations per graph with `auto`: capture time and memory grow with them
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
"""Captured segments by mode. `split` is a control step in pieces, with the simulator's graphs between them. Modes that
the `graph` setting does not accept result from physics on another device or failed captures."""
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
    """CUDA graph mode, and the reason for it."""

    mode: str
    reason: str
    strict: bool = False  # whether values that a graph would freeze are an error, as the user chose the mode

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
    """Choose the mode for the `graph` setting; `library` names another library that steps the envs, if any."""
    many = f"auto: more than {MOST_PHYSICS_STEPS} physics evaluations per rollout"
    rules = (
        (wanted == "off", "off", "as configured"),
        (device.type != "cuda", "off", "CUDA graphs need a GPU"),
        (sim_device != device, "update", f"physics on {sim_device}"),
        (library is not None, "update", f"{library} runs the control step"),
        (check_task, "update", "debug.check_task reads every step"),
        (wanted != "auto", wanted, "as configured"),
        (physics_steps > MOST_PHYSICS_STEPS, "step", many),
        (True, "rollout", "auto: CUDA device"),
    )
    return next(GraphChoice(mode, reason, strict=wanted == mode) for holds, mode, reason in rules if holds)


class Graphs:
    """Runner of the segments of an iteration: on CUDA, each segment is captured into a torch graph, then replayed.

    A segment must use the same memory in every call, except in attributes of `stateful` objects (task, algorithm): a
    reassigned tensor or tuple of tensors is copied to its old address. A Python number in an attribute must not
    change between calls, since a graph would freeze it; `watch` also compares the operators of two eager calls.

    A failed capture warns, restores state and generators, and falls back: from the rollout to the control step, then to
    the step in pieces (torch's and the simulator's graphs alternate: torch's contain no Warp loops), then to eager.

    A graph registers only the `generators` that its warm-up used: torch launches two kernels for each before a replay.
    All-reduces run between pieces of the update: in a graph, NCCL is version-dependent and hangs on failure.
    """

    def __init__(
        self,
        choice: GraphChoice,
        device: torch.device,
        *,
        generators: Sequence[torch.Generator] = (),
        stateful: Sequence[object] = (),
        collective: Collective = ALONE,
        watch: bool = True,
    ) -> None:
        self.choice, self._device, self._collective = choice, device, collective
        self._generators, self._stateful = list(generators), list(stateful)
        self._drawn: dict[str, list[torch.Generator]] = {}  # generators used by each segment
        self._registered = self._generators  # generators that the current capture registers
        self._segments = SEGMENTS[choice.mode]
        self._calls: dict[str, int] = {}
        self._watch, self._watches = watch, dict[str, CaptureWatch]()
        self._captured: dict[str, tuple[Pieces, Any]] = {}
        self._capturing = False
        self._memory: list[Any] = []  # pools of the graphs
        # The legacy default stream cannot be captured, and a capture must be ordered after earlier work.
        self._stream = torch.cuda.Stream(device) if self._segments and device.type == "cuda" else None

    @property
    def whole_rollout(self) -> bool:
        """True if control steps run, or will run, inside a graph, where phases cannot be timed."""
        return not {"rollout", "step", "split"}.isdisjoint(self._segments)

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Run the block, which must contain all code around the segments, on the capture stream, in stream order."""
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
        """Run or replay `body` as the `rollout`, `step` or `update` segment; a replay overwrites the last result."""
        if segment == "step" and "split" in self._segments:
            segment = "split"
        if segment not in self._segments or self._capturing:
            return body()
        if self._stream is not None and torch.cuda.current_stream(self._device) != self._stream:
            raise RuntimeError("Graphs.run() must be called within Graphs.stream()")
        if segment not in self._captured:
            calls = self._calls[segment] = self._calls.get(segment, 0) + 1
            if calls <= WARM_UP:
                return self._warm_up(segment, body)
            if not self._try_to_capture(segment, body):
                return self.run(segment, body)  # the fallback
        pieces, output = self._captured[segment]
        for replay in pieces:
            replay()
        return output

    def forget(self) -> None:
        """Free all graphs after code has changed; the segments warm up again, without `watch`, and are recaptured."""
        if self._stream is not None:
            self._stream.synchronize()
        for kept in (self._captured, self._memory, self._calls, self._drawn):
            kept.clear()
        self._watch = False

    def _try_to_capture(self, segment: str, body: Callable[[], Any]) -> bool:
        states = [generator.get_state() for generator in self._generators]
        try:
            self._captured[segment] = self._capture(segment, body)
            return True
        except IterationLeftError:  # a signal, not a failure
            raise
        except Exception as error:  # Warp raises bare exceptions; the body's own errors recur in the eager call
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
        gc.disable()  # destroying a Warp graph during a capture breaks the capture
        self._capturing = True
        try:
            if segment == "split":
                from gpusim_rl.sim import warp  # optional

                return self._record_pieces(body_in_place, warp.defer_launches)
            if segment == "update" and self._collective.size > 1:
                return self._record_pieces(body_in_place, self._collective.defer_launches)
            return self._record(body_in_place)
        finally:
            self._capturing = False
            if collecting:
                gc.enable()

    def _record(self, body: Callable[[], T]) -> tuple[Pieces, T]:
        with self._recording() as graph:
            return [graph.replay], body()

    def _record_pieces(self, body: Callable[[], T], defer_launches: LaunchesApart) -> tuple[Pieces, T]:
        with ExitStack() as recording:
            graph = recording.enter_context(self._recording())
            pieces: Pieces = [graph.replay]

            def launch_between(launch: Callable[[], None]) -> None:
                nonlocal graph
                recording.close()
                graph = recording.enter_context(self._recording(graph))
                pieces.extend([launch, graph.replay])

            with defer_launches(launch_between):
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
                # thread_local: monitoring and logging threads may call CUDA meanwhile.
                torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"),
                # Torch identifies the graph's memory by the capture's id, which Warp's loops may change by interrupting
                # the capture: hold that memory too, or it would be reused.
                torch.cuda.use_mem_pool(strays),
            ):
                warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
                yield graph
            self._memory.append(strays)
        except BaseException:
            # In torch 2.11 and 2.12 (pytorch#180395) the allocator treats an aborted capture as running and refuses
            # another capture. Later versions raise an error here.
            with suppress(RuntimeError, AttributeError):
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
            raise

    def _free_generators(self) -> None:
        # After a failed capture, generators (and torch's default one) stay in capture mode until a capture with them
        # succeeds. Assigning a new state would not help: existing graphs use the old one.
        with suppress(RuntimeError):
            self._capture("all", lambda: torch.zeros((), device=self._device))

    def _fall_back(self, segment: str, reason: str, *, step_too: bool = False) -> None:
        lower = None if step_too else {"rollout": "step", "step": "split"}.get(segment)
        if lower is not None:
            self._segments = tuple(lower if other == segment else other for other in self._segments)
            then = f"capturing {'single control steps' if lower == 'step' else 'it in pieces'} instead"
        else:
            updating = segment == "update"
            self._segments = tuple(s for s in self._segments if (s == "update") != updating)
            then = f"{'updating' if updating else 'stepping'} eagerly (slow)"
        mode = next(mode for mode, segments in SEGMENTS.items() if segments == self._segments)
        name = "step in pieces" if segment == "split" else segment
        self.choice = GraphChoice(mode, f"the {name} cannot be captured: {reason}")
        logger.warning("CUDA graph of the %s failed; %s: %s", name, then, reason)

    def _warm_up(self, segment: str, body: Callable[[], T]) -> T:
        """Run a segment eagerly; detect the generators that it draws from and what a graph would freeze."""
        states = [generator.get_state() for generator in self._generators]
        numbers = _numbers(self._stateful)
        watch = CaptureWatch(self._watches.get(segment), self._stateful)
        with watch if self._watch and self._calls[segment] > 1 else nullcontext():
            result = body()
        drawn = self._drawn.setdefault(segment, [])
        for generator, state in zip(self._generators, states, strict=True):
            if generator not in drawn and not torch.equal(generator.get_state(), state):
                drawn.append(generator)
        if self._calls[segment] > 1:  # set-up in the first call
            self._watches[segment] = watch
            names = [name for name, value in _numbers(self._stateful).items() if numbers.get(name, name) != value]
            self._refuse(segment, f"{names[0]} changed between calls. Try a tensor" if names else watch.difference)
        return result

    def _refuse(self, segment: str, frozen: str) -> None:
        """Run a segment eagerly if a graph would freeze values, or raise TaskError if the mode is the user's choice."""
        if frozen and self.choice.strict:
            raise TaskError(f"the {segment} cannot be captured: {frozen}", key=f"graph={self.choice.mode}")
        if frozen:
            self._fall_back(segment, frozen, step_too=True)


def _reason(error: BaseException) -> str:
    """Return the first error of a failed capture: later errors from torch and Warp carry no information."""
    while error.__context__ is not None and not error.__suppress_context__:
        error = error.__context__
    return str(error) if isinstance(error, NotCapturableError) else describe(error)


def _numbers(objects: Sequence[object]) -> dict[str, Any]:
    """Return the Python numbers in the attributes of objects, keyed by `Class.attribute`."""
    items = [(f"{type(owner).__name__}.{name}", value) for owner in objects for name, value in vars(owner).items()]
    return {name: value for name, value in items if isinstance(value, (bool, int, float))}


@contextmanager
def in_place(objects: Sequence[object]) -> Iterator[None]:
    """Write tensors that the block assigns to attributes into the old tensors; on failure, restore all attributes."""
    before = [dict(vars(stateful)) for stateful in objects]
    try:
        yield
        for stateful, attributes in zip(objects, before, strict=True):
            _put_back_tensors(stateful, attributes)
    except BaseException:
        for stateful, attributes in zip(objects, before, strict=True):
            vars(stateful).clear()
            vars(stateful).update(attributes)
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
            raise NotCapturableError(f"{type(stateful).__name__}.{name} changed its shape or type")
        # Clone: an attribute may now hold another attribute's old tensor (previous = current; current = new).
        copies += [(place, value.clone()) for place, value in zip(olds, news, strict=True)]
        back[name] = old
    for place, value in copies:
        place.copy_(value)
    vars(stateful).update(back)


def _kind(value: Any) -> Any:
    return (value.shape, value.dtype) if isinstance(value, Tensor) else None
