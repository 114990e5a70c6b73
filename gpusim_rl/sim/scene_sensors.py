"""Sensors that a task adds to its scene."""

from __future__ import annotations

from typing import Any

import mujoco

from gpusim_rl.errors import TaskError, available, did_you_mean

# Kinds that MuJoCo attaches to a site, and kinds that it attaches to the body rather than to the body's frame.
_SITE_AXES = ("gyro", "accelerometer", "velocimeter", "magnetometer", "force", "torque", "rangefinder")
_SUBTREE = ("subtreecom", "subtreelinvel", "subtreeangmom")
# MuJoCo's contact sensor: bits of its data specification, and its reductions (net force, maximum force).
_FOUND_AND_FORCE, _REDUCTION = 1 << 0 | 1 << 1, {"ground": 3, "self": 2}
_OF = {
    "site": mujoco.mjtObj.mjOBJ_SITE,
    "body": mujoco.mjtObj.mjOBJ_XBODY,  # mjOBJ_BODY is the inertial frame
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
        raise TaskError(f"unknown kind {kind!r}", key=call, hint=did_you_mean(kind, _KINDS))
    if any(sensor.name == prefix + name for sensor in spec.sensors):
        raise TaskError(f"{articulation!r} already has a sensor {name!r}", key=call)
    if (kind == "contact") != (against in _REDUCTION) or (kind == "contact" and [*of] not in (["body"], ["geom"])):
        problem = "contact sensors need a body or geom and against='ground' or 'self'; other kinds reject `against`"
        raise TaskError(problem, key=call, got={"against": against, **of})
    if len(of) > 1 or not of.keys() <= _OF.keys():
        raise TaskError(key=call, expected=f"exactly one of {', '.join(_OF)}", got=of)
    arguments: dict[str, Any] = {}
    for element, target in of.items():
        names = [each.name for each in (spec.bodies if element == "body" else getattr(spec, f"{element}s"))]
        known = [full.removeprefix(prefix) for full in names if full.startswith(prefix)]
        if target not in known:
            raise TaskError(f"no {element} {target!r}", key=call, hint=available(target, known))
        if element == "body" and kind in _SITE_AXES:
            spec.body(prefix + target).add_site(name=prefix + name)
            element, target = "site", name
        object_type = mujoco.mjtObj.mjOBJ_BODY if element == "body" and kind in _SUBTREE else _OF[element]
        arguments = {"objtype": object_type, "objname": prefix + target}
    if kind == "contact":  # reports the force on the second element; XBODY means a whole subtree
        object_type = {"ground": mujoco.mjtObj.mjOBJ_BODY, "self": mujoco.mjtObj.mjOBJ_XBODY}[str(against)]
        second = {"reftype": arguments["objtype"] if "geom" in of else object_type, "refname": arguments["objname"]}
        first = {"objtype": object_type, "objname": arguments["objname"] if against == "self" else "world"}
        arguments = {**first, **second, "intprm": [_FOUND_AND_FORCE, _REDUCTION[str(against)], 1]}
    if kind == "rangefinder":  # report distances, the default in a file
        arguments["intprm"] = [1 << mujoco.mjtRayDataField.mjRAYDATA_DIST.value, 0, 0]
    spec.add_sensor(name=prefix + name, type=_KINDS[kind], cutoff=cutoff, **arguments)
