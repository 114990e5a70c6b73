"""Compile the Warp kernels of tasks for a GPU, on any machine, into a cache for WARP_CACHE_PATH; count launches.

python tests/helpers/gpu_kernels.py FOLDER              all tasks
python tests/helpers/gpu_kernels.py FOLDER Ant Anymal   only these
python tests/helpers/gpu_kernels.py --deterministic FOLDER Ant      for torch_deterministic=true
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import mujoco_warp as mjw
import pytest
import torch
import warp as wp
from warp._src import context

from gpusim_rl.api import prepare
from gpusim_rl.env import VecEnv
from gpusim_rl.settings.discover import tasks
from gpusim_rl.settings.hydra_errors import unknown_choice
from gpusim_rl.sim import choose_sim, fused
from gpusim_rl.sim.constants import Constants
from gpusim_rl.sim.mjwarp import MjwarpSim
from helpers.predicted_time import COUNTED_ENVS, Cost, cost_of

HOPPER = 90
"""Compute capability 9.0: H100, H200."""
LARGEST_BLOCK = 256
"""Warp's default block size."""


class _Gpu:
    """Device properties that MuJoCo Warp reads."""

    is_cuda = True
    sm_count = 132


@contextmanager
def compiling(folder: Path, arch: int = HOPPER) -> Iterator[set[str]]:
    """Make launches in the block only compile their module for a GPU; yield the modules' names.

    `folder` is for `WARP_CACHE_PATH`, with a subfolder per version of Warp; `arch` is compute capability x 10.
    """
    names: set[str] = set()

    def load(module: Any, _: Any, block_dim: int) -> None:
        name = module.get_module_identifier(block_dim)
        options = module.resolved_options[block_dim]
        module._compile(None, folder / wp.__version__ / name, output_arch=arch, use_ptx=False, options=options)
        names.add(name)

    def suggest(kernel: Any, device: Any = None) -> tuple[int, int]:
        kernel.module.load(None, LARGEST_BLOCK)  # the driver needs compiled code; a CPU loads nothing
        return LARGEST_BLOCK, _Gpu.sm_count

    with _as_on_a_gpu() as patch:
        patch.setattr(context.Module, "load", load)
        patch.setattr(context, "_resolve_launch_block_dim", lambda _, size: size or LARGEST_BLOCK)
        patch.setattr(wp, "get_suggested_block_size", suggest)
        yield names


def _one_turn(_: Any, while_body: Any, stream: Any = None, **arguments: Any) -> None:
    while_body(**arguments)


def _both_ways(_: Any, on_true: Any = None, on_false: Any = None, stream: Any = None, **arguments: Any) -> None:
    for body in filter(None, (on_true, on_false)):
        body(**arguments)


@contextmanager
def _as_on_a_gpu() -> Iterator[pytest.MonkeyPatch]:
    """Make MuJoCo Warp launch like on a GPU; without values, a loop runs once."""
    get_device = wp.get_device
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wp, "get_device", lambda device=None: _Gpu if device is None else get_device(device))
        patch.setattr(wp, "is_conditional_graph_supported", lambda: True)
        patch.setattr(wp, "capture_while", _one_turn)
        patch.setattr(wp, "capture_if", _both_ways)
        yield patch


def compile_task(task: str, folder: Path, deterministic: bool = False) -> set[str]:
    """Compile everything that a training on `sim=mjwarp` launches; return the modules' names."""
    with compiling(folder) as names:
        sim, decimation = _make_sim(task, 4)
        sim._model.opt.deterministic = deterministic
        sim.step(decimation)
        sim.reset(torch.ones(4, dtype=torch.bool))
        sim.refresh()
        sim.draw()
        with sim._graphs.scope():  # where masses are drawn
            Constants(sim.scene.model, sim._model, wp.zeros(4, dtype=bool)).derive()
        fused.rotate(torch.zeros(1, 4), torch.zeros(1, 3), 1.0)  # one module with the other fused kernels
    return names


def _make_sim(task: str, num_envs: int) -> tuple[MjwarpSim, int]:
    """Return the simulator and the decimation of a task."""
    spec = prepare(task, num_envs=num_envs, device="cpu", sim="mjwarp", **{"sim.graph": False, "sim.num_threads": 1})
    cfg = spec.cfg
    choice = choose_sim("mjwarp", torch.device("cpu"))
    env = VecEnv.make(spec.task_class, cfg.task, num_envs=num_envs, choice=choice, sim=cfg.sim, seed=0)
    assert isinstance(env.sim, MjwarpSim)
    return env.sim, cfg.task.decimation


