"""URDF files: what ROS leaves to be found, and what MuJoCo's reader drops."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

import mujoco
import numpy as np
from jaxtyping import Float, Int

from gpusim_rl.errors import ConfigError, TaskError, import_extra

_SHOWN = 3  # paths in a message
PACKAGE_SCHEMES = ("package://", "model://")


def is_urdf(file: Path) -> bool:
    """Returns whether a file is URDF, whatever its name ends with."""
    try:
        with file.open("rb") as source:
            _, root = next(ElementTree.iterparse(source, events=["start"]))
    except (OSError, ElementTree.ParseError, StopIteration):
        return False  # MuJoCo says what is wrong
    return root.tag == "robot"


def read_urdf(file: Path, packages: Mapping[str, str | Path]) -> tuple[mujoco.MjSpec, dict[str, float]]:
    """Reads a robot with MuJoCo's reader: every link becomes a body, with its visual and its collision shapes.

    MuJoCo reads limits of position and effort, damping, friction, inertias, and `<mimic>`, which becomes a constraint.
    Links on fixed joints stay bodies. A `<mujoco><compiler .../></mujoco>` of the file holds, but for the settings that
    say where meshes are, and those that remove links and shapes. Beside the spec come the velocity limits of joints
    [rad/s or m/s], which MuJoCo does not know.

    Raises:
        TaskError: A mesh or its package is not there, or a Collada mesh needs what is not installed.
        ValueError: The file is not valid.
    """
    text = file.read_text(encoding="utf-8")
    if "<xacro:" in text:
        raise ValueError(f"it is a xacro template; try: xacro {file.name} > robot.urdf")
    try:
        robot = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise ValueError(f"XML: {error}") from None
    settings = robot.find("mujoco")
    settings = ElementTree.SubElement(robot, "mujoco") if settings is None else settings
    compiler = settings.find("compiler")
    compiler = ElementTree.SubElement(settings, "compiler") if compiler is None else compiler
    folder = file.parent / compiler.attrib.pop("meshdir", ".")
    compiler.attrib |= {"strippath": "false", "fusestatic": "false", "discardvisual": "false"}

    for mesh in robot.iter("mesh"):
        mesh.set("filename", str(_find(mesh.get("filename", ""), file, folder, packages)))
    spec = mujoco.MjSpec.from_string(ElementTree.tostring(robot, encoding="unicode"))
    for mesh in spec.meshes:
        if mesh.file.lower().endswith(".dae"):
            vertices, faces = _read_collada(Path(mesh.file))
            mesh.file, mesh.uservert, mesh.userface = "", vertices.ravel(), faces.ravel()
    limits = {}
    for joint in robot.iter("joint"):
        limit = joint.find("limit")
        velocity = math.nan if limit is None else float(limit.get("velocity", "nan"))
        if velocity > 0.0:  # some exporters write 0 for none
            limits[joint.get("name", "")] = velocity
    return spec, limits


def _find(name: str, file: Path, folder: Path, packages: Mapping[str, str | Path]) -> Path:
    """Returns the path of a mesh; raises TaskError where it is not there."""
    file, above = file.resolve(), [file.resolve().parent, *file.resolve().parents[1:]]
    scheme = next((scheme for scheme in PACKAGE_SCHEMES if name.startswith(scheme)), None)
    hint = ""
    if scheme:
        package, _, rest = name.removeprefix(scheme).partition("/")
        if package in packages:
            tried = [Path(packages[package]).expanduser() / rest]
        else:
            named = [parent / rest for parent in above if parent.name == package]
            tried = [*named, *(parent / package / rest for parent in above[:-1])]
            hint = f"; try packages={{{package!r}: <its folder>}}"
    else:
        rest = name.removeprefix("file://")
        tried = [file.parent / rest]
    if folder != file.parent:
        tried += [folder / rest, folder / Path(rest).name]
    for path in tried:
        if path.is_file():
            return path.resolve()
    places = list(dict.fromkeys(str(path) for path in tried))
    more = f" and in {len(places) - _SHOWN} folders above" if len(places) > _SHOWN else ""
    raise TaskError(f"{file.name}: no mesh {name!r}; looked for {', '.join(places[:_SHOWN])}{more}{hint}")


def _read_collada(file: Path) -> tuple[Float[np.ndarray, "vertices 3"], Int[np.ndarray, "faces 3"]]:
    """Returns shapes of a Collada file as one mesh [m]. Its `<unit>` counts. Its `<up_axis>` does not, as in ROS."""
    try:
        import_extra("collada", "urdf", file.name)
        trimesh = import_extra("trimesh", "urdf", file.name)
    except ConfigError as error:
        raise TaskError(str(error)) from None
    try:
        unit = ElementTree.parse(file).getroot().find("{*}asset/{*}unit")
        mesh = trimesh.load_scene(file).to_mesh()
    except Exception as error:  # of any library that reads a stranger's file
        raise TaskError(f"{file}: cannot read the mesh: {' '.join(str(error).split())}") from None
    metres = 1.0 if unit is None else float(unit.get("meter", 1.0))
    return metres * np.asarray(mesh.vertices), np.asarray(mesh.faces)
