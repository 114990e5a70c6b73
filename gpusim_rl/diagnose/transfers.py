"""Does anything cross between host and device, or make one wait for the other? Counted, and named by its place.

On the CPU by `SyncCounter`, which looks at every operator of torch: what it counts would wait or copy on CUDA. On CUDA
by a profiler trace, which has everything that the device did, and by torch's own warnings about syncs.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gpusim_rl.env import Step
from gpusim_rl.errors import ConfigError
from gpusim_rl.learn.algorithm import EnvSpec
from gpusim_rl.run.logger import Logger
from gpusim_rl.run.profile import (
    ITERATION,
    OUTSIDE,
    Work,
    load_trace,
    make_profiler,
    name_place,
    phase_range,
    read_events,
    reported_phase,
)
from gpusim_rl.run.source_location import LIBRARY, describe, short
from gpusim_rl.run.trainer import Trainer
from gpusim_rl.sim.registry import SIMULATORS

PHYSICS = "physics (host)"
"""`sim=mujoco`: its memory is the host's by definition, so what it does there crosses nothing."""

CHECKPOINT = "checkpoint"
"""Saving reads the policy, once a minute and not in every iteration."""

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
_CALLS: tuple[tuple[Any, str], ...] = (
    (Tensor, "item"),
    (Tensor, "cpu"),
    (Tensor, "numpy"),
    (Tensor, "tolist"),
    (Tensor, "__array__"),
    (torch, "tensor"),
    (torch, "as_tensor"),
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where something crossed.

    Attributes:
        phase: In which phase.
        what: What it was: an operator, a call, a kind of copy.
        where: `file:line` of who asked for it; empty where that is not known.
    """

    phase: str
    what: str
    where: str

    def __str__(self) -> str:
        return f"{self.what} at {self.where}" if self.where else self.what


class SyncCounter(TorchDispatchMode):
    """Counts host syncs while it is entered; on a CPU it tests code that is meant for CUDA.

    What happens inside one operator of the library is not seen, and need not be: the fused Adam
    step, for example, is one operator, whose CPU kernel reads step counter and learning rate from
    memory as the CUDA kernel reads them on the device. Adam's unfused step is counted.

    Args:
        library: Package whose own lines are named rather than those of its callers and of what it calls.

    Attributes:
        found: Each sync, in order.
        work: What was done in each phase.

    Example:
        with SyncCounter() as syncs:
            ppo.update(rollout, last_obs, last_hidden)
        assert syncs.total == 0, syncs.places
    """

    def __init__(self, library: str | None = None) -> None:
        super().__init__()
        self.found: list[Place] = []
        self.work: dict[str, Work] = {}
        self._library = library
        self._phase = OUTSIDE
        self._paused = 0
        self._originals: list[tuple[Any, str, Any]] = []
        # What cpu() has just returned: on CUDA it would be in the host's memory, and reading it no sync.
        self._on_host: list[Tensor] = []

    @property
    def total(self) -> int:
        """Syncs so far."""
        return len(self.found)

    @property
    def counts(self) -> Counter[str]:
        """How often each kind of sync happened."""
        return Counter(place.what for place in self.found)

    @property
    def places(self) -> list[str]:
        """`kind at file:line` of each, in order."""
        return [str(place) for place in self.found]

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Does not count inside: for what belongs on the host, such as physics on CPU threads."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    @contextmanager
    def around(self, phase: str) -> Iterator[None]:
        """Counts the block as a phase; a phase inside another one has its own numbers. For `PhaseTimer.observe`."""
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        while self._originals:
            setattr(*self._originals.pop())

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Looks at one operator, then runs it."""
        kwargs = dict(kwargs or {})
        if self._paused:
            return func(*args, **kwargs)
        name, view = func.overloadpacket.__name__, getattr(func, "is_view", False)
        if not view and name not in _ALLOCATIONS and func.namespace != "profiler":
            self._of_phase().operators += 1
        if _syncs(name, args, kwargs):
            self._record(name)
            self._count_copy(name, args, kwargs)
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
        self.found.append(Place(self._phase, name, _place(sys._getframe(1), self._library)))

    def _count_copy(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        work = self._of_phase()
        if name in ("_local_scalar_dense", "is_nonzero"):
            work.to_host.add(args[0].element_size())
        elif name == "copy_":
            (work.to_device if args[1].device.type == "cpu" else work.to_host).add(args[1].nbytes)
        elif name == "_to_copy":
            (work.to_device if args[0].device.type == "cpu" else work.to_host).add(args[0].nbytes)
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


def _place(frame: FrameType | None, library: str | None) -> str:
    """`file:line` of the innermost frame that is the library's own; without one, of the innermost that is no library's.

    Args:
        frame: Where to look, outwards.
        library: Name of a package.
    """
    place = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if file not in (__file__, warnings.__file__) and not LIBRARY.search(file):
            place = place or f"{short(file)}:{frame.f_lineno}"
            if library is None:
                break
            if re.search(rf"[/\\]{library}[/\\]", file):
                return f"{short(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return place


# Auditing a loop


@dataclass(frozen=True, slots=True)
class Loop:
    """A training whose iterations can be run one by one.

    Attributes:
        device: Where it learns.
        iterate: One iteration: rollout, update, and whatever it writes down.
        observe: As `PhaseTimer.observe`.
        library: Package to name places in; None names the first line that is not torch's.
    """

    device: torch.device
    iterate: Callable[[], None]
    observe: Callable[[Callable[[str], AbstractContextManager[Any]]], None]
    library: str | None = None


@dataclass(frozen=True, slots=True)
class Audit:
    """What steady iterations of a loop did.

    Attributes:
        method: How it was found out.
        iterations: How many were looked at.
        work: By phase, summed over the iterations.
        places: What crossed where, with how often; all iterations together.
    """

    method: str
    iterations: int
    work: dict[str, Work]
    places: Counter[Place]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for json."""
        phases: dict[str, dict[str, Any]] = {}
        for phase, work in self.work.items():
            phases[phase] = {
                "to_device": dataclasses.asdict(work.to_device),
                "to_host": dataclasses.asdict(work.to_host),
                "syncs": dict(work.syncs),
            }
            if self.method == COUNTED:
                phases[phase]["operators"] = work.operators
            else:
                names = ("launches", "kernels", "wall_s", "busy_s", "occupied_s")
                phases[phase] |= {name: getattr(work, name) for name in names}
                for name, seconds in (("busy", work.busy_s), ("occupied", work.occupied_s)):
                    phases[phase][name] = seconds / work.wall_s if work.wall_s else None
        places = [dataclasses.asdict(place) | {"count": count} for place, count in self.places.most_common()]
        return {"method": self.method, "iterations": self.iterations, "phases": phases, "places": places}


COUNTED = "operators of torch, counted on the CPU"
TRACED = "profiler trace and sync warnings on CUDA"


def audit(loop: Loop, *, warm_up: int, iterations: int) -> Audit:
    """Runs a loop and looks at its steady iterations.

    Raises:
        ConfigError: The profiler cannot see the device.
    """
    for _ in range(warm_up):
        loop.iterate()
    return _audit_cuda(loop, iterations) if loop.device.type == "cuda" else _audit_cpu(loop, iterations)


def our_loop(trainer: Trainer, log: Logger) -> Loop:
    """Our training, with what is not part of a steady iteration in phases of its own."""
    return Loop(trainer.rl_device, lambda: trainer.iterate(log), _with_physics(trainer, trainer.timer.observe))


def foreign_loop(client: Any, trainer: Trainer, log: Logger, library: str) -> Loop:
    """Another library's training (`throughput.baselines.Client`) on the environment of `trainer`."""
    return Loop(trainer.rl_device, client.iterate, _with_physics(trainer, client.observe), library)


def _with_physics(trainer: Trainer, observe: Callable[..., None]) -> Callable[..., None]:
    """Observes calls of physics on the host, and of saving, as phases too."""

    def observe_all(around: Callable[[str], AbstractContextManager[Any]]) -> None:
        observe(around)
        calls: list[tuple[Any, str, str]] = [(trainer, "save", CHECKPOINT)]
        if SIMULATORS[trainer.choice.name].cpu_threads:
            calls += [(trainer.env.sim, name, PHYSICS) for name in ("step", "reset", "refresh")]
        for owner, name, phase in calls:
            setattr(owner, name, _inside(around, phase, getattr(owner, name)))

    return observe_all


def _inside(around: Callable[[str], AbstractContextManager[Any]], phase: str, call: Any) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        with around(phase):
            return call(*args, **kwargs)

    return called


def _audit_cpu(loop: Loop, iterations: int) -> Audit:
    counter = SyncCounter(loop.library)
    loop.observe(counter.around)
    with counter:
        for _ in range(iterations):
            with counter.around(ITERATION):
                loop.iterate()
    return Audit(COUNTED, iterations, counter.work, Counter(counter.found))


def _audit_cuda(loop: Loop, iterations: int) -> Audit:
    phases = _CurrentPhase()
    loop.observe(phase_range)
    loop.observe(phases.around)
    events = _trace(loop, iterations)
    if not any(event.get("cat") == "kernel" for event in events):
        raise ConfigError(
            "the profiler saw no kernel on this GPU: another profiler may be listening, or its counters are for"
            " administrators only (NVreg_RestrictProfilingToAdminUsers)"
        )
    reading = read_events(events)
    places = _sync_warnings(loop, iterations, phases)
    for place, count in places.items():
        work = reading.work.setdefault(place.phase, Work())
        if not work.syncs:  # torch tells of a wait that the trace does not have
            work.syncs[place.what] += count
    # Torch does not warn of Warp's calls, nor of copies that do not wait: a trace with stacks knows their functions.
    if reading.transfers and (loop.library is None or not places):
        places += _stack_places(loop)
    return Audit(TRACED, iterations, reading.work, places)


def _trace(loop: Loop, iterations: int, *, stacks: bool = False) -> list[dict[str, Any]]:
    with make_profiler(loop.device, stacks=stacks) as profiler:
        for _ in range(iterations):
            with phase_range(ITERATION):
                loop.iterate()
        if loop.device.type == "cuda":
            torch.cuda.synchronize(loop.device)  # what was launched belongs to the trace
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return load_trace(path)


def _stack_places(loop: Loop) -> Counter[Place]:
    """What crosses in one more iteration, and the functions that asked for it."""
    events = _trace(loop, 1, stacks=True)
    found = read_events(events).transfers
    return Counter(Place(each.phase, each.what, name_place(events, each, LIBRARY) or "") for each in found)


class _CurrentPhase:
    """Knows in which phase the host is."""

    def __init__(self) -> None:
        self.name = OUTSIDE

    @contextmanager
    def around(self, phase: str) -> Iterator[None]:
        outer, self.name = self.name, reported_phase(phase)
        try:
            yield
        finally:
            self.name = outer


def _sync_warnings(loop: Loop, iterations: int, phases: _CurrentPhase) -> Counter[Place]:
    """Runs iterations in which torch warns of each of its own syncs, and says where they were."""
    places: Counter[Place] = Counter()

    def warned(message: Warning | str, *args: Any, **kwargs: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            where = _place(sys._getframe(1), loop.library)
            places[Place(phases.name, "sync", where)] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = warned  # type: ignore[assignment]
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(iterations):
                loop.iterate()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return places


# The verdict


def violations(result: Audit, rows: int) -> list[str]:
    """What the steady loop must not do, one line each; `log` may copy one row of metrics per log interval.

    Args:
        result: Audit of our training.
        rows: Log intervals that ended in it.
    """
    lines = []
    for phase, work in result.work.items():
        if phase in (PHYSICS, CHECKPOINT):
            continue
        allowed = rows if phase == "log" else 0
        syncs = sum(work.syncs.values())
        for count, limit, what in (
            (work.to_device.count, 0, f"copies to the device ({work.to_device.bytes} bytes)"),
            (work.to_host.count, allowed, f"copies to the host ({work.to_host.bytes} bytes)"),
            (syncs, allowed, "waits of the host"),
        ):
            if count > limit:
                beyond = f", {limit} allowed" if limit else ""
                lines.append(f"{phase}: {count} {what} in {result.iterations} iterations{beyond}")
        if lines and lines[-1].startswith(f"{phase}: "):
            named = {str(place): count for place, count in result.places.items() if place.phase == phase}
            lines += [f"{phase}: {count} x {place}" for place, count in sorted(named.items(), key=lambda n: -n[1])]
    return lines


def update_without_data(trainer: Trainer) -> str | None:
    """Runs policy, rollout and update of a training on the device "meta", where reading a number is impossible.

    Two things are left out: Adam's own step, which there is not fused, and the library's unfused one reads its step
    counter; and bf16, since "meta" has no autocast.

    Returns:
        None if it ran, else what failed and where.
    """
    spec, env, meta = trainer.spec, trainer.env, torch.device("meta")
    off = {"precision": "fp32", "compile": False}
    names = {field.name for field in dataclasses.fields(spec.cfg.algorithm)}
    settings = dataclasses.replace(spec.cfg.algorithm, **{key: off[key] for key in off.keys() & names})
    num_envs = spec.cfg.num_envs
    env_spec = EnvSpec(num_envs, dict(env.obs_sizes), env.action_space, env.max_episode_length)
    try:
        algorithm = spec.algorithm_class(
            settings, env_spec, device=meta, seed=0, max_iterations=spec.cfg.max_iterations
        )
        for optimizer in vars(algorithm).values():
            if isinstance(optimizer, torch.optim.Optimizer):
                optimizer.step = lambda: None  # type: ignore[method-assign,assignment]
        obs = {group: torch.zeros(num_envs, size, device=meta) for group, size in env.obs_sizes.items()}
        flag = torch.zeros(num_envs, dtype=torch.bool, device=meta)
        step = Step(obs, obs, torch.zeros(num_envs, device=meta), {}, {}, flag, flag, flag, flag, flag)
        with torch.no_grad():
            for _ in range(algorithm.horizon):
                algorithm.record(algorithm.act(obs), step)
        algorithm.update()
    except (RuntimeError, NotImplementedError) as error:
        return describe(error)
    return None
