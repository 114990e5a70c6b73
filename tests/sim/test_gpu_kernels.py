"""Compilation of the tasks' Warp kernels for a GPU, on a machine without one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import warp as wp
from warp._src import context

from gpusim_rl.settings.discover import tasks
from gpusim_rl.sim.warp import start_warp
from helpers.gpu_kernels import HOPPER, LARGEST_BLOCK, compile_task, compiling
from helpers.watched import watched  # noqa: F401

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the binaries of all tasks, which share most of them."""
    start_warp(torch.device("cpu"))
    if not context.runtime.is_cuda_enabled:
        pytest.skip("this build of Warp has no compiler for CUDA")
    return tmp_path_factory.mktemp("kernels")


@pytest.mark.parametrize("task", tasks())
def test_kernels_compile_for_a_gpu(task: str, folder: Path) -> None:
    modules = compile_task(task, folder)
    binaries = {file.parent.name for file in folder.glob(f"*/*/*.sm{HOPPER}*.cubin")}
    assert len(modules) > 20 and modules <= binaries


@pytest.mark.usefixtures("watched")
def test_camera_kernels_compile_for_a_gpu(folder: Path) -> None:
    modules = compile_task("Cartpole", folder)
    assert any("render_megakernel" in module for module in modules), modules
    assert any("camera_renderer" in module for module in modules), modules
    assert modules <= {file.parent.name for file in folder.glob(f"*/*/*.sm{HOPPER}*.cubin")}


@wp.kernel(module="unique")
def count_up(numbers: wp.array[int]):
    numbers[wp.tid()] += 1


def test_suggested_and_launched_block_sizes_are_both_compiled(folder: Path) -> None:
    numbers = wp.zeros(8, dtype=int, device="cpu")
    with compiling(folder) as names:
        size, _ = wp.get_suggested_block_size(count_up)
        assert size == LARGEST_BLOCK
        wp.launch(count_up, 8, outputs=[numbers], block_dim=128, device="cpu")
        module = count_up.module
        assert names == {module.get_module_identifier(size) for size in (LARGEST_BLOCK, 128)} and len(names) == 2
    binaries = {file.parent.name for file in folder.glob(f"*/*/*.sm{HOPPER}*.cubin")}
    assert names <= binaries
