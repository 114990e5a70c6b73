"""Training on fake CUDA tensors (shapes, dtypes and devices without values), on torch's CPU build."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import warp as wp
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gpusim_rl.api import prepare
from gpusim_rl.distributed import actors
from gpusim_rl.env import Environment, Step, Task
from gpusim_rl.env.hook_checks import HookChecks
from gpusim_rl.learn import demonstrations
from gpusim_rl.learn.algorithm import Algorithm, TrainedPolicy, make_policy
from gpusim_rl.learn.minibatch import fit_minibatches
from gpusim_rl.learn.teacher import GROUP
from gpusim_rl.machine.source_location import LIBRARY, short
from gpusim_rl.run import make_learner, start
from gpusim_rl.run.run_spec import RunSpec
from gpusim_rl.run.trainer import Trainer
from gpusim_rl.sim import SimChoice, fused, mjwarp
from gpusim_rl.sim.warp import WarpGraphs
from gpusim_rl.spaces import ActionSpace
from gpusim_rl.testing import sync_counter
from gpusim_rl.testing.random_env import RandomEnv
from gpusim_rl.testing.sync_counter import SourceLocation, SyncCounter
from helpers.demonstrated import random_demonstrations
from helpers.predicted_time import BYTES, COUNTED_ENVS, H100, Cost, Machine, cost_of_operator

CUDA, CPU = torch.device("cuda:0"), torch.device("cpu")
NUM_ENVS = 8

_GUARD = Path(__file__).with_name("cuda_guard.cpp")
_COUNTERS = (__file__, sync_counter.__file__)
_MADE_AT = re.compile(r'File "(.*)", line (\d+)')
_loaded: list[ctypes.CDLL] = []


def why_not() -> str | None:
    """Return why fake CUDA tensors are unavailable, or None."""
    if torch.backends.cuda.is_built():
        return "fake CUDA tensors need the CPU build of torch"
    return None if shutil.which("g++") else "fake CUDA tensors need g++, which compiles a device guard for them"


def load_guard(folder: Path) -> None:
    """Compile the device guard and register it in this process."""
    if _loaded:
        return
    home, library = Path(torch.__file__).parent, folder / "cuda_guard.so"
    flags = ["-O0", "-std=c++20", "-shared", "-fPIC", f"-I{home / 'include'}", f"-L{home / 'lib'}"]
    subprocess.run(["g++", *flags, str(_GUARD), "-lc10", "-o", str(library)], check=True)
    _loaded.append(ctypes.CDLL(str(library)))


# Operators


_NO_KERNEL = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh", "_unsafe_view"}
)
_LINALG = ("linalg_", "_linalg_", "cholesky", "triangular_solve", "lu_", "geqrf", "ormqr", "multinomial")
_NOT_DETERMINISTIC = re.compile(  # torch.use_deterministic_algorithms: they raise on CUDA
    r"(avg_pool3d|adaptive_\w+pool\dd|fractional_max_pool\dd|max_unpool\dd|upsample_\w*linear\w*|upsample_bicubic2d|grid_sampler"
    r"_\dd|reflection_pad\dd|_ctc_loss)_backward|nll_loss\w*|put_?|_?histc\w*|bincount|median|nanmedian|kthvalue"
)
_WITHOUT_CHECKS = frozenset({"linalg_cross", "linalg_vector_norm", "linalg_vecdot"})


class Placement(SyncCounter):
    """Counter of kernels by phase, and of faults in a steady iteration on CUDA.

    Faults are those of `SyncCounter`, host tensors, operators without a deterministic kernel (`torch_deterministic`),
    and linear algebra that syncs or cannot be captured. An operator counts as one kernel, unless it is a view or only
    allocates.

    Attributes:
        costs: Cost of each kernel, by phase.
        lines: Kernels by phase, operator and line (of the forward pass), if `by_line`.
    """

    def __init__(self, by_line: bool = False) -> None:
        super().__init__()
        self.costs: dict[str, list[Cost]] = {}
        self.lines: dict[str, Counter[str]] = {}
        self._by_line = by_line

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, view, before = func.overloadpacket.__name__, getattr(func, "is_view", False), self.total
        if self._paused or func.namespace == "prim":  # device queries
            return func(*args, **(kwargs or {}))
        kernel = not view and name not in _NO_KERNEL and func.namespace in ("aten", "gpusim_rl")
        if kernel:
            self.work[self._phase].kernels += 1
        if kernel and self._by_line:
            self.lines.setdefault(self._phase, Counter())[f"{_line()}: {name}"] += 1
        floats = name.startswith("cumsum") and args[0].is_floating_point()
        if floats or _NOT_DETERMINISTIC.fullmatch(name):
            self._record(f"not deterministic: {name}")
        if name.startswith(_LINALG) and name not in _WITHOUT_CHECKS:
            self._record(f"linear algebra: {name}")
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if kernel:
            self.costs.setdefault(self._phase, []).append(cost_of_operator(func, args, kwargs or {}, result))
        seen = (leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor))
        # `x[:, 0] = 3.0` fills from a host scalar, which becomes a kernel argument.
        harmless = view or (name == "fill_" and args[0].device.type == "cuda")
        if self.total == before and not harmless and any(tensor.device.type == "cpu" for tensor in seen):
            self._record(f"host tensor: {name}")
        return result

    def _record(self, name: str) -> None:
        self.work[self._phase].syncs[name] += 1
        self.found.append(SourceLocation(self._phase, name, _line()))


def _line() -> str:
    """Return `file:line` of the caller."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and (frame.f_code.co_filename in _COUNTERS or LIBRARY.search(frame.f_code.co_filename)):
        node = frame.f_locals.get("node") if frame.f_code is backward.__code__ else None
        made = [_MADE_AT.search(line) for line in getattr(node, "metadata", {}).get("traceback_", ())]
        ours = [found for found in made if found and not LIBRARY.search(found[1]) and found[1] not in _COUNTERS]
        if ours:  # kept by anomaly detection
            return f"{short(ours[-1][1])}:{ours[-1][2]} backward"
        frame = frame.f_back
    return f"{short(frame.f_code.co_filename)}:{frame.f_lineno}" if frame is not None else ""


