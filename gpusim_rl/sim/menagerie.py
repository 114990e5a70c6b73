"""Robots of MuJoCo Menagerie, by name: `Scene.add("go1", "menagerie:unitree_go1")`.

The package `mujoco-menagerie` (our extra `menagerie`) knows them, and downloads a model when it is first used.
"""

from __future__ import annotations

import math
from typing import Any

import mujoco
import numpy as np

from gpusim_rl.errors import ConfigError, TaskError, did_you_mean, import_extra
from gpusim_rl.sim.option import clear_option

PREFIX = "menagerie:"
HOME = "home"  # the keyframe in which Menagerie's robots stand


def load(source: str) -> mujoco.MjSpec:
    """The robot alone, ready for `Scene.add`: its reference pose is the one in which it stands.

    Floor, lights, cameras, sensors and keyframes of its file are left out, and so are its solver settings: those are
    the scene's. The robot's `home` keyframe becomes the reference pose: joints keep their zeros and limits, and
    `default_joint_pos` is the stance.

    Args:
        source: `menagerie:<robot>`, or `menagerie:<robot>/<model>` for one of its other files
            (`menagerie:unitree_g1/g1_with_hands`).

    Raises:
        TaskError: The package is not installed, has no such robot or model, or cannot get it.
    """
    robot_name, _, entry = source.removeprefix(PREFIX).partition("/")
    try:
        package: Any = import_extra("mujoco_menagerie", "menagerie", source)
    except ConfigError as error:
        raise TaskError(str(error)) from None
    names = package.names()
    if robot_name not in names:
        hint = did_you_mean(robot_name, names)
        raise TaskError(f"{source}: no such robot.{hint} `python -m mujoco_menagerie names` lists all {len(names)}")
    robot = package.get(robot_name)
    if entry and entry not in robot.entry_names:
        raise TaskError(f"{source}: {robot_name} has no model {entry!r}; it has {', '.join(robot.entry_names)}")
    try:
        spec = mujoco.MjSpec.from_file(str(robot.xml(entry or robot.default_model)))
        _stand(spec)
    except (package.MenagerieError, OSError, ValueError) as error:
        raise TaskError(f"{source}: {' '.join(str(error).split())}") from None
    _strip(spec)
    return spec


def _strip(spec: mujoco.MjSpec) -> None:
    """Removes everything except the robot."""
    world = spec.worldbody
    for element in [*world.geoms, *world.sites, *spec.lights, *spec.cameras, *spec.sensors, *spec.keys]:
        spec.delete(element)
    clear_option(spec)


def _stand(spec: mujoco.MjSpec) -> None:
    """Makes the `home` keyframe the reference pose.

    A joint's `ref` says which position it has in the pose that the file draws: the bodies are drawn
    again, and every position keeps its meaning. Left as they are: joints tied to others by an equality, which counts
    from the reference pose; bodies with several joints; and everything where bodies are tied to each other.
    """
    key = next((key for key in spec.keys if key.name == HOME), None)
    joint_ties = [tie for tie in spec.equalities if tie.type == mujoco.mjtEq.mjEQ_JOINT]
    if key is None or len(joint_ties) < len(spec.equalities):
        return
    tied = {name for tie in joint_ties for name in (tie.name1, tie.name2)}
    model = spec.compile()
    home = np.array(key.qpos)
    for body in spec.bodies:
        if len(body.joints) != 1 or body.joints[0].name in tied:
            continue
        [joint] = body.joints
        address = model.jnt_qposadr[joint.id]
        position = home[address:]
        moved = position[0] - model.qpos0[address]  # from the pose that the file draws
        quat = _quat(spec, body)
        if joint.type == mujoco.mjtJoint.mjJNT_FREE:
            body.pos, quat = position[:3], position[3:7]
        elif joint.type == mujoco.mjtJoint.mjJNT_SLIDE:
            joint.ref = position[0]
            body.pos = body.pos + _rotate(quat, joint.axis * moved / np.linalg.norm(joint.axis))
        elif joint.type == mujoco.mjtJoint.mjJNT_HINGE:
            joint.ref = math.degrees(position[0]) if spec.compiler.degree else position[0]
            turn = np.zeros(4)
            mujoco.mju_axisAngle2Quat(turn, joint.axis / np.linalg.norm(joint.axis), moved)
            body.pos = body.pos + _rotate(quat, joint.pos - _rotate(turn, joint.pos))
            quat = _product(quat, turn)
        body.quat = quat
        body.alt.type = mujoco.mjtOrientation.mjORIENTATION_QUAT


def _quat(spec: mujoco.MjSpec, body: Any) -> np.ndarray:
    """How a body is turned in its parent, wxyz, however the file says it."""
    if body.alt.type == mujoco.mjtOrientation.mjORIENTATION_QUAT:
        return np.array(body.quat) / np.linalg.norm(body.quat)
    degree, sequence = bool(spec.compiler.degree), spec.compiler.eulerseq
    return np.array(spec.resolve_orientation(degree=degree, sequence=sequence, orientation=body.alt))


def _rotate(quat: np.ndarray, vec: np.ndarray) -> np.ndarray:
    result = np.zeros(3)
    mujoco.mju_rotVecQuat(result, np.asarray(vec, dtype=float), quat)
    return result


def _product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    result = np.zeros(4)
    mujoco.mju_mulQuat(result, a, b)
    return result