# Counting


SOLVER_TURNS = 8
"""Turns of the solver's loop, decided by the slowest world (benchmarks/physics/solver.json: 4 to 10)."""


@dataclass(frozen=True)
class Launches:
    """GPU work of MuJoCo Warp for a task."""

    decimation: int
    costs: dict[str, list[Cost]]
    """Kernels of a physics step, of the last one in a control step (with sensors), of a turn of the loops, of what
    follows the state, of a reset, and of drawing."""
    memory: int
    """Allocations, fills and copies of the last physics step, outside of loops."""
    loops: int

    @property
    def numbers(self) -> dict[str, int]:
        return {**{part: len(costs) for part, costs in self.costs.items()}, "loops": self.loops, "memory": self.memory}

    def seconds(self, num_envs: int | None = None) -> float:
        """Return the physics time of a control step on an H100 [s].

        With `num_envs` an upper bound, as each kernel moves whole arrays; without, every kernel takes its launch time.
        """
        times = 0.0 if num_envs is None else num_envs / COUNTED_ENVS
        seconds = {part: sum(cost.seconds(times) for cost in costs) for part, costs in self.costs.items()}
        steps = (self.decimation - 1) * seconds["physics step"] + seconds["last physics step"]
        turns = self.decimation * SOLVER_TURNS * seconds["turn of the loops"]
        return steps + turns + sum(seconds[part] for part in ("follow", "reset", "draw"))


def count_launches(task: str) -> Launches:
    """Count MuJoCo Warp's launches for a task without compiling."""
    costs: dict[str, list[Cost]] = {}
    part, loops, memory = "", 0, 0

    def launch(kernel: Any, dim: Any, inputs: Any = (), outputs: Any = (), *args: Any, **more: Any) -> None:
        arrays = [array for array in (*inputs, *outputs) if isinstance(array, wp.array)]
        sizes = ((array.size, array.size * wp.types.type_size_in_bytes(array.dtype)) for array in arrays)
        costs.setdefault(part, []).append(cost_of(sizes))

    def loop(*args: Any, **arguments: Any) -> None:
        nonlocal part, loops
        if part != "last physics step":
            return  # the same loop
        loops += 1
        outer, part = part, "turn of the loops"
        _one_turn(*args, **arguments)
        part = outer

    def memory_node(nodes: int, call: Any) -> Any:
        def counted(*args: Any, **arguments: Any) -> Any:
            nonlocal memory
            memory += nodes * (part == "last physics step")
            return call(*args, **arguments)

        return counted

    sim, decimation = _make_sim(task, COUNTED_ENVS)
    with _as_on_a_gpu() as patch:
        for name in ("launch", "launch_tiled"):
            patch.setattr(wp, name, launch)
        patch.setattr(wp, "capture_while", loop)
        patch.setattr(wp, "get_suggested_block_size", lambda *_: (128, 1))
        for name in ("zero_", "fill_"):
            patch.setattr(wp.array, name, memory_node(1, getattr(wp.array, name)))
        for name, nodes in (("copy", 1), ("empty", 2)):  # other array constructors call this one
            counted = memory_node(nodes, getattr(context, name))
            patch.setattr(context, name, counted)
            patch.setattr(wp, name, counted)
        for part, run in {
            "last physics step": lambda: sim._step(1),
            "physics step": lambda: sim._step(2),
            "follow": sim._follow,
            "reset": lambda: mjw.reset_data(sim._model, sim._data, sim._reset_where),
            "draw": sim.draw,
        }.items():
            costs[part] = []
            with sim._graphs.scope():
                run()
    costs.setdefault("turn of the loops", [])
    del costs["physics step"][len(costs["physics step"]) - len(costs["last physics step"]) :]
    return Launches(decimation, costs, memory, loops)


def warp_versions() -> dict[str, str]:
    return {name: version(name) for name in ("mujoco-warp", "warp-lang")}


def main(arguments: list[str]) -> int:
    deterministic = arguments[:1] == ["--deterministic"]
    folder, *names = arguments[deterministic:] or [""]
    unknown = [unknown_choice("task", name, list(tasks()), None) for name in names if name not in tasks()]
    if not folder or unknown:
        sys.stderr.write(f"{next(iter(unknown), 'usage: gpu_kernels.py [--deterministic] FOLDER [TASK ...]')}\n")
        return 2
    for task in names or tasks():
        began = time.perf_counter()
        sys.stdout.write(f"{task}: {len(compile_task(task, Path(folder), deterministic))} modules")
        sys.stdout.write(f", {time.perf_counter() - began:.0f} s\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
