"""URDF reader: resolve ROS paths, repair parts that MuJoCo rejects or drops, and report each change."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

import mujoco
import numpy as np

from gpusim_rl.errors import TaskError
from gpusim_rl.files.paths import ROS_PACKAGES
from gpusim_rl.sim.mesh_file import MUJOCO_READS, mend, read_by_trimesh
from gpusim_rl.sim.robot_xml import parse, read_content, regular_file, root_tag

PACKAGE_SCHEMES = ("package://", "model://")
LEAST_MASS, LEAST_INERTIA = 1e-6, 1e-9  # MuJoCo's `boundmass` [kg] and `boundinertia` [kg m^2] for massless links
WATER = 1000.0  # kg/m^3
_SHOWN, _LINKS_SHOWN = 3, 12  # paths in a message, links in a line
_FOLDERS, _LONGEST = 10, 1000  # limits on a mesh's name: leading folders that may differ locally, characters
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_DEFAULT = re.compile(r"\$\(optenv\s+\w+\s*([^)]*)\)")  # default of an environment variable, in xacro and roslaunch
_FIND = re.compile(r"^(?:file:/*)?\$\(find\s+([^)\s]+)\s*\)/*")  # package folder, in roslaunch
_INERTIA = ("ixx", "ixy", "ixz", "iyy", "iyz", "izz")
_NUMBERS = {
    "origin": {"xyz": 3, "rpy": 3},
    "axis": {"xyz": 3},
    "box": {"size": 3},
    "mesh": {"scale": 3},
    "color": {"rgba": 4},
    **{tag: {"radius": 1, "length": 1} for tag in ("sphere", "cylinder", "capsule")},
    "mass": {"value": 1},
    "inertia": dict.fromkeys(_INERTIA, 1),
    "limit": dict.fromkeys(("lower", "upper", "effort", "velocity"), 1),
    "dynamics": {"damping": 1, "friction": 1},
    "mimic": {"multiplier": 1, "offset": 1},
}
_SHAPES = {"box": ("size",), "sphere": ("radius",), "cylinder": ("radius", "length"), "capsule": ("radius", "length")}
_SYMMETRIC = np.array([[0, 1, 2], [1, 3, 4], [2, 4, 5]])


def is_urdf(file: Path) -> bool:
    """Return whether a file is URDF, regardless of its suffix."""
    return root_tag(file) == "robot"


def read_urdf(file: Path, packages: Mapping[str, str | Path]) -> tuple[mujoco.MjSpec, dict[str, float], list[str]]:
    """Read a robot; return its spec, velocity limits of joints [rad/s or m/s], and one line per kind of change.

    Every link becomes a body with its visual and collision shapes. The file's MuJoCo `<compiler>` applies, except for
    its mesh and shape-removal settings. Raise TaskError or ValueError for missing or invalid parts.
    """
    notes: dict[str, list[str]] = {"links with an invalid mass or inertia": [], "corrected": [], "left out": []}
    changed, tidied, left_out = notes.values()
    robot = _parse(file, left_out)
    folder = file.parent / _set_compiler(robot)
    _tidy_numbers(robot, tidied)
    _tidy_joints(robot, tidied, left_out)
    children = [(joint.find("child"), joint.get("type")) for joint in robot.findall("joint")]
    moving = {child.get("link") for child, kind in children if child is not None and kind != "fixed"}
    _empty_links(robot)
    changed += filter(None, (_mend_inertia(link, link.get("name") in moving) for link in robot.findall("link")))
    colliding, names, links = set[str](), set[str](), dict[str, list[ElementTree.Element]]()
    for link in robot.findall("link"):
        _check_shapes(link, file, folder, packages, notes)
        for shape in (*link.findall("visual"), *link.findall("collision")):
            if (name := shape.get("name")) is not None and name in names:
                del shape.attrib["name"]  # MuJoCo would print a warning and drop the name
            names.add(name or "")
            if (mesh := shape.find("geometry/mesh")) is not None:
                links.setdefault(mesh.get("filename", ""), []).append(link)
                colliding |= {mesh.get("filename", "")} if shape.tag == "collision" else set()
    spec = _read(robot)
    _mend_meshes(spec, file, links, colliding, left_out)
    stated = {joint.get("name", ""): joint.find("limit") for joint in robot.findall("joint")}
    limits = {name: float(limit.get("velocity", "nan")) for name, limit in stated.items() if limit is not None}
    limits = {name: speed for name, speed in limits.items() if speed > 0.0}  # some exporters write 0 for no limit
    notes["collisions disabled between links that overlap when all joints are at 0"] = _exclude_overlaps(spec)
    return spec, limits, [f"{file}: {kind}: {_joined(lines)}" for kind, lines in notes.items() if lines]


def _parse(file: Path, left_out: list[str]) -> ElementTree.Element:
    """Parse a file, keeping links, joints, materials and MuJoCo's settings; raise ValueError for a xacro template."""
    content, template = read_content(file), f"this is a xacro template. Try: xacro {file.name} > expanded.urdf"
    try:
        robot = parse(content)
    except ValueError as error:
        outside = (part.rpartition(b"-->")[2] for part in content.split(b"<!--"))  # outside comments
        raise ValueError(template if any(b"<xacro:" in part for part in outside) else str(error)) from None
    for shape in (*robot.iterfind("link/visual"), *robot.iterfind("link/collision")):
        for child in [child for child in shape if child.tag.startswith("xacro:")]:  # call of an undefined macro
            left_out.append(f"<{child.tag}>")
            shape.remove(child)
    if any(element.tag.startswith("xacro:") for element in robot.iter()):
        raise ValueError(template)
    robot[:] = [element for element in robot if element.tag in ("link", "joint", "material", "mujoco")]
    return robot


