"""Cache of the kernel that MuJoCo Warp builds for each camera context."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any


def keep() -> None:
    """Build the kernel once per process for equal settings, if MuJoCo Warp is imported."""
    if (render := sys.modules.get("mujoco_warp._src.render")) is None:
        return
    build, kernels = render._build_megakernel, dict[Any, Any]()
    types = (int, float, bool, render.wp.uint32, render.wp.vec3)  # of the fields that the kernel is compiled with

    def kept_build(model: Any, context: Any) -> Any:
        static = [repr(getattr(context, f.name)) for f in dataclasses.fields(context) if f.type in types]
        key = (model.nlight, context.geom_ray_types, *static)
        if key not in kernels:
            kernels[key] = build(model, context)
        return kernels[key]

    render._build_megakernel = kept_build
