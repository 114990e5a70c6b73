"""MJCF for Newton's importer."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import mujoco
import numpy as np

# Default values of MuJoCo's constraint parameters.
_DEFAULTS = dict.fromkeys(("solref", "solreflimit", "solreffriction"), ("0.02", "1"))
_DEFAULTS |= dict.fromkeys(("solimp", "solimplimit", "solimpfriction"), ("0.9", "0.95", "0.001", "0.5", "2"))


def plain_xml(xml: str, model: mujoco.MjModel) -> str:
    """Return XML without frames, files, planes and contact rules, and with complete vectors.

    Newton reads bodies in frames last and in reverse order, and planes only on the world, not on bodies fixed to it;
    the solver restores planes and contact rules. MuJoCo omits a vector's trailing defaults, which Newton reads as 0.
    """
    root = ET.fromstring(xml)
    used = {name for pair in root.iterfind("contact/pair") for name in (pair.get("geom1"), pair.get("geom2"))}
    used |= {wrap.get("geom") for wrap in root.iterfind("tendon/spatial/geom")}
    for contact in root.findall("contact"):
        root.remove(contact)
    for element in root.iter():
        for name, full in _DEFAULTS.items():
            if given := element.get(name, "").split():
                element.set(name, " ".join([*given, *full[len(given) :]]))
        if element.tag == "mesh" and element.get("name"):
            _inline_mesh(element, model)
        elif element.tag == "hfield" and element.get("file"):
            _inline_heights(element, model)
        elif element.tag == "geom" and element.get("type") == "plane":
            element.attrib |= {"type": "sphere", "size": "1", "mass": "0"}
        if element.tag == "geom" and element.get("name") in used:  # otherwise Newton sorts it before colliding geoms
            element.set("contype", "1")
    world = root.findall("worldbody")[0]
    _inline_frames(world)
    for i, body in enumerate(world.iter("body"), 1):  # Newton computes a different inertia for some meshes
        if model.body_mass[i] > 0.0:
            body[:] = [child for child in body if child.tag != "inertial"]
            values = {"pos": model.body_ipos, "quat": model.body_iquat, "diaginertia": model.body_inertia}
            values |= {"mass": model.body_mass}
            ET.SubElement(body, "inertial", {name: _text(value[i]) for name, value in values.items()})
    return ET.tostring(root, encoding="unicode")


def _text(values: np.ndarray | np.floating) -> str:
    return " ".join(f"{value:.17g}" for value in np.ravel(values))


def _inline_mesh(element: ET.Element, model: mujoco.MjModel) -> None:
    """Inline the vertices that MuJoCo has loaded, because the XML lacks the mesh file's folder."""
    mesh = model.mesh(element.get("name"))
    vertices, faces = model.mesh_vert[mesh.vertadr[0] :][: mesh.vertnum[0]], model.mesh_face[mesh.faceadr[0] :]
    turn = np.zeros(9)
    mujoco.mju_quat2Mat(turn, model.mesh_quat[mesh.id])
    vertices = vertices @ turn.reshape(3, 3).T + model.mesh_pos[mesh.id]  # from the inertial frame to the file's
    for name in ("file", "content_type", "builtin", "params", "refpos", "refquat", "normal", "texcoord"):
        element.attrib.pop(name, None)
    element.set("scale", "1 1 1")
    element.set("vertex", _text(vertices.astype(np.float32)))
    element.set("face", " ".join(map(str, faces[: mesh.facenum[0]].ravel())))


def _inline_heights(element: ET.Element, model: mujoco.MjModel) -> None:
    field = model.hfield(element.get("name"))
    shape = field.nrow[0], field.ncol[0]
    heights = model.hfield_data[model.hfield_adr[field.id] :][: shape[0] * shape[1]].reshape(shape)
    for name in ("file", "content_type"):
        element.attrib.pop(name, None)
    element.attrib |= {"nrow": str(shape[0]), "ncol": str(shape[1])}
    element.set("elevation", " ".join(f"{value:.9g}" for value in heights[::-1].ravel()))  # last row first


def _pose(element: ET.Element) -> tuple[np.ndarray, np.ndarray]:
    """Return an element's position [m] and quaternion (wxyz); MuJoCo writes orientations only as quaternions."""
    pos, quat = element.get("pos", "0 0 0"), element.get("quat", "1 0 0 0")
    turn = np.array(quat.split(), dtype=float)
    mujoco.mju_normalize4(turn)
    return np.array(pos.split(), dtype=float), turn


def _inline_frames(parent: ET.Element) -> None:
    """Replace frames with their elements, composing poses and inheriting classes."""
    children: list[ET.Element] = []
    for child in list(parent):
        if child.tag in ("body", "frame"):
            _inline_frames(child)
        if child.tag != "frame":
            children.append(child)
            continue
        for element in child:
            pos, quat = np.zeros(3), np.zeros(4)
            mujoco.mju_mulPose(pos, quat, *_pose(child), *_pose(element))
            element.attrib |= {"pos": _text(pos), "quat": _text(quat)}
            if inherited := child.get("childclass"):
                element.attrib.setdefault("childclass" if element.tag == "body" else "class", inherited)
            children.append(element)
    parent[:] = children