def _set_compiler(robot: ElementTree.Element) -> str:
    """Add our defaults to MuJoCo's compiler settings; return the mesh folder."""
    parent = robot
    for tag in ("mujoco", "compiler"):
        child = parent.find(tag)
        parent = ElementTree.SubElement(parent, tag) if child is None else child
    folder = parent.attrib.pop("meshdir", ".")
    bounds = {"balanceinertia": "true", "boundmass": f"{LEAST_MASS:g}", "boundinertia": f"{LEAST_INERTIA:g}"}
    parent.attrib = {**bounds, **parent.attrib, **dict.fromkeys(("strippath", "fusestatic", "discardvisual"), "false")}
    return folder


def _tidy_joints(robot: ElementTree.Element, tidied: list[str], left_out: list[str]) -> None:
    for joint in robot.findall("joint"):
        axis, mimic = joint.find("axis"), joint.find("mimic")
        if axis is not None and joint.get("type") == "fixed":
            joint.remove(axis)
        elif axis is not None and math.hypot(*map(float, axis.get("xyz", "0").split())) < 1e-10:
            tidied.append(f"{_name(joint)}: replaced axis {axis.get('xyz', '')} with 1 0 0")
            axis.set("xyz", "1 0 0")
        if mimic is not None and mimic.get("joint", joint.get("name")) == joint.get("name"):
            joint.remove(mimic)
            left_out.append(f"{_name(joint)}: <mimic> that names no other joint")


def _read(robot: ElementTree.Element) -> mujoco.MjSpec:
    """Read a robot with MuJoCo; errors name the link or joint."""
    robot.text = "\n"
    for element in robot:
        element.tail = "\n"  # MuJoCo's errors have line numbers
    try:
        return mujoco.MjSpec.from_string(ElementTree.tostring(robot, encoding="unicode"))
    except ValueError as error:
        message = " ".join(str(error).split()).removeprefix("XML Error: ")
        if (match := re.search(r" Element '\w+', line (\d+)$", message)) and 2 <= int(match[1]) <= len(robot) + 1:
            message = f"{_name(robot[int(match[1]) - 2])}: {message[: match.start()]}"
        message = message.rstrip(": ").replace("URDF body not found", "the joints above it form a cycle")
        if "repeated" in message:
            message += f" {Counter(link.get('name') for link in robot.findall('link')).most_common(1)[0][0]!r}"
        raise ValueError(message) from None


def _name(element: ElementTree.Element) -> str:
    return f"{element.tag} {element.get('name', '')!r}"


