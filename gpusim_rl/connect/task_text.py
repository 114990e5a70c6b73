"""Text of a new task's files: tables and lists, values by the pattern of a joint's name, a robot that walks."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping
from fnmatch import fnmatchcase
from glob import escape
from string import Template
from typing import Any

import yaml

# fmt: off
VELOCITY = '''\
"""$name: the robot follows commanded velocities."""

from __future__ import annotations
$import_path
from gpusim_rl.tasks.velocity import Motor, Robot, VelocityTask


class $name(VelocityTask):
    """$name: walk with the commanded velocities, forward, sideways and turning.

    The recipe is that of `Go1Velocity`. Motors are a first guess: each servo has 10 Hz, by its armature.

    Action space: $actions numbers in [-100, 100], offset of the joint targets from the pose / a quarter of the
    largest torque over the stiffness [rad], in the order of the joints.

    Observation space:

$table

    The critic sees this:

$critic_table

    With `terrain=rough` both have a part more, `heights`: 187 heights of the root above the ground / 5 m.

    Reward terms, x the control step: see `VelocityTask`.

    Start: the pose, a little above the ground, any yaw; a random command, anew after `command.interval`.
    Termination: a tilt of more than `tilt_limit`.
    """

$mirrors    robot = Robot(
        name="$robot_name",
        file=$robot,
$values
    )
'''
# fmt: on
SIDES = re.compile(
    r"(?<![A-Za-z])(left|right|front|rear|hind|back|[lrfhb]|[frhbl][lrfh])(?![a-z])|(Left|Right)(?=[A-Z])",
    re.IGNORECASE,
)
"""Words in the name of a joint that tell of which leg or arm it is."""


def number(value: float) -> float | int:
    """Returns 60 for 59.99999: a rate is written as a period."""
    near = round(value, 3)
    return int(near) if near == int(near) else near


def by_pattern(joints: list[str], values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values by pattern, where all joints that it fits differ by their side alone; else by joint.

    Floats that differ by 0.02 are equal: angles have the precision of a guess.
    """
    patterns = {joint: re.sub(r"\*[_\W]*(?=\*)", "", SIDES.sub("*", escape(joint))) for joint in joints}
    result: dict[str, Any] = {}
    for joint, value in values.items():
        alike = [other for other in joints if patterns[other] == patterns[joint]]
        alone = alike == [other for other in joints if fnmatchcase(other, patterns[joint])]
        same = all(nearly(values.get(other), values.get(alike[0])) for other in alike)
        result.setdefault(patterns[joint] if alone and same else escape(joint), value)
    return result


def nearly(one: Any, two: Any) -> bool:
    """Whether two values are equal, floats by 0.02."""
    return abs(one - two) <= 0.02 if isinstance(one, float) and isinstance(two, float) else one == two


def wrapped(head: str, brackets: str, items: list[str]) -> str:
    """Returns a tuple or a dict, on one line where it fits."""
    comma = "," if brackets == "()" and len(items) == 1 else ""
    line = f"{head}{brackets[0]}{', '.join(items)}{comma}{brackets[1]}"
    if len(line) <= 88:
        return line
    indent = " " * (len(head) - len(head.lstrip()))
    return "\n".join([head + brackets[0], *(f"{indent}    {item}," for item in items), indent + brackets[1]])


def table(rows: list[tuple[str, int, str, str]]) -> str:
    """Returns the table of the observation's parts, as the docstring has it."""
    cells, first = [("num", "name", "observation", "unit")], 0
    for name, size, words, unit in rows:
        cells.append((str(first) if size == 1 else f"{first}-{first + size - 1}", name, words, unit))
        first += size
    widths = [max(len(row[column]) for row in cells) for column in range(4)]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(f"    {line}" for line in lines)


def commented_yaml(values: Mapping[str, tuple[Any, str]]) -> str:
    """Returns settings, each with its comment, as lines of a yaml that are indented by 2."""
    lines = []
    for key, (value, comment) in values.items():
        text, nested = json.dumps(value), ""
        if isinstance(value, dict) and value:
            nested = yaml.safe_dump(value, sort_keys=False, width=110, default_flow_style=None).rstrip()
            text = nested if nested.startswith("{") and "\n" not in nested else ""
        lines.append(f"  {key}: {text}".rstrip() + (f"  # {comment}" if comment else ""))
        if not text:
            lines.append(textwrap.indent(nested, "    "))
    return "\n".join(lines)


def type_of(value: Any) -> str:
    """Returns the type of a field of the class."""
    if isinstance(value, dict):
        return "dict[str, float]" if all(isinstance(item, int | float) for item in value.values()) else "dict[str, Any]"
    return "list[float]" if isinstance(value, list) else type(value).__name__


def velocity_source(values: Mapping[str, Any], joints: int, **words: str) -> str:
    """Returns the content of the py file of a robot that follows commanded velocities.

    Args:
        values: Arguments of `Robot`, those by pattern as dicts; those that are empty are left out.
        joints: Number of its joints.
        words: The other words of the template.
    """
    lines, feet = [], len(values["soles"])
    for key, value in values.items():
        if isinstance(value, dict):
            items = [f"{json.dumps(name)}: {item}" for name, item in value.items()]
            lines += [f"        {key}={{", *(f"            {item}," for item in items), "        },"]
        elif value:
            text = repr(value) if isinstance(value, tuple) else value
            lines.append(f"        {key}={text.replace(chr(39), chr(34))},")
    seen = [
        ("lin_vel", 3, "velocity of the IMU, its frame", "m/s"),
        ("ang_vel", 3, "angular velocity of the IMU, its frame", "rad/s"),
        ("gravity", 3, "direction of gravity in the frame of the root", "-"),
        ("joint_pos", joints, "joint positions from the pose; the policy's with bias", "rad"),
        ("joint_vel", joints, "joint velocities", "rad/s"),
        ("actions", joints, "last action", "-"),
        ("command", 3, "commanded x, y velocity and yaw rate", "m/s, m/s, rad/s"),
    ]
    of_feet = [
        ("foot_height", feet, "each foot above the ground", "m"),
        ("air_time", feet, "time since each foot left the ground", "s"),
        ("contact", feet, "1 for feet that touch, else 0", "-"),
        ("contact_force", 3 * feet, "sign(f) log(1 + abs(f)) of the forces on feet, world", "log(1 + N)"),
    ]
    return Template(VELOCITY).substitute(
        words,
        actions=joints,
        table=table(seen),
        critic_table=table([*seen, *of_feet]),
        values="\n".join(lines),
    )
