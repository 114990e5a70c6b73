"""Ground of a scene: planes and height fields."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
from jaxtyping import Float

from gpusim_rl.errors import TaskError
from gpusim_rl.sim.terrain import Terrain

NAME = "ground"
TERRAIN_DEPTH = 1.0  # thickness below the lowest point [m]; anything that sinks deeper falls through


def add_plane(spec: mujoco.MjSpec, friction: Sequence[float], solimp: Sequence[float], margin: float) -> None:
    """Add a plane; see `Scene.add_ground`."""
    _add_material(spec)
    surface = {"friction": list(friction), "solimp": [*solimp, 0.5, 2.0], "margin": margin, "material": NAME}
    spec.worldbody.add_geom(name=NAME, type=mujoco.mjtGeom.mjGEOM_PLANE, size=[0, 0, 1], **surface)


def add_terrain(spec: mujoco.MjSpec, terrain: Terrain, friction: Sequence[float]) -> None:
    """Add a height field and its border; see `Scene.add_terrain`."""
    half_x, half_y = terrain.half_size
    surface = add_heights(spec, NAME, terrain.heights.cpu().numpy(), terrain.half_size, (0.0, 0.0, 0.0), friction)
    surface |= {"type": mujoco.mjtGeom.mjGEOM_BOX}
    border = 0.5 * terrain.cfg.border
    for sign, side in (("-", -1), ("+", 1)) if border else ():
        for name, pos, size in (
            ("x", [side * (half_x + border), 0], [border, half_y + 2 * border]),
            ("y", [0, side * (half_y + border)], [half_x, border]),
        ):
            place, size = [*pos, -TERRAIN_DEPTH], [*size, TERRAIN_DEPTH]
            spec.worldbody.add_geom(name=f"border_{sign}{name}", pos=place, size=size, **surface)


def add_heights(
    spec: mujoco.MjSpec,
    name: str,
    heights: Float[np.ndarray, "x y"],
    half_size: tuple[float, float],
    pos: Sequence[float],
    friction: Sequence[float],
) -> dict[str, Any]:
    """Add a height field and its geom; return the geom's surface properties."""
    low, relief = heights.min(), max(heights.max() - heights.min(), 1e-3)
    if spec.material(NAME) is None:
        _add_material(spec)
    surface = {"friction": list(friction), "material": NAME, "solref": [2.0 * spec.option.timestep, 1.0]}
    surface["solmix"] = 1e3  # use our solref instead of averaging it with the other geom's
    columns, rows = heights.shape
    userdata = ((heights.T - low) / relief).ravel()
    spec.add_hfield(name=name, size=[*half_size, relief, TERRAIN_DEPTH], ncol=columns, nrow=rows, userdata=userdata)
    kind, place = mujoco.mjtGeom.mjGEOM_HFIELD, [pos[0], pos[1], pos[2] + low]
    spec.worldbody.add_geom(name=name, type=kind, hfieldname=name, pos=place, **surface)
    return surface


def read_heights(
    call: str, heights: np.ndarray | str | Path, size: Sequence[float], height: float | None
) -> Float[np.ndarray, "x y"]:
    """Return heights [m] from an array or image; see `Scene.add_heightfield`."""
    if isinstance(heights, str | Path):
        if height is None or not height > 0.0:
            raise TaskError(key=f"{call}: height", expected="a positive height [m] for an image", got=height)
        try:
            field = height * _read_picture(Path(heights))
        except ValueError as error:
            raise TaskError(f"cannot read {heights}: {' '.join(str(error).split())}", key=call) from None
    elif height is not None:
        raise TaskError("height applies to images only; array values are already in m", key=call)
    else:
        field = np.asarray(heights, dtype=np.float64)
    if field.ndim != 2 or min(field.shape) < 2 or not np.isfinite(field).all():
        expected = "a 2D array of finite numbers, at least 2 x 2"
        raise TaskError(f"invalid heights of shape {list(field.shape)}", key=call, expected=expected)
    if len(size) != 2 or not min(size) > 0.0:
        raise TaskError(key=f"{call}: size", expected="two positive lengths [m]", got=size)
    return field


def _read_picture(file: Path) -> Float[np.ndarray, "x y"]:
    """Return a PNG's brightness, 0 (darkest) to 1 (brightest), shape [x, y]: +x is right, +y is up in the image."""
    spec = mujoco.MjSpec()
    spec.add_hfield(name="picture", file=str(file.resolve()), size=[1.0, 1.0, 1.0, 1.0])
    spec.worldbody.add_geom(type=mujoco.mjtGeom.mjGEOM_HFIELD, hfieldname="picture")
    model = spec.compile()
    return model.hfield_data.reshape(int(model.hfield_nrow[0]), int(model.hfield_ncol[0])).T.astype(np.float64)


def _add_material(spec: mujoco.MjSpec) -> None:
    look = {"rgb1": [0.36, 0.40, 0.46], "rgb2": [0.30, 0.34, 0.40], "width": 256, "height": 256}
    look |= {"type": mujoco.mjtTexture.mjTEXTURE_2D, "builtin": mujoco.mjtBuiltin.mjBUILTIN_CHECKER}
    spec.add_texture(name=NAME, **look)
    textures = [""] * mujoco.mjtTextureRole.mjNTEXROLE.value
    textures[mujoco.mjtTextureRole.mjTEXROLE_RGB.value] = NAME
    spec.add_material(name=NAME, textures=textures, texrepeat=[1, 1], texuniform=True)