def _joined(lines: list[str]) -> str:
    lines = list(dict.fromkeys(lines))
    more = f"; and {len(lines) - _LINKS_SHOWN} more" if len(lines) > _LINKS_SHOWN else ""
    return "; ".join(lines[:_LINKS_SHOWN]) + more


def _tidy_numbers(robot: ElementTree.Element, tidied: list[str]) -> None:
    """Rewrite numbers in MuJoCo's syntax, and remove repeated elements."""
    for owner in (*robot.findall("link"), *robot.findall("joint"), *robot.findall("material")):
        for element in owner.iter():
            first = {child.tag: child for child in reversed(element) if child.tag not in ("visual", "collision")}
            repeated = dict.fromkeys(child for child in element if first.get(child.tag, child) is not child)
            tidied += [f"{_name(owner)}: removed a second <{child.tag}>" for child in repeated]
            element[:] = [child for child in element if child not in repeated]
            for attribute, count in _NUMBERS.get(element.tag, {}).items():
                if (text := element.get(attribute)) is None:
                    continue
                place = f"{_name(owner)}: {attribute} of <{element.tag}>"
                if len(text) > 1000:  # longer patterns and lists take minutes and gigabytes
                    raise ValueError(f"{place}: expected {count} numbers, got {len(text)} characters")
                words = [word for word in re.split(r"[\s,]+", _DEFAULT.sub(r"\1", text)) if word]
                if element.tag == "limit" and words and words[0].lstrip("+-").lower() in ("inf", "infinity"):
                    del element.attrib[attribute]  # no limit
                    continue
                numbers = [match.group() for match in map(_NUMBER.match, words) if match is not None]
                numbers *= 3 if attribute == "scale" and len(numbers) == 1 else 1
                numbers += ["1"] if attribute == "rgba" and len(numbers) == 3 else []
                few = len(numbers) < count or not math.isfinite(sum(map(float, numbers)))
                if not words or (attribute == "rgba" and few):
                    tidied.append(f"{place}: removed {text!r}")
                    del element.attrib[attribute]
                    continue
                if few:
                    raise ValueError(f"{place}: expected {count} number{'s' * (count > 1)}, got {text!r}")
                if numbers[:count] != words:
                    tidied.append(f"{place}: replaced {text!r} with {' '.join(numbers[:count])}")
                element.set(attribute, " ".join(numbers[:count]))
        for material in owner.iter("material"):
            for color in [color for color in material.findall("color") if color.get("rgba") is None]:
                material.remove(color)


def _exclude_overlaps(spec: mujoco.MjSpec) -> list[str]:
    """Disable collisions between links that overlap in the reference pose, as MoveIt does; return the pairs as text.

    A mesh collides as its convex hull, which often reaches into a link that is not adjacent.
    """
    try:
        model = spec.copy().compile()
    except ValueError:
        return []  # compiling the scene reports the error
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    touching = data.contact.geom[data.contact.dist < 0.0]
    pairs = np.unique(np.sort(model.geom_bodyid[touching], axis=1), axis=0)
    names = [(model.body(one).name, model.body(two).name) for one, two in pairs if one]
    for one, two in names:
        spec.add_exclude(bodyname1=one, bodyname2=two)
    return [f"{one} and {two}" for one, two in names]


def _empty_links(robot: ElementTree.Element) -> None:
    """Make colliding links without `<inertial>` massless if a link rigidly attached to them has a mass.

    ROS's KDL ignores a root link's inertia, so files put it in a fixed child.
    """
    group = {link.get("name"): {link.get("name")} for link in robot.findall("link")}
    for joint in robot.findall("joint[@type='fixed']"):
        ends = [end.get("link") for end in (joint.find("parent"), joint.find("child")) if end is not None]
        if len(ends) == 2 and all(end in group for end in ends):
            joined = group[ends[0]] | group[ends[1]]
            group.update(dict.fromkeys(joined, joined))
    masses = {link.get("name"): link.find("inertial/mass[@value]") for link in robot.findall("link")}
    heavy = {name for name, mass in masses.items() if mass is not None and float(mass.get("value", "")) > 0.0}
    for link in robot.findall("link"):
        if link.find("inertial") is None and link.find("collision") is not None and group[link.get("name")] & heavy:
            inertial = ElementTree.SubElement(link, "inertial")
            ElementTree.SubElement(inertial, "mass", value=f"{LEAST_MASS:g}")
            moments = dict.fromkeys(("ixx", "iyy", "izz"), f"{LEAST_INERTIA:g}")
            ElementTree.SubElement(inertial, "inertia", ixy="0", ixz="0", iyz="0", **moments)


