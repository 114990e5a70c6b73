"""Compiles the Warp kernels of tasks for a GPU, on any machine, into a cache that a machine with that GPU can use.

    python tests/helpers/gpu_kernels.py FOLDER              all tasks
    python tests/helpers/gpu_kernels.py FOLDER Ant Anymal   only these

and there: export WARP_CACHE_PATH=FOLDER
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import pytest
import torch
import warp as wp
from warp._src import context

from gpusim_rl.api import prepare
from gpusim_rl.env import VecEnv
from gpusim_rl.settings.discover import tasks
from gpusim_rl.settings.hydra_errors import unknown_choice
from gpusim_rl.sim import choose_sim
from gpusim_rl.sim.constants import Constants
from gpusim_rl.sim.mjwarp import MjwarpSim

HOPPER = 90
"""Compute capability 9.0: H100, H200."""


class _Gpu:
    """What MuJoCo Warp asks of a device."""

    is_cuda = True
    sm_count = 132


@contextmanager
def compiling(folder: Path, arch: int = HOPPER) -> Iterator[set[str]]:
    """In the block a launch compiles its module for a GPU, as the first launch there would, and does nothing else.

    Args:
        folder: For `WARP_CACHE_PATH`: binaries are in a folder of Warp's version. Those that are there are kept.
        arch: Compute capability x 10.

    Yields:
        Names of the modules.
    """
    names: set[str] = set()
    get_device = wp.get_device

    def load(module: Any, _: Any, block_dim: int) -> None:
        name = module.get_module_identifier(block_dim)
        options = module.resolved_options[block_dim]
        module._compile(None, folder / wp.__version__ / name, output_arch=arch, use_ptx=False, options=options)
        names.add(name)

    def capture_while(_: Any, while_body: Any, stream: Any = None, **arguments: Any) -> None:
        while_body(**arguments)

    def capture_if(_: Any, on_true: Any = None, on_false: Any = None, stream: Any = None, **arguments: Any) -> None:
        for body in filter(None, (on_true, on_false)):
            body(**arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context.Module, "load", load)
        patch.setattr(context, "_resolve_launch_block_dim", lambda _, size: size or 256)
        patch.setattr(wp, "get_device", lambda device=None: _Gpu if device is None else get_device(device))
        patch.setattr(wp, "is_conditional_graph_supported", lambda: True)
        # Nothing has a value: a loop takes one turn, and both ways are taken.
        patch.setattr(wp, "capture_while", capture_while)
        patch.setattr(wp, "capture_if", capture_if)
        yield names


def compile_task(task: str, folder: Path) -> set[str]:
    """Compiles all that a training of a task launches on `sim=mjwarp`.

    Args:
        task: Its name.
        folder: As for `compiling`.

    Returns:
        Names of the modules.
    """
    spec = prepare(task, num_envs=4, device="cpu", sim="mjwarp", **{"sim.graph": False})
    cfg = spec.cfg
    with compiling(folder) as names:
        choice = choose_sim("mjwarp", torch.device("cpu"))
        env = VecEnv.make(spec.task_class, cfg.task, num_envs=4, choice=choice, sim=cfg.sim, seed=0)
        sim = env.sim
        assert isinstance(sim, MjwarpSim)
        sim.step(cfg.task.decimation)
        sim.reset(torch.ones(4, dtype=torch.bool))
        sim.refresh()
        with sim._graphs.scope():  # where masses are drawn
            Constants(sim.scene.model, sim._model, wp.zeros(4, dtype=bool)).derive()
    return names


def main(arguments: list[str]) -> int:
    folder, *names = arguments or [""]
    unknown = [unknown_choice("task", name, list(tasks()), None) for name in names if name not in tasks()]
    if not folder or unknown:
        sys.stderr.write(f"{next(iter(unknown), 'usage: gpu_kernels.py FOLDER [TASK ...]')}\n")
        return 2
    for task in names or tasks():
        began = time.perf_counter()
        sys.stdout.write(f"{task}: {len(compile_task(task, Path(folder)))} modules")
        sys.stdout.write(f", {time.perf_counter() - began:.0f} s\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
