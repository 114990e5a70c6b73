"""Layers of a critic ensemble, and their 16-bit features on CUDA in few kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from gpusim_rl.learn.networks import copies


class EnsembleLinear(nn.Module):
    """Batch of `nn.Linear` layers, initialised like `nn.Linear`."""

    def __init__(self, members: int, size: int, out_size: int) -> None:
        super().__init__()
        bound = size**-0.5
        self.weight = nn.Parameter(torch.empty(members, size, out_size).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(members, 1, out_size).uniform_(-bound, bound))

    def forward(
        self, x: Float[Tensor, "members batch size"], *, learns: bool = True
    ) -> Float[Tensor, "members batch out"]:
        """Apply each member's layer; without `learns`, its weights get no gradient."""
        weight, bias = (self.weight, self.bias) if learns else (self.weight.detach(), self.bias.detach())
        if weight.shape[2] == 1 and x.device.type == "cpu":  # 3 times as fast as baddbmm
            return torch.add((x * weight.mT).sum(dim=2, keepdim=True), bias)
        return torch.baddbmm(bias, x, weight)


class EnsembleNorm(nn.Module):
    """Layer normalisation with scale and offset per member."""

    def __init__(self, members: int, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(members, 1, size))
        self.offset = nn.Parameter(torch.zeros(members, 1, size))

    def forward(self, x: Float[Tensor, "members batch size"]) -> Float[Tensor, "members batch size"]:
        """Normalise each row."""
        return torch.addcmul(self.offset, functional.layer_norm(x, x.shape[-1:]), self.scale)


_aten = torch.ops.aten
SLOPES: dict[type[nn.Module], Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    nn.ReLU: lambda gradient, x, y: _aten.threshold_backward(gradient, y, 0.0),
    nn.ELU: lambda gradient, x, y: _aten.elu_backward(gradient, 1.0, 1.0, 1.0, True, y),
    nn.SELU: lambda gradient, x, y: _aten.elu_backward(gradient, 1.6732632423543772, 1.0507009873554805, 1.0, True, y),
    nn.Tanh: lambda gradient, x, y: _aten.tanh_backward(gradient, y),
    nn.SiLU: lambda gradient, x, y: _aten.silu_backward(gradient, x),
    nn.GELU: lambda gradient, x, y: _aten.gelu_backward(gradient, x),
}
"""Gradient of x for a gradient of the activation y(x)."""


class _SharedKernels(torch.autograd.Function):
    """16-bit features of all critics for x[0]; with two sets of weights also those of the target critics for x[1].

    Fewer kernels than with autograd: both sets share them, as do all casts and all sums over samples.
    """

    @staticmethod
    def forward(ctx: Any, layers: Sequence[nn.Module], dtype: torch.dtype, x: Tensor, *weights: Tensor) -> Any:  # type: ignore[reportIncompatibleMethodOverride]
        sets, members = len(x), len(weights[0])
        saved: list[Tensor] = []
        cast = [w.new_empty(sets, *w.shape, dtype=dtype) for w in weights[: len(weights) // sets]]
        torch._foreach_copy_([w[k] for k in range(sets) for w in cast], weights)  # type: ignore[reportPrivateImportUsage]
        given = iter([w.flatten(0, 1) for w in cast])
        x = x.new_empty(sets, members, *x.shape[1:], dtype=dtype).copy_(x[:, None]).flatten(0, 1)
        for layer in layers:
            saved.append(x)
            if isinstance(layer, EnsembleLinear):
                weight, bias = next(given), next(given)
                x = torch.baddbmm(bias, x, weight)
                saved.append(weight)
            elif isinstance(layer, EnsembleNorm):
                scale, offset = next(given), next(given)
                normal, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], None, None, 1e-5)
                x = torch.addcmul(offset, normal, scale)
                saved += normal, mean, rstd, scale
            else:
                x = layer(x)
                saved.append(x)
        ctx.layers, ctx.number = layers, len(weights)
        ctx.save_for_backward(*(tensor[:members] for tensor in saved))
        features = x.float().chunk(sets)
        ctx.mark_non_differentiable(*features[1:])
        return features

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[reportIncompatibleMethodOverride]
        saved, learns = [*ctx.saved_tensors], any(ctx.needs_input_grad[3:])
        gradient = gradient.to(saved[0].dtype)
        found: list[tuple[Tensor, bool]] = []  # gradients of weights, last to first, and whether to sum over samples
        for layer in reversed(ctx.layers):
            if isinstance(layer, EnsembleLinear):
                weight, x = saved.pop(), saved.pop()
                found += [(gradient, True), (x.mT @ gradient, False)] if learns else []
                gradient = gradient @ weight.mT if saved or ctx.needs_input_grad[2] else gradient
            elif isinstance(layer, EnsembleNorm):
                scale, rstd, mean, normal, x = (saved.pop() for _ in range(5))
                found += [(gradient, True), (gradient * normal, True)] if learns else []
                rest = x, x.shape[-1:], mean, rstd, None, None, [True, False, False]
                gradient = _aten.native_layer_norm_backward(gradient * scale, *rest)[0]
            else:
                y, x = saved.pop(), saved.pop()
                gradient = SLOPES[type(layer)](gradient, x, y)
        weights: Sequence[Tensor] = ()
        if rows := [rows for rows, summed in found if summed]:
            sums = iter(torch.cat(rows, dim=2).sum(dim=1, keepdim=True).split([x.shape[2] for x in rows], dim=2))
            weights = copies([next(sums) if summed else product for product, summed in found][::-1], torch.float32)
        inputs = gradient.sum(dim=0, keepdim=True, dtype=torch.float32) if ctx.needs_input_grad[2] else None
        return None, None, inputs, *weights, *(None,) * (ctx.number - len(weights))


def shared_features(
    layers: Sequence[nn.Module], dtype: torch.dtype, x: Tensor, weights: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Return float32 features [members, batch, out] of each set of inputs x [sets, batch, size] and weights."""
    return _SharedKernels.apply(layers, dtype, x, *weights)  # type: ignore[reportReturnType]
