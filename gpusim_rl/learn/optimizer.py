"""AdamW with device-side step skipping."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward  # type: ignore[reportPrivateUsage]
from torch.optim.optimizer import _global_optimizer_post_hooks  # type: ignore[reportPrivateUsage]

from gpusim_rl.errors import ConfigError, warn

FIRST_SCALE, GROWTH_INTERVAL = 2.0**16, 2000  # as in torch.amp.GradScaler
_KERNELS: Any = torch  # multi-tensor operations of torch's own optimisers, which torch does not export by name


class MaskedAdamW(torch.optim.AdamW):
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) with device-side step skipping and state at fixed addresses.

    Frozen parameters are left out; if all are frozen, ConfigError is raised. `learning_rate` is a 0-dim device
    tensor if it changes during training. `max_norm` clips the gradient norm. With `scaled`, losses are multiplied by
    a scale that keeps float16 gradients in range (Micikevicius et al. 2018, arXiv 1710.03740), without syncs: it halves
    after a non-finite gradient, and doubles after 2,000 finite ones.
    """

    # Torch wraps this method to exclude it from compilation, and imports the compiler to do so (1 s).
    add_param_group = inspect.unwrap(torch.optim.AdamW.add_param_group)

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        learning_rate: float | Tensor,
        *,
        weight_decay: float = 0.0,
        max_norm: float | None = None,
        eps: float = 1e-8,
        scaled: bool = False,
    ) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        if not self.parameters:
            raise ConfigError("all parameters are frozen", hint="Try requires_grad_(True) on a layer")
        self._max_norm = max_norm
        kind = self.parameters[0].device.type
        # fused: one kernel per step. capturable: step count on the device, for CUDA graphs
        fused, capturable = kind in ("cpu", "cuda"), kind == "cuda"
        super().__init__(self.parameters, weight_decay=weight_decay, eps=eps, fused=fused, capturable=capturable)
        self.param_groups[0]["lr"] = learning_rate  # not via the constructor, which would sync
        self._lists: tuple[list[Tensor], list[Tensor], Tensor] | None = None  # moments and step count
        device = self.parameters[0].device
        self._scale = torch.full((), FIRST_SCALE, device=device) if scaled else None
        self._finite_steps = torch.zeros((), dtype=torch.int32, device=device)  # since the scale changed

    def gradients(self, loss: Tensor, weight: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return the gradients of a loss, or of weighted losses, times the loss scale; zeros for unused parameters."""
        if self._scale is not None:
            weight = self._scale if weight is None else weight * self._scale
        if not loss.requires_grad:  # a network that detaches its output
            return tuple(map(torch.zeros_like, self.parameters))
        weight = torch.ones_like(loss) if weight is None else weight
        # torch.autograd.grad would import SymPy (0.3 s) to compare the shapes of loss and weight.
        found = _engine_run_backward((loss,), (weight,), False, False, (*self.parameters,), True, accumulate_grad=False)
        return tuple(torch.zeros_like(p) if g is None else g for g, p in zip(found, self.parameters, strict=True))

    def set_gradients(self, gradients: Sequence[Tensor]) -> Tensor:
        """Unscale and set the next gradients; return their norm before clipping."""
        if self._scale is not None:
            gradients = _KERNELS._foreach_mul([*gradients], self._scale.reciprocal())
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            # The fused step pairs elements by memory order, regardless of strides.
            same = gradient.stride() == parameter.stride()
            parameter.grad = gradient if same else torch.empty_like(parameter).copy_(gradient)
        norm = torch.linalg.vector_norm(torch.stack(_KERNELS._foreach_norm([*gradients])))
        if self._scale is not None:
            bad = 1.0 - (norm < torch.inf).float()
            _KERNELS._amp_update_scale_(self._scale, self._finite_steps, bad, 2.0, 0.5, GROWTH_INTERVAL)
        return norm

    def masked_step(self, norm: Tensor, limit: float | Tensor = torch.inf) -> None:
        """Step with the gradients from `set_gradients`, which returned `norm`, if norm < limit; else do nothing."""
        # As with torch.amp, the fused step divides gradients by grad_scale (clipping) and skips if found_inf is 1.
        relative = norm if self._max_norm in (None, 1.0) else norm / self._max_norm
        self.grad_scale = None if self._max_norm is None else relative.clamp(min=1.0)
        made = torch.lt(norm, limit, out=torch.empty_like(norm))  # 1 or 0, in one kernel; 0 for NaN
        self.found_inf = 1.0 - made
        if not self.param_groups[0]["fused"]:
            self.step()
            return
        if self._lists is None:
            self._lists = self._fused_state()
        self._fused_step(*self._lists, made)
        for hook in _global_optimizer_post_hooks.values():
            hook(self, (), {})

    def _fused_state(self) -> tuple[list[Tensor], list[Tensor], Tensor]:
        states = [self.state[parameter] for parameter in self.parameters]
        count = next((state["step"] for state in states if state), None)
        count = torch.zeros((), device=self.parameters[0].device) if count is None else count
        for parameter, state in zip(self.parameters, states, strict=True):
            for name in ("exp_avg", "exp_avg_sq"):
                if name not in state:
                    state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["step"] = count
        return [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states], count

    @torch.no_grad()
    def _fused_step(self, means: list[Tensor], squares: list[Tensor], count: Tensor, made: Tensor) -> None:
        """Step with the kernel of `AdamW`, without torch's per-call overhead and step counts per parameter."""
        settings = {name: self.param_groups[0][name] for name in ("lr", "weight_decay", "eps", "amsgrad", "maximize")}
        settings["beta1"], settings["beta2"] = self.param_groups[0]["betas"]
        count += made  # the kernel does not read it if the step is skipped
        lists = self.parameters, [p.grad for p in self.parameters], means, squares, [], [count] * len(means)
        _KERNELS._fused_adamw_(*lists, **settings, grad_scale=self.grad_scale, found_inf=self.found_inf)

    def moments(self) -> list[dict[str, Tensor]]:
        """Return copies of the parameters' Adam states, empty before the first step; the first has the loss scale."""
        saved = [{name: value.clone() for name, value in self.state.get(p, {}).items()} for p in self.parameters]
        if self._scale is not None:
            saved[0] |= {"scale": self._scale.clone(), "finite_steps": self._finite_steps.clone()}
        return saved

    def load_moments(self, saved: Sequence[dict[str, Any]]) -> None:
        """Restore `moments` in place; start from scratch if the parameters changed."""
        pairs = zip(saved, self.parameters, strict=False)
        same = all(moments.get("exp_avg", parameter).shape == parameter.shape for moments, parameter in pairs)
        if len(saved) != len(self.parameters) or not same:
            warn("the trainable parameters changed; resetting the optimiser")
            return
        saved = [dict(moments) for moments in saved]
        scale, finite_steps = (saved[0].pop(name, None) for name in ("scale", "finite_steps"))
        if self._scale is not None and scale is not None:
            self._scale.copy_(scale)
            self._finite_steps.copy_(finite_steps)
        for parameter, moments in zip(self.parameters, saved, strict=True):
            state = self.state[parameter]
            for name in state.keys() | moments.keys():
                if name not in state:
                    state[name] = moments[name].to(parameter.device, copy=True)
                elif name in moments:
                    state[name].copy_(moments[name])
                else:
                    state[name].zero_()