class _MissingKernels(TorchDispatchMode):
    """Shapes of operators for which torch has no fake kernels."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("_fused_adam_", "_fused_adamw_"):
            return None
        if name == "_thnn_fused_gru_cell":
            state = args[2]
            return torch.empty_like(state), state.new_empty(len(state), 5 * state.shape[1])
        if name == "_thnn_fused_gru_cell_backward":
            grad, _, biased = args
            gates = grad.new_empty(len(grad), 3 * grad.shape[1])
            bias = gates[0] if biased else None
            return gates, torch.empty_like(gates), torch.empty_like(grad), bias, bias
        return func(*args, **(kwargs or {}))


def backward(
    losses: Sequence[Tensor], loss_grads: Sequence[Tensor], *options: Any, **keywords: Any
) -> tuple[Tensor | None, ...]:
    """Replace autograd's engine, which asks CUDA for streams."""
    [loss], [loss_grad], (*_, parameters, _) = losses, loss_grads, options
    order: list[Any] = []
    seen: set[Any] = set()

    def visit(node: Any) -> None:
        if node is not None and node not in seen:
            seen.add(node)
            for following, _ in node.next_functions:
                visit(following)
            order.append(node)

    def add(grads: dict[Any, Any], key: Any, grad: Tensor) -> None:
        grads[key] = grad if key not in grads else grads[key] + grad

    visit(loss.grad_fn)
    inner: dict[Any, Any] = {(loss.grad_fn, 0): loss_grad}
    leaves: dict[Any, Any] = {}
    with torch.no_grad():
        for node in reversed(order):  # consumers before producers
            given = [inner.get((node, number)) for number in range(len(node._input_metadata))]
            if all(grad is None for grad in given):
                continue
            if hasattr(node, "variable"):
                add(leaves, node.variable, given[0])
                continue
            results = getattr(node, "apply", node)(*given)  # autograd functions written in Python
            results = results if isinstance(results, tuple) else (results,)
            results = results[-len(node.next_functions) :]  # they also return entries for non-tensor arguments
            for (following, number), grad in zip(node.next_functions, results, strict=True):
                if following is not None and grad is not None:
                    wanted = following._input_metadata[number]
                    if list(grad.shape) != list(wanted.shape):
                        grad = grad.sum_to_size(wanted.shape)
                    add(inner, (following, number), grad.to(wanted.dtype))
    return tuple(map(leaves.get, parameters))


