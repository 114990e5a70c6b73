"""Build of the Triton kernels of `compile=all` for an H100, without a GPU.

A training runs on the CPU. Each graph of torch.compile (forward and gradients) is moved to fake CUDA tensors; Inductor
generates Triton code, and Triton's ptxas compiles it. The kernels never run, so their results are not tested.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._pytree import tree_map

from helpers.training import make_trainer

CUDA = torch.device("cuda", 0)
H100 = SimpleNamespace(
    name="NVIDIA H100",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=80 << 30,
    warp_size=32,
    max_threads_per_block=1024,
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536,
    shared_memory_per_block_optin=232448,
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="needs a build of torch with CUDA; no GPU"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
]


class Moved(fx.Interpreter):
    """Interpreter that runs a CPU graph on CUDA."""

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        is_constant = n.op == "get_attr" and isinstance(value, Tensor)
        return torch.empty_like(value, device=CUDA) if is_constant and value.ndim else value

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = tree_map(lambda x: CUDA if isinstance(x, torch.device) else x, (args, kwargs))
        return super().call_function(target, args, kwargs)


@contextmanager
def fake_h100() -> Iterator[Any]:
    """Make torch and Triton find an H100 that has properties only; yield Triton's target."""
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import scheduler
    from torch._inductor.runtime import triton_helpers
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    target = GPUTarget("cuda", 90, 32)
    utils = SimpleNamespace(get_device_properties=lambda _: {"max_shared_mem": 232448, "multiprocessor_count": 132})
    with pytest.MonkeyPatch.context() as patch:
        for place in (torch.cuda, CudaInterface, CudaInterface.Worker):
            patch.setattr(place, "get_device_properties", staticmethod(lambda *_: H100))
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        for name, value in (("is_available", True), ("device_count", 1), ("current_device", 0), ("_lazy_init", None)):
            patch.setattr(torch.cuda, name, lambda *_, value=value: value)
        patch.setattr(triton_helpers, "set_driver_to_gpu", lambda: None)
        stand_in = SimpleNamespace(get_current_target=lambda: target, get_current_device=lambda: 0, utils=utils)
        patch.setattr(driver, "_active", stand_in)
        patch.setattr(scheduler, "has_triton", lambda: True)
        yield target


def triton_code(graph: fx.GraphModule, inputs: Sequence[Any]) -> str:
    """Return Inductor's code for a graph on CUDA."""
    from torch._inductor.codegen.common import init_backend_registration
    from torch._inductor.debug import DebugContext
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch.fx.experimental.proxy_tensor import make_fx

    init_backend_registration()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        tensors = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=CUDA) for x in inputs]
        moved = make_fx(Moved(graph).run, decomposition_table=select_decomp_table())(*tensors)
    lowering = GraphLowering(moved, example_inputs=tensors)
    with V.set_fake_mode(mode), V.set_graph_handler(lowering), V.set_debug_handler(DebugContext()):
        lowering.run(*tensors)
        code = lowering.codegen()[0]
    return getattr(code, "value", code)


def compile_kernels(code: str, folder: Path, target: Any) -> list[str]:
    """Compile the Triton kernels in Inductor's code to machine code; return their names."""
    import triton
    from triton.compiler import ASTSource

    names = []
    for name, text in re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)'''", code, re.DOTALL):
        file = folder / f"{name}_{len(list(folder.iterdir()))}.py"
        file.write_text(text)
        spec = importlib.util.spec_from_file_location(file.stem, file)
        assert spec is not None and spec.loader is not None
        module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        kernel = getattr(module, name)
        function, meta, config = kernel.fn, kernel.triton_meta, kernel.configs[0]
        constants = {**meta["constants"], **config.kwargs}
        source = ASTSource(
            fn=function,
            signature={name: "constexpr" if name in constants else kind for name, kind in meta["signature"].items()},
            constexprs={(function.arg_names.index(name),): value for name, value in constants.items()},
            attrs=meta["configs"][0],
        )
        made = triton.compile(
            source, target=target, options={"num_warps": config.num_warps, "num_stages": config.num_stages}
        )
        assert ".target sm_90" in made.asm["ptx"] and made.asm["cubin"][:4] == b"\x7fELF"
        names.append(name)
    return names


@pytest.mark.parametrize("task", ["Cartpole", "Ant"])
def test_triton_kernels_of_compile_all_build_for_sm90(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._inductor.decomposition import select_decomp_table

    kernels: list[list[str]] = []
    (tmp_path / "kernels").mkdir()

    def lower(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        with unset_fake_temporarily(), fake_h100() as target:
            kernels.append(compile_kernels(triton_code(graph, inputs), tmp_path / "kernels", target))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=lower, bw_compiler=lower, decompositions=select_decomp_table())
    original_compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda it, **options: original_compile(it, **{**options, "backend": backend}))
    trainer = make_trainer(task, tmp_path, compile="all", max_iterations=1)
    trainer.train()
    assert len(kernels) == 6, "4 functions of a step, loss, gradient"
    assert all(kernels), kernels
