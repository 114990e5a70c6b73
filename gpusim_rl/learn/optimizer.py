"""AdamW whose step is decided on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class MaskedAdamW(torch.optim.AdamW):
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) that leaves out steps, as a tensor on the device says.

    Without weight decay it is Adam. Its state never moves: a CUDA graph knows where it is.

    Args:
        parameters: What it changes.
        learning_rate: Of Adam.
        weight_decay: Decoupled; part of a weight that is taken away by a step, per learning rate.
        max_norm: Of the gradient; None for no limit.

    Attributes:
        rate: The learning rate, []; a graph reads it again in every step.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], learning_rate: float, weight_decay: float, max_norm: float | None
    ) -> None:
        self.parameters = list(parameters)
        self._max_norm = max_norm
        kind = self.parameters[0].device.type
        # fused: one kernel per step; its count is a device tensor, which a CUDA graph needs (capturable)
        super().__init__(
            self.parameters,
            lr=learning_rate,
            weight_decay=weight_decay,
            fused=kind in ("cpu", "cuda"),
            capturable=kind == "cuda",
        )
        # The fused step reads it as a double on the CPU, and as a float on CUDA.
        dtype = torch.float32 if kind == "cuda" else torch.float64
        self.rate = torch.tensor(learning_rate, dtype=dtype, device=self.parameters[0].device)
        self.param_groups[0]["lr"] = self.rate

    def masked_step(self, gradients: Sequence[Tensor], hold: Tensor) -> tuple[Tensor, Tensor]:
        """One step, unless it is held or a gradient is not finite.

        Args:
            gradients: Of the parameters, in their order.
            hold: Change nothing, bool [].

        Returns:
            Norm of the gradient before it is limited, and whether it is not finite, bool [].
        """
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient.contiguous()  # as the fused step expects; it is, but for odd layers
        norm = nn.utils.get_total_norm(gradients)
        bad = ~(norm < torch.inf)
        # The fused step reads both on the device: it divides the gradient by one (which clips its norm), and changes
        # nothing where the other is 1. torch.amp does so too.
        self.grad_scale = None if self._max_norm is None else (norm / self._max_norm).clamp_(min=1.0)
        self.found_inf = (bad | hold).float()
        self.step()
        return norm, bad

    def moments(self) -> list[dict[str, Tensor]]:
        """The state of each parameter; empty before the first step."""
        return [
            {name: value.clone() for name, value in self.state[p].items()} if p in self.state else {}
            for p in self.parameters
        ]

    def load_moments(self, saved: Sequence[dict[str, Any]]) -> None:
        """Restores `moments`, in place."""
        for parameter, moments in zip(self.parameters, saved, strict=True):
            state = self.state[parameter]
            for name in state.keys() | moments.keys():
                if name not in state:
                    state[name] = moments[name].to(parameter.device, copy=True)
                elif name in moments:
                    state[name].copy_(moments[name])
                else:
                    state[name].zero_()
