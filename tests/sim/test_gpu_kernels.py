"""The Warp kernels that tasks launch compile for a GPU; no GPU is needed for that."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from warp._src import context

from gpusim_rl.settings.discover import tasks
from gpusim_rl.sim.warp import start_warp
from helpers.gpu_kernels import HOPPER, compile_task

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Binaries of all tasks, which share most of them."""
    start_warp(torch.device("cpu"))
    if not context.runtime.is_cuda_enabled:
        pytest.skip("this build of Warp has no compiler for CUDA")
    return tmp_path_factory.mktemp("kernels")


@pytest.mark.parametrize("task", tasks())
def test_kernels_compile_for_a_gpu(task: str, folder: Path) -> None:
    modules = compile_task(task, folder)
    binaries = {file.parent.name for file in folder.glob(f"*/*/*.sm{HOPPER}*.cubin")}
    assert len(modules) > 20 and modules <= binaries