# Construction


class _NoLaunches(WarpGraphs):
    """Warp graphs without launches; arrays live on Warp's CPU device."""

    def __init__(self, device: torch.device, enabled: bool) -> None:
        super().__init__(torch.device("cpu"), enabled)
        assert device == CUDA

    def run(self, key: Any, body: Callable[[], None]) -> None:
        pass


class _Event:
    def __init__(self, **_: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, _: Any) -> float:
        return 1.0


def _fake_views() -> Callable[[wp.array], Tensor]:
    """Replace `wp.to_torch`: the view of an array is always the same tensor."""
    to_torch, views = wp.to_torch, {}

    def view(array: wp.array) -> Tensor:
        if id(array) not in views:
            with unset_fake_temporarily():
                real = to_torch(array)
            views[id(array)] = (_on_cuda(real), array)
        return views[id(array)][0]

    return view


@contextmanager
def fake_cuda() -> Iterator[None]:
    """Give torch one CUDA device for fake tensors in the block."""
    generator = torch.Generator
    with pytest.MonkeyPatch.context() as patch, FakeTensorMode(allow_non_fake_inputs=True), _MissingKernels():
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        patch.setattr(torch.cuda, "is_bf16_supported", lambda *_, **__: True)
        patch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
        patch.setattr(torch.cuda, "mem_get_info", lambda *_: (80 * 10**9, 80 * 10**9))
        patch.setattr(torch.cuda, "current_stream", lambda *_: None)
        patch.setattr(torch.cuda, "Event", _Event)
        patch.setattr(torch, "Generator", lambda *_: generator())  # draws nothing
        for module in ("torch.autograd", "gpusim_rl.learn.optimizer"):
            patch.setattr(f"{module}._engine_run_backward", backward)
        patch.setattr(_foreach_utils, "_foreach_supported_types", [Tensor, nn.Parameter, FakeTensor])
        patch.setattr(wp, "to_torch", _fake_views())
        patch.setattr(mjwarp, "WarpGraphs", _NoLaunches)
        patch.setattr(fused, "works", lambda _: True)
        yield


