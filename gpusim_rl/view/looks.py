"""Looks of robots: decimated meshes of MuJoCo Menagerie, drawn in place of collision shapes.

`gpusim-rl looks go1` writes a file into the user's cache for viewers, videos and pages. Training never reads it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import mujoco
import numpy as np

from gpusim_rl.errors import ConfigError, TaskError, available, import_extra, warn
from gpusim_rl.files import npz_file
from gpusim_rl.files.paths import assets_dir, from_home
from gpusim_rl.files.safe_open import read_bytes
from gpusim_rl.sim import Scene, menagerie
from gpusim_rl.sim.robot_file import HIDDEN_GROUP, hide_collision_shapes, one_line
from gpusim_rl.sim.robot_xml import bounded_memory, check_assets

ROBOTS = {"go1": "unitree_go1", "go2": "unitree_go2", "g1": "unitree_g1", "t1": "booster_t1"}
"""Robots in tasks/assets, with their folders in MuJoCo Menagerie."""
FACES = 60_000  # of a robot after decimation
MOST_BYTES = 1_500_000  # size of a file, packed and unpacked
MOST_FACES = 5_000_000  # of a robot before decimation; G1 has 400,000
PART_FACES = (1 << 16) // 3  # of a part, so that 16-bit numbers count its vertices
GENTLY = 2.0  # aggressiveness of decimation; the default, 7, crumples thin shells
SMOOTH = np.radians(35.0)  # angle between faces up to which an edge is drawn smooth
NEAR = 1e-3  # tolerance of body positions, to distinguish robots with equal names [m]
ENOUGH = 0.75  # share of bodies that must match: Menagerie's T1 has other hands
LICENCE_BYTES = 64 << 10
MESH = mujoco.mjtGeom.mjGEOM_MESH


@dataclass(frozen=True)
class Part:
    """Mesh of one colour on a body."""

    body: str
    rgba: np.ndarray  # [4]
    vertices: np.ndarray  # int16 [n, 3], in the body's frame, in units of `Looks.unit`
    faces: np.ndarray  # uint16 [m, 3]


@dataclass(frozen=True)
class Looks:
    """Meshes of a robot; `places` has each body's parent, and its position in the parent's frame [m]."""

    unit: float  # [m]
    parts: tuple[Part, ...]
    places: Mapping[str, tuple[str, np.ndarray]]
    licence: str

    def on(self, model: mujoco.MjModel) -> list[tuple[int, Part]]:
        """Return parts with their bodies in a model; none if it is another robot, or its bodies have meshes."""
        names, matches = {part.body for part in self.parts}, dict[int, str]()
        for body in range(1, model.nbody):
            name, parent = (model.body(i).name.rpartition("/")[2] for i in (body, model.body_parentid[body]))
            above, pos = self.places.get(name, ("", np.zeros(3)))
            if name in names and (not above or (above == parent and np.abs(pos - model.body_pos[body]).max() < NEAR)):
                matches[body] = name
        has_meshes = np.isin(model.geom_bodyid[model.geom_type == MESH], list(matches)).any()
        if has_meshes or len({*matches.values()}) < ENOUGH * len(names):
            return []
        return [(body, part) for body, name in matches.items() for part in self.parts if part.body == name]


def find(model: mujoco.MjModel) -> tuple[Looks | None, list[tuple[int, Part]]]:
    """Return the looks of a model's robot, and the parts with their bodies; None and no parts without a file."""
    for file in (folder() / f"{name}.npz" for name in ROBOTS):
        looks = _read_once(file, file.stat().st_mtime_ns) if file.is_file() else None
        if looks is not None and (worn := looks.on(model)):
            return looks, worn
    return None, []


def folder() -> Path:
    """Return the folder of the files: `GPUSIM_RL_LOOKS`, or one in the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME") or from_home("~/.cache")
    return Path(os.environ.get("GPUSIM_RL_LOOKS") or Path(base, "gpusim_rl", "looks"))


def hints(scene: Scene) -> list[str]:
    """Return a line on how to get the looks of a scene's robot; none if they exist, or the robot is not in `ROBOTS`."""
    names = [file.stem for file in scene.files if assets_dir() in file.parents and file.stem in ROBOTS]
    missing = names and find(scene.model)[0] is None
    return [f"showing collision shapes; run gpusim-rl looks {names[0]} for the robot's meshes"] if missing else []


