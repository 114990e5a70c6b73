"""Environments on one device for a learner on another one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gpusim_rl.env.environment import Step


def moved(step: Step, device: torch.device) -> Step:
    """A step of the environments on the learner's device.

    Physics on the CPU under a policy on the GPU is the one configuration that copies, as its user asked.
    """
    if step.reward.device == device:
        return step

    def to_device(value: Any) -> Any:
        if value is None or isinstance(value, Tensor):
            return value if value is None else value.to(device)
        return {name: item.to(device) for name, item in value.items()}

    return Step(**{name: to_device(getattr(step, name)) for name in Step.__slots__})