@contextmanager
def _say_where() -> Iterator[None]:
    """Report the line that reads a value of a fake tensor."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        frames = traceback.extract_tb(error.__traceback__)
        frame = next(
            frame
            for frame in reversed(frames)
            if frame.filename not in _COUNTERS and not LIBRARY.search(frame.filename)
        )
        raise AssertionError(f"a value is read: {error} at {short(frame.filename)}:{frame.lineno}") from error


class HostEnvs(RandomEnv, Environment):
    """Random envs on the host, as of another library; fake in `fake_cuda`."""

    device, steps_between_truncations, max_episode_length, summary, final_images = CPU, 1, 9, "", True

    def __init__(self, space: ActionSpace, **shapes: Any) -> None:
        super().__init__(NUM_ENVS, num_actions=space.size, **shapes)
        self.action_space = space

    def step(self, action: Tensor) -> Step:  # type: ignore[override]
        assert action.device == CPU
        it = super().step(action)
        masks = {mask: getattr(it, mask) for mask in ("terminated", "truncated", "diverged", "done")}
        return Step(it.obs, it.final_obs, it.reward, {}, {}, **masks, bad_action=it.diverged, incomplete=it.diverged)

    def close(self) -> None: ...


def make_trainer(task: str, /, **settings: Any) -> Trainer:
    """Build a trainer whose learner and simulator (MuJoCo Warp), or `envs`, are fake; call inside `fake_cuda`."""
    envs: Environment | None = settings.pop("envs", None)
    shared = {"num_envs": NUM_ENVS, "graph": "off", "compile": "off", "device": "cuda", "log": {"console": "quiet"}}
    settings = {**shared, **settings}
    if settings.get("algo") == "distill":
        settings["distill"] = {"teacher": "another", **settings.get("distill", {})}
    if settings.get("algo") == "bc":
        settings["bc"] = {"demonstrations": {"file": "another"}, **settings.get("bc", {})}
    with unset_fake_temporarily():
        spec = replace(prepare(task, **settings), envs=envs)
    with _say_where(), pytest.MonkeyPatch.context() as patch:  # reads during construction only
        patch.setattr(HookChecks, "finite", lambda *_: None)
        patch.setattr(Tensor, "count_nonzero", lambda *_: 1)
        patch.setattr(nn.Module, "to", _stay)
        _load_teachers(patch)
        patch.setattr(demonstrations, "load", lambda file, env, groups: (random_demonstrations(env), ""))
        patch.setattr(start, "choose_devices", lambda *_, **__: (CUDA, SimChoice("mjwarp", CUDA, "fake")))
        _make_for_real(patch, spec)
        return actors.make_trainer(spec)


def learns(algo: str, task: str) -> bool:
    """Return whether an algorithm supports a task: demonstrations lack images, and style needs its groups."""
    return task == "HumanoidAMP" if algo == "amp" else not (algo == "bc" and task.endswith("Camera"))


def _load_teachers(patch: pytest.MonkeyPatch) -> None:
    """Make teachers policies of the trained algorithm."""
    env_spec, seen = make_learner.env_spec, dict[str, int]()

    def described(*args: Any) -> Any:
        found = env_spec(*args)
        seen.update(found.obs_sizes)
        return found

    def load(spec: RunSpec, action_space: Any, device: torch.device, name: str) -> TrainedPolicy:
        # A teacher of a student of images alone observes the critic's numbers.
        sizes = {"policy": next(seen[group] for group in (GROUP, "policy", "critic") if seen.get(group))}
        policy = make_policy(spec.algorithm_class, spec.cfg, sizes, action_space, device)
        return TrainedPolicy(policy, spec.cfg.algorithm, sizes, "")

    patch.setattr(make_learner, "env_spec", described)
    patch.setattr(make_learner, "load_policy", load)


def _stay(
    module: nn.Module, device: torch.device = CUDA, *, memory_format: torch.memory_format | None = None
) -> nn.Module:
    assert memory_format is not None or all(tensor.device == device for tensor in module.state_dict().values())
    return module


def _make_for_real(patch: pytest.MonkeyPatch, spec: RunSpec) -> None:
    """Give scenes values. Policies start on the CPU, from where torch cannot move all fake ones."""
    task, algorithm = spec.task_class, spec.algorithm_class
    scene = getattr(task, "scene", None)
    make_policy = algorithm.make_policy

    def real_scene(cfg: Any) -> Any:
        with unset_fake_temporarily():
            found = scene(cfg)  # type: ignore[misc]
            assert found.model is not None  # compile
            return found

    def policy_on_cuda(*args: Any) -> Any:
        with unset_fake_temporarily():
            policy = make_policy(*args[:-1], torch.device("cpu"))
        for module in policy.modules():
            for tensors in (module._parameters, module._buffers):
                tensors.update({name: _on_cuda(value) for name, value in tensors.items() if value is not None})
            if isinstance(module, nn.RNNBase):
                module._init_flat_weights()
        return policy

    if issubclass(task, Task):
        patch.setattr(task, "scene", staticmethod(real_scene))
    patch.setattr(algorithm, "make_policy", staticmethod(policy_on_cuda))


def _on_cuda(real: Tensor) -> Tensor:
    fake = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=CUDA)
    return nn.Parameter(fake, real.requires_grad) if isinstance(real, nn.Parameter) else fake


# Iterations


PARTS: dict[str, Callable[[Trainer], Sequence[tuple[Any, str]]]] = {
    "act": lambda it: [(it.algorithm, "act")],
    "action": lambda it: [(it.env.task, "apply_action")],
    "physics": lambda it: [(it.env.sim, name) for name in ("step", "reset", "refresh", "draw")],
    "rewards": lambda it: [(it.env.task, name) for name in ("rewards", "terminated", "advance", "stats")],
    "observe": lambda it: [(it.env.task, "observe")],
    "reset": lambda it: [(it.env.task, "reset")],
    "randomize": lambda it: [
        (it.env.randomizer, name)
        for name in ("act", "before_physics", "after_physics", "begin_episodes")
        if it.env.randomizer is not None
    ],
    "nan guard": lambda it: [(it.env.nan_guard, name) for name in ("before_step", "after_step")],
    "env": lambda it: [(it.env, "step")],
    "record": lambda it: [(it.algorithm, "record"), (it.collector, "_copy_obs")],
    "metrics": lambda it: [(it.collector.metrics, "record_step")],
    "rollout": lambda it: [(it.algorithm, "begin_rollout"), (it.collector.metrics, "end_rollout")],
    "minibatch step": lambda it: [
        (owner, name)
        for owner in (it.algorithm, getattr(it.algorithm, "steps", None))
        for name in ("gradient", "make", "_adapt", "_critic_step", "_actor_step")
        if hasattr(owner, name) and (owner is it.algorithm or name != "gradient" or not hasattr(it.algorithm, name))
    ],
    "update": lambda it: [(it.algorithm, "update")],
}
"""Parts of an iteration and their calls; nested calls count for the innermost. Physics is torch's share."""