def _mend_inertia(link: ElementTree.Element, moves: bool) -> str:
    """Make a link's mass and inertia physical; return the change, or "". MuJoCo's `balanceinertia` fixes A + B < C."""
    inertial, mass, name = link.find("inertial"), link.find("inertial/mass[@value]"), link.get("name", "")
    if inertial is None or mass is None:
        if inertial is not None:
            link.remove(inertial)  # MuJoCo derives mass from the collision shapes
        if link.find("collision") is None:
            return f"{name} mass 0 -> {LEAST_MASS:g} kg" if moves else ""
        return "" if inertial is None else f"{name} no mass -> mass of its collision shapes at water density"
    inertia, given = inertial.find("inertia"), float(mass.get("value", ""))
    inertia = ElementTree.SubElement(inertial, "inertia") if inertia is None else inertia
    matrix = np.array([float(inertia.get(key, 0.0)) for key in _INERTIA])[_SYMMETRIC]
    moments, axes = np.linalg.eigh(matrix)
    if given >= LEAST_MASS and moments.max() < 1e-15:  # a point mass: use the inertia of a ball of water
        now = np.full(3, 0.4 * given * (3.0 * given / (4.0 * math.pi * WATER)) ** (2.0 / 3.0))
    else:
        now = np.maximum(moments, LEAST_INERTIA) if given < LEAST_MASS or moments.min() <= 1e-14 else moments
    changed = not np.array_equal(now, moments)
    matrix = axes * now @ axes.T if changed else matrix
    for row, column, key in zip(*np.triu_indices(3), _INERTIA, strict=True):
        if changed or inertia.get(key) is None:
            inertia.set(key, repr(float(matrix[row, column])))
    if given < LEAST_MASS:
        mass.set("value", f"{LEAST_MASS:g}")
        return f"{name} mass {given:g} -> {LEAST_MASS:g} kg" if moves else ""
    was, new = (" ".join(f"{moment:.3g}" for moment in values) for values in (moments, now))
    least, middle, largest = np.sort(now)
    if least + middle < largest * (1.0 - 1e-9):
        return f"{name} inertia {was} -> {now.mean():.3g} kg m^2, the mean of the three"
    return f"{name} inertia {was} -> {new} kg m^2" if changed else ""


def _check_shapes(
    link: ElementTree.Element, file: Path, folder: Path, packages: Mapping[str, str | Path], notes: dict[str, list[str]]
) -> None:
    """Resolve a link's meshes; remove empty shapes, and visuals with missing meshes if there is a collision shape."""
    name, left_out = link.get("name", ""), notes["left out"]
    for shape in (*link.findall("collision"), *link.findall("visual")):
        kind, reason = shape.find("geometry/*"), ""
        sizes = [] if kind is None else [kind.get(size, "0") for size in _SHAPES.get(kind.tag, ())]
        if kind is None:
            reason = "without geometry"
        elif kind.tag not in ("mesh", *_SHAPES):
            reason = f"<{kind.tag}>"
        elif not all(float(size) > 0.0 for text in sizes for size in text.split()):
            reason = f"{kind.tag} of size {' '.join(sizes)}"
        elif kind.tag == "mesh":
            try:
                path = _find(kind.get("filename", ""), file, folder, packages, notes["corrected"])
                regular_file(path)
                kind.set("filename", str(path))
            except TaskError as error:
                if shape.tag == "collision" or link.find("collision") is None:
                    raise error.within(f"{file.name}: link {name!r}") from None
                known = any("; tried " in line for line in left_out)
                reason = str(error).partition("; tried ")[0] if known else str(error)
        if reason:
            link.remove(shape)
            left_out.append(f"{shape.tag} of {name}: {reason}")


