"""Reference poses: rewrite a robot's spec so that a keyframe becomes its reference pose."""

from __future__ import annotations

import logging
import math

import mujoco
import numpy as np

from gpusim_rl.errors import TaskError, available

logger = logging.getLogger(__name__)

JOINT_TIES = (mujoco.mjtEq.mjEQ_JOINT, mujoco.mjtEq.mjEQ_TENDON)
# Columns of `eq_data` that the compiler derives from the reference pose: one body's pose relative to the other's.
_DERIVED = {mujoco.mjtEq.mjEQ_CONNECT: slice(3, 6), mujoco.mjtEq.mjEQ_WELD: slice(3, 10)}
_TIE_TOLERANCE = 1e-3  # m or rad; keyframes have few digits

Pose = tuple[np.ndarray, np.ndarray]  # position, quaternion wxyz


def usable(spec: mujoco.MjSpec, keyframe: str) -> bool:
    """Return whether `stand` accepts a keyframe; log the reason if it rejects an existing one."""
    if keyframe not in {key.name for key in spec.keys}:
        return False
    try:
        stand(spec.copy(), keyframe)
    except ValueError as error:
        logger.warning("keeping the file's default pose: %s", " ".join(str(error).split()))
        return False
    return True


def stand(spec: mujoco.MjSpec, keyframe: str) -> None:
    """Make a keyframe the reference pose; each joint's `ref` is set so that positions keep their meaning.

    Velocities and controls are ignored. Joint and tendon equality constraints are relative to the reference pose, so
    they are rewritten. Ball joints have no `ref`: their rotation becomes relative to the keyframe; with limits or a
    spring, they keep the file's pose. TaskError if the keyframe is missing or does not fit the joints or constraints.
    """
    names = [key.name for key in spec.keys]
    if keyframe not in names:
        raise TaskError(f"no keyframe {keyframe!r}", hint=available(keyframe, names))
    before = spec.compile()
    pose = np.array(spec.keys[names.index(keyframe)].qpos)
    if len(pose) != before.nq:
        raise TaskError(key=f"keyframe {keyframe!r}", expected=f"{before.nq} positions (qpos)", got=len(pose))
    shifts: dict[str, float] = {}
    for body in spec.bodies[1:]:
        _redraw(spec, before, body, pose, shifts)
    after = spec.compile()
    for tendon in spec.tendons:
        shifts[tendon.name] = float(after.tendon_length0[tendon.id] - before.tendon_length0[tendon.id])
    for tie in spec.equalities:
        if tie.type in JOINT_TIES:
            _shift_tie(tie, shifts)
        elif part := _DERIVED.get(tie.type):
            was, now = (model.eq_data[tie.id, part] for model in (before, after))
            if not np.allclose(was, now, atol=_TIE_TOLERANCE):
                tied = f"{tie.name1!r} and {tie.name2!r}"
                raise TaskError(f"keyframe {keyframe!r} violates the equality constraint between {tied}")


