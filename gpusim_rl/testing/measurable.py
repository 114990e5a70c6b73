"""Observation terms that only a simulator can provide: no sensor of a robot measures them."""

from __future__ import annotations

from collections.abc import Sequence

import mujoco

from gpusim_rl.env import VecEnv
from gpusim_rl.errors import TaskError, did_you_mean

MEASURED = {
    *("touch", "accelerometer", "gyro", "force", "torque", "magnetometer", "rangefinder", "camprojection"),
    *("jointpos", "jointvel", "tendonpos", "tendonvel", "actuatorpos", "actuatorvel", "actuatorfrc", "jointactfrc"),
    *("tendonactfrc", "ballquat", "ballangvel", "framequat", "framexaxis", "frameyaxis", "framezaxis", "tactile"),
}
"""Types of MuJoCo sensors that robots have; an IMU estimates orientations."""


def simulator_only(env: VecEnv) -> dict[str, str]:
    """Return the policy's observation terms that no sensor of a robot measures, with their origin.

    Terms without an entry in the task's `sources` are unknown, and left out.
    """
    sources, terms = env.task.sources, env.obs_terms.get("policy", ())
    origins = {term.name: _origin(env.sim.scene.model, sources.get(term.name, "task")) for term in terms}
    return {term: origin for term, origin in origins.items() if origin is not None}


def advice(task: str, terms: Sequence[str]) -> str:
    """Return a line that names such terms, and the settings that remove them from the policy's observation."""
    settings = " ".join(f"task.observations.{term}.used=false" for term in terms)
    return f"no robot measures {', '.join(terms)}: estimate it, or train without: task={task} {settings}"


def _origin(model: mujoco.MjModel, source: str) -> str | None:
    """Return what a simulator has to provide for an observation source; None if a robot measures it."""
    match source.split():
        case ["sensor", name]:
            try:
                sensor = model.sensor(name)
            except KeyError:
                names = [model.sensor(i).name for i in range(model.nsensor)]
                raise TaskError("no such sensor", key=source, hint=did_you_mean(name, names)) from None
            kind = mujoco.mjtSensor(int(sensor.type[0])).name.removeprefix("mjSENS_").lower()
            fixed = kind.startswith("frame") and not _floats(model, int(sensor.objtype[0]), int(sensor.objid[0]))
            return None if kind in MEASURED or fixed else kind  # joint angles determine frames of a fixed-base robot
        case ["base", "velocity"]:
            return source
        case ["simulator", *what]:
            return " ".join(what)
    return None


def _floats(model: mujoco.MjModel, kind: int, index: int) -> bool:
    """Return whether an object's body, or a parent, has a free joint."""
    owner = {mujoco.mjtObj.mjOBJ_SITE: model.site_bodyid, mujoco.mjtObj.mjOBJ_GEOM: model.geom_bodyid}
    body = int(owner[kind][index]) if kind in owner else index
    first = int(model.body_jntadr[model.body_rootid[body]])
    return first >= 0 and model.jnt_type[first] == mujoco.mjtJoint.mjJNT_FREE