ONCE = ("rollout", "minibatch step", "update")
"""Parts outside of control steps."""

CONTROL_STEP = "control step"
"""All parts except `ONCE`."""


def watch(trainer: Trainer, counter: Placement) -> None:
    """Make each part of an iteration a phase of the counter."""
    for part, calls in PARTS.items():
        for owner, name in calls(trainer):
            setattr(owner, name, _inside(counter.around, part, getattr(owner, name)))


def _inside(
    around: Callable[[str], AbstractContextManager[Any]], part: str, call: Callable[..., Any]
) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        with around(part):
            return call(*args, **kwargs)

    return called


@dataclass(frozen=True)
class Iteration:
    """Steady iteration: faults in order, kernels and costs by part."""

    found: list[SourceLocation]
    kernels: dict[str, int]
    costs: dict[str, list[Cost]] = field(default_factory=dict)

    @property
    def faults(self) -> list[str]:
        return list(dict.fromkeys(f"{location.phase}: {location}" for location in self.found))


def iterate(trainer: Trainer, steps: int = 2, counter: Placement | None = None) -> Iteration:
    """Run control steps and an update; kernels count the last step and `ONCE`, faults all."""
    collector, algorithm, done = trainer.collector, trainer.algorithm, 0
    _make_optimizer_state(algorithm)
    counter = counter or Placement()
    watch(trainer, counter)

    def forget_steps_before_the_last(text: str) -> None:
        nonlocal done
        done += 1
        if done == steps - 1:
            counter.work.clear()
            counter.costs.clear()
            counter.lines.clear()

    horizon, algorithm.horizon = algorithm.horizon, steps
    with _say_where(), counter:
        collector.collect(forget_steps_before_the_last)
        algorithm.horizon = horizon
        collector.update()
    return _read(counter)


def _read(counter: Placement) -> Iteration:
    kernels = {part: counter.work[part].kernels for part in PARTS if part in counter.work}
    whole = sum(number for part, number in kernels.items() if part not in ONCE)
    return Iteration(counter.found, {CONTROL_STEP: whole, **kernels}, dict(counter.costs))


def _make_optimizer_state(algorithm: Algorithm) -> None:
    """Create optimiser state, which the first step would allocate."""
    parts = [algorithm, getattr(algorithm, "steps", None), *getattr(algorithm, "extensions", {}).values()]
    for optimizer in (each for part in parts for each in getattr(part, "__dict__", {}).values()):
        if isinstance(optimizer, torch.optim.Optimizer):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = torch.zeros_like(parameter)
            optimizer.step()