def compiled(spec: mujoco.MjSpec, scene: Scene) -> mujoco.MjModel:
    """Compile a copy of a scene's spec for pictures, with looks instead of collision shapes, if there are any."""
    (looks, worn), added = find(scene.model), []
    for number, (body, part) in enumerate(worn):
        mesh = spec.add_mesh(name=f"gpusim_rl/looks/{number}", inertia=mujoco.mjtMeshInertia.mjMESH_INERTIA_SHELL)
        mesh.uservert, mesh.userface = (looks.unit * part.vertices).ravel() if looks else [], part.faces.ravel()
        drawn = {"type": MESH, "meshname": mesh.name, "rgba": part.rgba, "contype": 0, "conaffinity": 0, "mass": 0.0}
        added.append(spec.body(scene.model.body(body).name).add_geom(**drawn, group=HIDDEN_GROUP - 1))
    model = spec.compile()
    shapes = np.setdiff1d(np.arange(model.ngeom), [geom.id for geom in added])
    model.geom_group[shapes] = scene.model.geom_group  # hides collision shapes behind visual ones
    model.geom_group[shapes[np.isin(model.geom_bodyid[shapes], [body for body, _ in worn])]] = HIDDEN_GROUP
    return model


def for_page(model: mujoco.MjModel) -> tuple[dict[str, bytes], str]:
    """Return parts for draw.js (description as JSON; all vertices, then all faces) and licence; empty without looks."""
    looks, worn = find(model)
    if looks is None:
        return {}, ""
    parts = [[body, part.rgba.tolist(), len(part.vertices), len(part.faces)] for body, part in worn]
    numbers = [part.vertices.astype("<i2") for _, part in worn] + [part.faces.astype("<u2") for _, part in worn]
    described = json.dumps({"unit": looks.unit, "parts": parts}).encode()
    return {"looks": described, "skin": b"".join(map(bytes, numbers))}, f"\n\n{looks.licence}"


@cache
def _read_once(file: Path, _changed_ns: int) -> Looks | None:
    try:
        return read(file)
    except ConfigError as error:
        warn(str(error))
        return None


def read(file: Path) -> Looks:
    """Read a file that `write` wrote; ConfigError if it is damaged."""
    try:
        arrays, _ = npz_file.load(file, MOST_BYTES)
        bodies, pos, unit = arrays["bodies"].tolist(), arrays["pos"].astype(float), float(arrays["unit"])
        places = dict(zip(bodies, zip(arrays["parents"].tolist(), pos, strict=True), strict=True))
        owners, rgba, vertices, faces = (arrays[key] for key in ("owners", "rgba", "vertices", "faces"))
        ends = np.cumsum(arrays["counts"], axis=0, dtype=int)
        assert (rgba.dtype, vertices.dtype, faces.dtype) == (np.uint8, np.int16, np.uint16)
        assert rgba.shape == (len(owners), 4) and (arrays["counts"] > 0).all() and 0.0 < unit < 1.0
        assert vertices.shape == (ends[-1, 0], 3) and faces.shape == (ends[-1, 1], 3) and np.isfinite(pos).all()
        split = np.split(vertices, ends[:-1, 0]), np.split(faces, ends[:-1, 1])
        parts = tuple(map(Part, [bodies[i] for i in owners], rgba / 255.0, *split))
        assert all(part.faces.max() < len(part.vertices) for part in parts)
        return Looks(unit, parts, places, str(arrays["licence"])[:LICENCE_BYTES])
    except Exception:  # of a damaged file
        hint = f"Try gpusim-rl looks {file.stem}"
        raise ConfigError("damaged file of a robot's meshes", key=str(file), hint=hint) from None


