"""Choice of the networks' precision."""

from __future__ import annotations

import torch


def choose_precision(precision: str, device: torch.device) -> tuple[bool, str]:
    """Return whether to run networks in bfloat16, and the reason."""
    if precision != "auto":
        return precision == "bf16", "as configured"
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
        return fast, "auto: the GPU " + ("supports" if fast else "does not support") + " bf16"
    if device.type == "cpu":
        fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        return fast, "auto: the CPU " + ("has" if fast else "has no") + " bf16 matrix instructions"
    return False, f"auto: {device.type}"