@dataclass(frozen=True)
class Training:
    """Steady iteration of a task with its own settings and number of envs."""

    num_envs: int
    horizon: int
    faults: list[str]
    kernels: dict[str, int]
    """By part: per control step, minibatch step, update."""
    seconds: dict[str, float]
    """Lower bounds on an H100 of a control step without Warp's kernels, and of an update [s]."""
    moved: dict[str, float]
    """Bytes that these kernels read and write."""


UPDATE = ("minibatch step", "update")


def count(task: str, algo: str) -> Training:
    """Count a steady iteration.

    Few updates run; larger ones are extrapolated from one with twice the minibatches and one with two epochs.
    """
    with fake_cuda():
        with unset_fake_temporarily():
            cfg = prepare(task, algo=algo, device="cuda").cfg
        learn, few, later = cfg.algorithm, {}, []
        if hasattr(learn, "minibatch_size"):
            few = {"epochs": 1, "minibatch_size": COUNTED_ENVS * learn.horizon // 2}
            later = [{"num_minibatches": 4}, {"num_minibatches": 2, "epochs": 2}]
        elif hasattr(learn, "updates"):  # until the actor has learned too
            delay = getattr(learn, "policy_delay", 1)
            few, later = {"horizon": 2, "updates": delay}, [{"updates": 2 * delay}]
        trainer = make_trainer(task, algo=algo, num_envs=COUNTED_ENVS, **({algo: few} if few else {}))
        counter = Placement()
        first = iterate(trainer, counter=counter)
        updates = [first, *(_update_again(trainer, counter, changes) for changes in later)]
    times = cfg.num_envs / COUNTED_ENVS
    samples = cfg.num_envs * learn.horizon
    steps = fit_minibatches(samples, samples / learn.minibatch_size) if "epochs" in few else 1

    def update_on(machine: Machine, it: Iteration, minibatches: int) -> float:
        step_times = times * minibatches / steps if "updates" not in few else 1.0  # batches have full size
        by_part = {"minibatch step": step_times, "update": times}
        return sum(cost.seconds(by_part[part], machine) for part in UPDATE for cost in it.costs.get(part, []))

    def whole(values: list[float]) -> float:
        if "epochs" in few:
            return _larger(values, learn.epochs, steps)
        return _larger([*values, 0.0], 1, learn.horizon * learn.updates // few["updates"]) if few else values[0]

    numbers = [sum(it.kernels.get(part, 0) for part in UPDATE) for it in updates]
    every = getattr(learn, "epochs", 1) * getattr(trainer.algorithm, "num_minibatches", 1)
    step = (numbers[1] - numbers[0]) // 2 if few else first.kernels["minibatch step"] // every
    costs = [cost for part in PARTS if part not in ONCE for cost in first.costs.get(part, [])]
    shares = (2, 4, 2) if "epochs" in few else (1,) * len(updates)
    seconds, moved = (
        {
            CONTROL_STEP: sum(cost.seconds(times, machine) for cost in costs),
            "update": whole([update_on(machine, it, n) for it, n in zip(updates, shares, strict=True)]),
        }
        for machine in (H100, BYTES)
    )
    kernels = {**first.kernels, "minibatch step": step, "update": round(whole(numbers))}
    faults = [fault for it in updates for fault in it.faults]
    return Training(cfg.num_envs, learn.horizon, faults, kernels, seconds, moved)


def _update_again(trainer: Trainer, counter: Placement, changes: dict[str, int]) -> Iteration:
    algorithm: Any = trainer.algorithm
    counter.work.clear()
    counter.costs.clear()
    counter.lines.clear()
    minibatches = changes.pop("num_minibatches", None)
    if minibatches is not None:
        algorithm.num_minibatches = minibatches
    algorithm.cfg = replace(algorithm.cfg, **changes)
    with _say_where(), counter:
        trainer.collector.update()
    return _read(counter)


def _larger(few: Sequence[float], epochs: int, minibatches: int) -> float:
    """Extrapolate to an update of `epochs` and `minibatches`; few: one epoch of 2, one of 4, two of 2 minibatches."""
    step = (few[1] - few[0]) / 2
    rest_of_epoch = few[2] - few[0] - 2 * step
    return few[0] + (minibatches - 2) * step + (epochs - 1) * (rest_of_epoch + minibatches * step)