def _mend_meshes(
    spec: mujoco.MjSpec,
    file: Path,
    links: Mapping[str, list[ElementTree.Element]],
    colliding: set[str],
    left_out: list[str],
) -> None:
    """Read meshes in formats that MuJoCo cannot read; repair or remove meshes that MuJoCo cannot compile."""
    paths, broken = {mesh.name: mesh.file for mesh in spec.meshes}, dict[str, str]()
    for mesh in spec.meshes:
        if Path(mesh.file).suffix.lower() not in MUJOCO_READS:
            try:
                read_by_trimesh(mesh, Path(mesh.file))
            except ValueError as error:
                broken[mesh.name] = str(error)
    try:
        if not broken:
            spec.copy().compile()
            return
    except ValueError as error:
        if not re.search(r"mesh|vert|face|decoder|volume|STL|OBJ|normal", str(error)):
            raise
    for mesh in spec.meshes:
        path = paths[mesh.name]
        try:
            if mesh.name not in broken and (note := mend(mesh, Path(path), path in colliding)):
                left_out.append(f"{Path(path).name}: {note}")
        except ValueError as error:
            broken[mesh.name] = str(error)
    for name, reason in broken.items():
        path = paths[name]
        for link in links.get(path, []):
            text = f"link {link.get('name', '')!r}: mesh {path}: {reason}"
            if path in colliding or link.find("collision") is None:
                raise TaskError(text, key=file.name)
            left_out.append(text)
        for geom in [geom for geom in spec.geoms if geom.meshname == name]:
            spec.delete(geom)
        spec.delete(spec.mesh(name))


def _find(name: str, file: Path, folder: Path, packages: Mapping[str, str | Path], notes: list[str]) -> Path:
    """Return the path of a mesh file; add a note if the file is not where the URDF says."""
    if len(name) > _LONGEST:
        raise TaskError(f"mesh name too long: {len(name)} characters", expected=f"at most {_LONGEST}")
    packages, above = {**ROS_PACKAGES, **packages}, [*file.resolve().parents]
    name = _FIND.sub(r"package://\1/", name.strip().replace("\\", "/"))
    scheme = next((scheme for scheme in PACKAGE_SCHEMES if name.startswith(scheme)), "")
    package, _, rest = name.removeprefix(scheme).partition("/")
    if scheme and package in packages:
        tried, guesses = [Path(packages[package]).expanduser() / rest.lstrip("/")], []
    else:
        rest = rest.lstrip("/") if scheme else re.sub(r"^file:(//)?", "", name)
        parts = [part for part in Path(rest).parts if part not in ("/", "..")]
        starts = range(max(0, len(parts) - _FOLDERS), len(parts) - 1)
        guesses = [parent / Path(*parts[i:]) for i in starts for parent in above]
        guesses.append(folder / Path(rest).name)  # like MuJoCo
        if scheme:
            tried = [parent / rest for parent in above if parent.name == package]
            above[-1:] = [Path(place) for place in os.environ.get("ROS_PACKAGE_PATH", "").split(os.pathsep) if place]
            tried += [parent / package / rest for parent in above]
        else:
            tried = [file.parent / rest, *(parent / rest for parent in above[1:] if not Path(rest).is_absolute())]
    if folder != file.parent:
        tried += [folder / rest, folder / Path(rest).name]
    for path in (*tried, *guesses):
        if os.path.isfile(path):  # False if a name is too long
            if path not in tried:
                notes.append(f"mesh {name} found at {path}")
            return path.resolve()
    hint = f"Try --packages {package}=FOLDER (in Python: packages={{{package!r}: 'FOLDER'}})"
    hint = hint if scheme else "Try moving the file to one of them, or correcting its path in the URDF"
    places = list(dict.fromkeys(map(str, tried)))
    more = f" and {len(places) - _SHOWN} more places" if len(places) > _SHOWN else ""
    raise TaskError(f"mesh {name!r} not found; tried {', '.join(places[:_SHOWN])}{more}", hint=hint)