def write(robot: str) -> Path:
    """Download a robot of `ROBOTS`, decimate its visual meshes, and write its file; return the path.

    Raise ConfigError or TaskError for an unknown robot, a missing extra, a failed download, or a model that is damaged,
    too large, or without meshes or licence.
    """
    if robot not in ROBOTS:
        raise ConfigError("no meshes of this robot", key=robot, hint=available(robot, ROBOTS).strip())
    for module in ("trimesh", "fast_simplification"):
        import_extra(module, "robots", "looks")
    source, file = f"{menagerie.PREFIX}{ROBOTS[robot]}", folder() / f"{robot}.npz"
    try:
        with bounded_memory():
            spec = menagerie.load(source)
            root = Path(spec.modelfiledir).resolve()
            if outside := [m.file for m in spec.meshes if root not in (root / spec.meshdir / m.file).resolve().parents]:
                raise ValueError(f"mesh {outside[0]!r} is outside of the model's folder")
            check_assets(spec)
            model = spec.compile()
        licence = read_bytes(root / "LICENSE", LICENCE_BYTES).decode(errors="replace")
    except TaskError as error:
        raise error if error.key == source else error.within(source) from None
    except (ValueError, OSError) as error:
        raise TaskError(one_line(error), key=source) from None
    hide_collision_shapes(model)
    notice = f"Meshes of {robot}: {ROBOTS[robot]} of MuJoCo Menagerie, decimated by gpusim_rl."
    arrays = {**_arrays(model, source), "licence": np.array(f"{notice}\n\n{licence}")}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        npz_file.save(file, arrays)
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror or error}") from None
    read(file)
    return file


def _arrays(model: mujoco.MjModel, source: str) -> dict[str, np.ndarray]:
    """Return the decimated visual meshes of a model as the arrays of a file."""
    drawn = (model.geom_type == MESH) & (model.geom_group < HIDDEN_GROUP) & (model.geom_bodyid > 0)
    geoms = np.flatnonzero(drawn)
    sizes, materials = model.mesh_facenum[model.geom_dataid[geoms]], model.geom_matid[geoms]
    if not 0 < sizes.sum() <= MOST_FACES:
        raise ConfigError(key=source, expected=f"meshes with 1 to {MOST_FACES:,} faces", got=int(sizes.sum()))
    share = FACES * np.sqrt(sizes) / np.sqrt(sizes).sum()  # decimates small parts less
    most = np.minimum(share, PART_FACES).astype(int).tolist()
    rgba = [model.geom_rgba[g] if m < 0 else model.mat_rgba[m] for g, m in zip(geoms, materials, strict=True)]
    vertices, faces = zip(*(_decimated(model, g, n) for g, n in zip(geoms.tolist(), most, strict=True)), strict=True)
    unit = np.abs(np.concatenate(vertices)).max() / np.iinfo(np.int16).max
    return {
        "unit": np.array(unit, float),
        "bodies": np.array([model.body(i).name for i in range(1, model.nbody)]),
        "parents": np.array([model.body(i).name if i else "" for i in model.body_parentid[1:]]),
        "pos": model.body_pos[1:].astype(np.float32),
        "owners": model.geom_bodyid[geoms] - 1,
        "rgba": np.rint(255.0 * np.array(rgba)).astype(np.uint8),
        "counts": np.array([*zip(map(len, vertices), map(len, faces), strict=True)]),
        "vertices": np.rint(np.concatenate(vertices) / unit).astype(np.int16),
        "faces": np.concatenate(faces).astype(np.uint16),
    }


def _decimated(model: mujoco.MjModel, geom: int, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a geom's vertices in its body's frame [m], apart at sharp edges, and about `most` faces or fewer."""
    trimesh: Any = import_extra("trimesh", "robots", "looks")
    decimation: Any = import_extra("fast_simplification", "robots", "looks")
    mesh, turn = model.mesh(model.geom_dataid[geom]), np.zeros(9)
    first, start = int(mesh.vertadr[0]), int(mesh.faceadr[0])
    vertices = model.mesh_vert[first : first + int(mesh.vertnum[0])]
    shape = trimesh.Trimesh(vertices, model.mesh_face[start : start + int(mesh.facenum[0])])  # merges equal vertices
    if len(shape.faces) > most:
        points = shape.vertices.astype(np.float32)
        shape = trimesh.Trimesh(*decimation.simplify(points, shape.faces, target_count=most, agg=GENTLY))
    shape = trimesh.graph.smooth_shade(shape, angle=SMOOTH, facet_minarea=None)
    mujoco.mju_quat2Mat(turn, model.geom_quat[geom])
    return shape.vertices @ turn.reshape(3, 3).T + model.geom_pos[geom], shape.faces
