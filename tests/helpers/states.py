"""Copies of steps and states for later comparison."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from gpusim_rl.env import Step
from gpusim_rl.testing.conformance import copied as saved
from gpusim_rl.testing.conformance import leaves

__all__ = ["copied", "fields", "saved", "saved_bytes"]


def fields(step: Step) -> dict[str, Any]:
    return {field.name: getattr(step, field.name) for field in dataclasses.fields(step)}


def copied(step: Step) -> Step:

    def copy(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: copy(item) for name, item in value.items()}
        return value.clone() if isinstance(value, Tensor) else value

    return Step(**{name: copy(value) for name, value in fields(step).items()})


def saved_bytes(state: Any) -> int:
    """Return the bytes that `torch.save` writes: each storage once, in full."""
    tensors = [leaf for _, leaf in leaves(state) if isinstance(leaf, Tensor)]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())
