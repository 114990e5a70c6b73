"""Transfer of environment steps to the learner's device."""

from __future__ import annotations

import torch
from torch import Tensor

from gpusim_rl.env.environment import Step

NUMBERS = ("reward",)
GROUPS = ("obs", "final_obs", "terms", "stats")
MASKS = ("terminated", "truncated", "diverged", "bad_action", "done", "incomplete", "skipped")


def moved(step: Step, device: torch.device) -> Step:
    """Move a step to the learner's device in one copy (to CUDA: asynchronous, from pinned memory)."""
    if step.reward.device == device:
        return step
    numbers = [(name, "", getattr(step, name)) for name in NUMBERS]
    numbers += [(name, key, value) for name in GROUPS for key, value in getattr(step, name).items()]
    masks = [(name, mask) for name in MASKS if (mask := getattr(step, name)) is not None]
    sources: list[Tensor] = [*(value for *_, value in numbers), *(mask for _, mask in masks)]
    sizes = [value.numel() for value in sources]
    source = step.reward.device
    pinned = source.type == "cpu" and device.type == "cuda"
    packed = torch.empty(sum(sizes), device=source, pin_memory=pinned)
    torch.cat([value.reshape(-1).float() for value in sources], out=packed)
    count = len(numbers)
    values, flags = packed.to(device, non_blocking=pinned).split([sum(sizes[:count]), sum(sizes[count:])])

    fields: dict[str, dict[str, Tensor] | Tensor] = {name: {} for name in GROUPS}
    for (name, key, value), copy in zip(numbers, values.split(sizes[:count]), strict=True):
        owner = fields[name] if key else fields
        assert isinstance(owner, dict)
        owner[key or name] = copy.view(value.shape)
    fields |= {name: flag for (name, _), flag in zip(masks, (flags != 0.0).split(sizes[count:]), strict=True)}
    return Step(**fields)  # type: ignore[arg-type]
