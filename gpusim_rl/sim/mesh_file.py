"""Mesh repair: formats that MuJoCo cannot read, and flat or tiny meshes that it rejects."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import mujoco
import numpy as np

from gpusim_rl.errors import import_extra
from gpusim_rl.files import budgets
from gpusim_rl.sim.robot_xml import regular_file

MUJOCO_READS = (".stl", ".obj", ".msh")
_BOX = [0, 1, 3, 0, 3, 2, 4, 7, 5, 4, 6, 7, 0, 5, 1, 0, 4, 5, 2, 3, 7, 2, 7, 6, 0, 2, 6, 0, 6, 4, 1, 5, 7, 1, 7, 3]
_THIN = 1e-3  # minimum half size of the box that replaces a flat collision mesh [m]


def read_by_trimesh(mesh: mujoco.MjsMesh, file: Path) -> None:
    """Read a file into the vertices [m] and faces of `mesh`; ValueError if it is unreadable or trimesh is missing.

    As in ROS, a Collada file's `<unit>` applies, but its `<up_axis>` is ignored.
    """
    kind, metres = file.suffix.lower().removeprefix("."), 1.0
    trimesh: Any = import_extra("trimesh", "robots", file.name)
    if kind == "dae":
        import_extra("collada", "robots", file.name)
    from trimesh.resolvers import FilePathResolver

    regular_file(file, budgets.MESH_BYTES)

    class Resolver(FilePathResolver):
        """Resolver for glTF buffers only: materials and textures are never rendered."""

        def get(self, name: str) -> bytes:
            path = file.parent / name
            if path.suffix.lower() != ".bin" or not path.is_file():
                raise ValueError(f"glTF buffer {name!r} not found")
            regular_file(path, budgets.MESH_BYTES)
            return path.read_bytes()

    try:
        if kind == "dae" and (unit := ElementTree.parse(file).getroot().find("{*}asset/{*}unit")) is not None:
            metres = float(unit.get("meter", 1.0))
        with file.open("rb") as content:
            scene = trimesh.load_scene(content, file_type=kind, resolver=Resolver(str(file)), skip_materials=True)
        drawn = [scene.geometry[scene.graph[node][1]] for node in scene.graph.nodes_geometry]
        corners = 3 * sum(len(getattr(part, "faces", ())) for part in drawn)
        if corners > budgets.ASSET_NUMBERS:
            raise ValueError(f"mesh too large: {corners} face vertices, expected at most {budgets.ASSET_NUMBERS}")
        shape = scene.to_mesh()
        vertices, faces = metres * np.asarray(shape.vertices), np.asarray(shape.faces)
    except Exception as error:  # any parser may fail on an untrusted file
        raise ValueError(f"cannot read the mesh: {' '.join(str(error).split())}") from None
    if not len(faces) or not np.isfinite(vertices).all():
        raise ValueError("the mesh has no faces or contains non-finite vertices")
    mesh.file, mesh.uservert, mesh.userface = "", vertices.ravel(), faces.ravel()


def mend(mesh: mujoco.MjsMesh, file: Path, collides: bool) -> str:
    """Repair a mesh, or use a box if it `collides`; return a note on the box, or "". ValueError on failure."""
    error = _compiles(mesh, file, collides)
    if error and mesh.file and "volume" not in error:
        read_by_trimesh(mesh, file)
        error = _compiles(mesh, file, collides)
    if error:
        mesh.inertia = mujoco.mjtMeshInertia.mjMESH_INERTIA_SHELL
        error = _compiles(mesh, file, collides)
    if not error:
        return ""
    if mesh.file:
        read_by_trimesh(mesh, file)
    corners = np.reshape(mesh.uservert, (-1, 3))
    low, high = corners.min(axis=0), corners.max(axis=0)
    if not collides or not (high - low).max() > 0.0:
        raise ValueError(error)
    scale = np.abs(mesh.scale)
    middle, half = (low + high) / 2, np.maximum((high - low) / 2, _THIN / np.where(scale > 0, scale, 1.0))
    signs = np.array([[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)])
    mesh.uservert, mesh.userface = (middle + half * signs).ravel(), _BOX
    mesh.inertia = mujoco.mjtMeshInertia.mjMESH_INERTIA_CONVEX
    if error := _compiles(mesh, file, collides):
        raise ValueError(error)
    return "flat mesh, collides as its bounding box (at least 2 mm thick)"


def _compiles(mesh: mujoco.MjsMesh, file: Path, collides: bool) -> str:
    """Compile the mesh alone; return MuJoCo's error message, or ""."""
    spec = mujoco.MjSpec()
    alone = spec.add_mesh(name="mesh", scale=list(mesh.scale), inertia=mesh.inertia)
    if mesh.file:
        alone.file = str(file)
    else:
        alone.uservert, alone.userface = list(mesh.uservert), list(mesh.userface)
    shape = {"type": mujoco.mjtGeom.mjGEOM_MESH, "meshname": "mesh", "contype": int(collides), "conaffinity": 0}
    spec.worldbody.add_body().add_geom(**shape)
    try:
        spec.compile()
    except ValueError as error:
        return " ".join(str(error).split())
    return ""
