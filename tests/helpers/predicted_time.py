"""Lower bounds of kernel times on a GPU: bytes and FLOPs over the data sheet's numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry


@dataclass(frozen=True, slots=True)
class Machine:
    bandwidth: float
    """Memory bandwidth [B/s]."""
    bf16: float
    """Dense bf16 matrix products [FLOP/s]."""
    fp32: float
    """fp32 without TF32 [FLOP/s]."""
    kernel_s: float
    """Minimal kernel in a CUDA graph [s]."""


H100 = Machine(bandwidth=3.35e12, bf16=989e12, fp32=67e12, kernel_s=2.5e-6)
"""SXM5: NVIDIA's data sheet of the H100 Tensor Core GPU has 3.35 TB/s, 1,979 TFLOPS of bf16 with sparsity, a half of
that without, and 67 TFLOPS of fp32. `kernel_s` is an estimate, between the 2 and 3 us that such kernels usually take;
the first run on a GPU replaces it."""

BYTES = Machine(bandwidth=1.0, bf16=float("inf"), fp32=float("inf"), kernel_s=0.0)
"""Its seconds are bytes."""

COUNTED_ENVS = 127
"""Envs while costs are counted: a prime, visible in the sizes of per-env tensors."""

_IN_PART = frozenset({"index", "index_select", "gather", "take", "index_copy_", "index_put_", "scatter_"})
"""Operators that read only part of their first tensor."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes and FLOPs of a kernel with COUNTED_ENVS envs."""

    fixed: int
    """Bytes independent of the number of envs."""
    per_env: int
    """Bytes that grow with it."""
    flops: int = 0
    bf16: bool = False

    def seconds(self, times: float, machine: Machine = H100) -> float:
        """Return the time with `times` as many envs [s]."""
        moved = (self.fixed + self.per_env * times) / machine.bandwidth
        computed = self.flops * (times if self.per_env else 1.0) / (machine.bf16 if self.bf16 else machine.fp32)
        return max(machine.kernel_s, moved, computed)


def cost_of(sizes: Iterable[tuple[int, int]], flops: int = 0, *, bf16: bool = False) -> Cost:
    """Return the cost of a kernel, given elements and bytes of its arrays."""
    fixed = per_env = 0
    for elements, size in sizes:
        if elements and elements % COUNTED_ENVS == 0:
            per_env += size
        else:
            fixed += size
    return Cost(fixed, per_env, flops, bf16)


def cost_of_operator(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> Cost:
    touched: Any = (args, result)
    if func.overloadpacket.__name__ in _IN_PART:
        touched = args[1:], None if result is args[0] else result
    tensors = [leaf for leaf in tree_leaves((touched, kwargs)) if isinstance(leaf, Tensor)]
    formula = flop_registry.get(func.overloadpacket)
    flops = 0 if formula is None else formula(*args, **kwargs, out_val=result)
    sizes = ((tensor.numel(), tensor.nbytes) for tensor in tensors)
    return cost_of(sizes, flops, bf16=any(tensor.itemsize == 2 for tensor in tensors))
