"""AdamW with device-side step skipping."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks  # type: ignore[reportPrivateUsage]

from gpusim_rl.errors import ConfigError, warn

_KERNELS: Any = torch
"""Multi-tensor operations of torch's own optimisers, which torch does not export by name."""


class MaskedAdamW(torch.optim.AdamW):
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) that skips steps by a device tensor; its state never moves.

    Args:
        parameters: Parameters; frozen ones (`requires_grad=False`) are left out.
        learning_rate: Learning rate; a 0-dim device tensor if it changes during training.
        weight_decay: Decoupled weight decay, per learning rate.
        max_norm: Maximum gradient norm, or None.
        eps: Term added to the denominator.

    Raises:
        ConfigError: All parameters are frozen.
    """

    # Torch wraps this method to keep its compiler out, and imports the compiler for that (a second).
    add_param_group = inspect.unwrap(torch.optim.AdamW.add_param_group)

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        learning_rate: float | Tensor,
        *,
        weight_decay: float = 0.0,
        max_norm: float | None = None,
        eps: float = 1e-8,
    ) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        if not self.parameters:
            raise ConfigError("nothing to learn: all parameters are frozen. Try requires_grad_(True) on a layer")
        self._max_norm = max_norm
        kind = self.parameters[0].device.type
        # fused: one kernel per step; its count is a device tensor, which a CUDA graph needs (capturable)
        super().__init__(
            self.parameters,
            weight_decay=weight_decay,
            eps=eps,
            fused=kind in ("cpu", "cuda"),
            capturable=kind == "cuda",
        )
        self.param_groups[0]["lr"] = learning_rate  # whose value the constructor would read
        self._lists: tuple[list[Tensor], list[Tensor], Tensor] | None = None  # on the CPU: moments, one count of steps

    def gradients(self, loss: Tensor, weight: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return the gradients of a loss, or of a weighted sum of losses; zeros for unused parameters."""
        return torch.autograd.grad(loss, self.parameters, weight, materialize_grads=True)

    def set_gradients(self, gradients: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Set the gradients of the next step; return their norm before clipping, and whether it is non-finite."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            # The fused step pairs what lies in memory in the same order, and looks at no strides.
            same = gradient.stride() == parameter.stride()
            parameter.grad = gradient if same else torch.empty_like(parameter).copy_(gradient)
        norm = torch.linalg.vector_norm(torch.stack(_KERNELS._foreach_norm([*gradients])))
        return norm, ~(norm < torch.inf)

    def masked_step(self, norm: Tensor, hold: Tensor) -> None:
        """Step with the gradients set before, of this norm; change nothing where `hold`, bool []."""
        # The fused step reads both on the device: it divides the gradient by one (which clips its norm), and changes
        # nothing where the other is 1. torch.amp does so too.
        relative = norm if self._max_norm in (None, 1.0) else norm / self._max_norm
        self.grad_scale = None if self._max_norm is None else relative.clamp(min=1.0)
        self.found_inf = hold.float()
        if self.parameters[0].device.type != "cpu":
            self.step()
            return
        if self._lists is None:
            self._lists = self._state_on_cpu()
        self._step_on_cpu(*self._lists)
        for hook in _global_optimizer_post_hooks.values():
            hook(self, (), {})

    def _state_on_cpu(self) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """Return the moments of all parameters and their common step count; create what was not restored."""
        states = [self.state[parameter] for parameter in self.parameters]
        count = next((state["step"] for state in states if state), torch.zeros(()))
        for parameter, state in zip(self.parameters, states, strict=True):
            for name in ("exp_avg", "exp_avg_sq"):
                if name not in state:
                    state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["step"] = count
        return [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states], count

    @torch.no_grad()
    def _step_on_cpu(self, means: list[Tensor], squares: list[Tensor], count: Tensor) -> None:
        """Step with the kernel of `AdamW`, without torch's per-call overhead."""
        group = self.param_groups[0]
        count += 1
        _KERNELS._fused_adamw_(
            self.parameters,
            [parameter.grad for parameter in self.parameters],
            means,
            squares,
            [],
            [count] * len(means),
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            grad_scale=self.grad_scale,
            found_inf=self.found_inf,
        )
        count -= self.found_inf

    def moments(self) -> list[dict[str, Tensor]]:
        """Return the state of each parameter; empty before the first step."""
        return [
            {name: value.clone() for name, value in self.state[p].items()} if p in self.state else {}
            for p in self.parameters
        ]

    def load_moments(self, saved: Sequence[dict[str, Any]]) -> None:
        """Restore `moments` in place; start from scratch if the parameters changed."""
        shapes = [moments["exp_avg"].shape if moments else None for moments in saved]
        if len(saved) != len(self.parameters) or any(
            shape not in (None, parameter.shape) for parameter, shape in zip(self.parameters, shapes, strict=True)
        ):
            warn("other parameters learn now than before: the optimiser begins again")
            return
        for parameter, moments in zip(self.parameters, saved, strict=True):
            state = self.state[parameter]
            for name in state.keys() | moments.keys():
                if name not in state:
                    state[name] = moments[name].to(parameter.device, copy=True)
                elif name in moments:
                    state[name].copy_(moments[name])
                else:
                    state[name].zero_()