def _redraw(
    spec: mujoco.MjSpec, model: mujoco.MjModel, body: mujoco.MjsBody, pose: np.ndarray, shifts: dict[str, float]
) -> None:
    """Transform a body by its joints' motion to the keyframe, and each joint by the motion of the joints after it.

    Joints compose as T e^(S1 q1) ... e^(Sn qn), with twists S in the body's frame. Relative to the keyframe this is
    T E1 ... En e^(S1' d1) ... e^(Sn' dn): En is the last joint's motion to the keyframe, d the remainder, and S1' is S1
    transformed by the inverse of E2 ... En.
    """
    pos, quat = np.array(body.pos), _quat(spec, body)
    joints: list[mujoco.MjsJoint] = []
    for joint in body.joints:
        first = model.jnt_qposadr[joint.id]
        if joint.type == mujoco.mjtJoint.mjJNT_FREE:
            frame = _then((model.body_pos[body.id], model.body_quat[body.id]), _inverse((pos, quat)))
            pos, quat = _then(_inverse(frame), (pose[first : first + 3], pose[first + 3 : first + 7]))
            continue
        motion = _motion(model, joint, pose[first:])
        if joint.type == mujoco.mjtJoint.mjJNT_SLIDE:
            joint.ref = pose[first]
        elif joint.type == mujoco.mjtJoint.mjJNT_HINGE:
            joint.ref = math.degrees(pose[first]) if spec.compiler.degree else pose[first]
        if joint.type != mujoco.mjtJoint.mjJNT_BALL:
            shifts[joint.name] = float(pose[first] - model.qpos0[first])
        back = _inverse(motion)
        for earlier in joints:
            if earlier.frame is not None:
                problem = f"joint {earlier.name!r} is inside a <frame>, and later joints of its body depend on it"
                raise TaskError(f"cannot apply the keyframe: {problem}", hint="Try moving the joint out of <frame>")
            earlier.axis = _rotate(back[1], earlier.axis)
            earlier.pos = _rotate(back[1], earlier.pos) + back[0]
        joints.append(joint)
        pos, quat = _then((pos, quat), motion)
    body.pos, body.quat = pos, quat
    body.alt.type = mujoco.mjtOrientation.mjORIENTATION_QUAT


def _motion(model: mujoco.MjModel, joint: mujoco.MjsJoint, position: np.ndarray) -> Pose:
    """Return a joint's translation and rotation in the body's frame, from the file's pose to the joint `position`."""
    moved = position[0] - model.qpos0[model.jnt_qposadr[joint.id]]
    turn = np.array([1.0, 0.0, 0.0, 0.0])
    if joint.type == mujoco.mjtJoint.mjJNT_SLIDE:
        return model.jnt_axis[joint.id] * moved, turn
    if joint.type == mujoco.mjtJoint.mjJNT_HINGE:
        mujoco.mju_axisAngle2Quat(turn, model.jnt_axis[joint.id], moved)
    elif not (model.jnt_limited[joint.id] or model.jnt_stiffness[joint.id]):
        turn = position[:4] / np.linalg.norm(position[:4])
    anchor = model.jnt_pos[joint.id]
    return anchor - _rotate(turn, anchor), turn


def _shift_tie(tie: mujoco.MjsEquality, shifts: dict[str, float]) -> None:
    """Rewrite the equality constraint y - y0 = P(x - x0) for new reference positions x0 and y0."""
    polynomial = np.polynomial.Polynomial(tie.data[:5])
    if tie.name2:
        polynomial = polynomial(np.polynomial.Polynomial([shifts.get(tie.name2, 0.0), 1.0]))
    coefficients = np.zeros(5)
    coefficients[: len(polynomial.coef)] = polynomial.coef
    coefficients[0] -= shifts.get(tie.name1, 0.0)
    tie.data[:5] = coefficients


def _quat(spec: mujoco.MjSpec, body: mujoco.MjsBody) -> np.ndarray:
    """Return a body's orientation in its parent's frame, wxyz."""
    if body.alt.type == mujoco.mjtOrientation.mjORIENTATION_QUAT:
        return np.array(body.quat) / np.linalg.norm(body.quat)
    degree, sequence = bool(spec.compiler.degree), spec.compiler.eulerseq
    return np.array(spec.resolve_orientation(degree=degree, sequence=sequence, orientation=body.alt))


def _then(first: Pose, second: Pose) -> Pose:
    quat = np.zeros(4)
    mujoco.mju_mulQuat(quat, first[1], np.asarray(second[1], dtype=float))
    return first[0] + _rotate(first[1], second[0]), quat


def _inverse(pose: Pose) -> Pose:
    quat = np.array(pose[1]) * [1.0, -1.0, -1.0, -1.0]
    return -_rotate(quat, pose[0]), quat


def _rotate(quat: np.ndarray, vec: np.ndarray) -> np.ndarray:
    result = np.zeros(3)
    mujoco.mju_rotVecQuat(result, np.asarray(vec, dtype=float), np.asarray(quat, dtype=float))
    return result
