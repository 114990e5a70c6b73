"""Sensors that a task adds to its scene."""

from __future__ import annotations

from typing import Any

import mujoco

from gpusim_rl.errors import TaskError, did_you_mean

_SITE_AXES = ("gyro", "accelerometer", "velocimeter", "magnetometer", "force", "torque", "rangefinder")
"""Sensor kinds that need only the pose of a site."""
_SUBTREE = ("subtreecom", "subtreelinvel", "subtreeangmom")
"""Sensor kinds of a body's subtree; MuJoCo addresses them by the body, not its frame."""
_FOUND_AND_FORCE = 1 << 0 | 1 << 1  # MuJoCo's contact sensor: bits of its data specification,
_REDUCTION = {"ground": 3, "self": 2}  # and what it tells of many contacts: net force, or contact of the largest
_OF = {
    "site": mujoco.mjtObj.mjOBJ_SITE,
    "body": mujoco.mjtObj.mjOBJ_XBODY,  # the frame of the body; mjOBJ_BODY would be that of its inertia
    "joint": mujoco.mjtObj.mjOBJ_JOINT,
    "actuator": mujoco.mjtObj.mjOBJ_ACTUATOR,
    "tendon": mujoco.mjtObj.mjOBJ_TENDON,
    "geom": mujoco.mjtObj.mjOBJ_GEOM,
}
_KINDS = {
    kind.name.removeprefix("mjSENS_").lower(): kind
    for kind in mujoco.mjtSensor.__members__.values()
    if kind != mujoco.mjtSensor.mjSENS_PLUGIN
}


def add_sensor(
    spec: mujoco.MjSpec,
    articulation: str,
    prefix: str,
    name: str,
    kind: str,
    of: dict[str, str],
    cutoff: float,
    against: str | None,
) -> None:
    """Add a sensor to a scene's spec; see `Scene.add_sensor`."""
    call = f"Scene.add_sensor({articulation!r}, {name!r})"
    if kind not in _KINDS:
        raise TaskError(f"{call}: there is no kind {kind!r}.{did_you_mean(kind, _KINDS)}")
    if any(sensor.name == prefix + name for sensor in spec.sensors):
        raise TaskError(f"{call}: {articulation!r} already has a sensor {name!r}")
    if (kind == "contact") != (against in _REDUCTION) or (kind == "contact" and [*of] not in (["body"], ["geom"])):
        raise TaskError(
            f"{call}: a contact sensor, and no other, is of a body or geom, against='ground' or 'self'; got"
            f" against={against!r} and {' and '.join(of) or 'no element'}"
        )
    if len(of) > 1 or not of.keys() <= _OF.keys():
        raise TaskError(f"{call}: expected one of {', '.join(_OF)}, got {' and '.join(of)}")
    arguments: dict[str, Any] = {}
    for element, its_name in of.items():
        names = [each.name for each in (spec.bodies if element == "body" else getattr(spec, f"{element}s"))]
        known = [full.removeprefix(prefix) for full in names if full.startswith(prefix)]
        if its_name not in known:
            raise TaskError(
                f"{call}: no {element} {its_name!r}.{did_you_mean(its_name, known)} It has {known or 'none'}"
            )
        if element == "body" and kind in _SITE_AXES:
            spec.body(prefix + its_name).add_site(name=prefix + name)
            element, its_name = "site", name
        of_type = mujoco.mjtObj.mjOBJ_BODY if element == "body" and kind in _SUBTREE else _OF[element]
        arguments = {"objtype": of_type, "objname": prefix + its_name}
    if kind == "contact":  # the second of two tells what acts on it; a subtree against itself is named by its frame
        of_type = {"ground": mujoco.mjtObj.mjOBJ_BODY, "self": mujoco.mjtObj.mjOBJ_XBODY}[str(against)]
        its_type = arguments["objtype"] if "geom" in of else of_type
        other = arguments["objname"] if against == "self" else "world"
        arguments = {"objtype": of_type, "objname": other, "reftype": its_type, "refname": arguments["objname"]}
        arguments["intprm"] = [_FOUND_AND_FORCE, _REDUCTION[str(against)], 1]
    if kind == "rangefinder":  # a file's reads distances, if it does not say what
        arguments["intprm"] = [1 << mujoco.mjtRayDataField.mjRAYDATA_DIST.value, 0, 0]
    spec.add_sensor(name=prefix + name, type=_KINDS[kind], cutoff=cutoff, **arguments)
