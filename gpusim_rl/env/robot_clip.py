"""Motion clips of robots: matching, validation and recording."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import mujoco
import numpy as np

from gpusim_rl.env.clip import Clip, read
from gpusim_rl.errors import ConfigError
from gpusim_rl.files.paths import assets_dir
from gpusim_rl.sim import Scene

FRAMES = 30  # frames whose kinematics are checked
FAR, TURNED = 0.02, 0.1  # tolerance of body poses, position [m] and rotation [rad]
MOST = 4  # maximum number of names in a message


def scene_of(robot: str | Path) -> Scene:
    """Return a scene with ground and a robot named `robot`; see `Scene.add` for the argument."""
    scene = Scene(50.0)
    scene.add_ground()
    scene.add("robot", robot)
    return scene


def load_for(path: Path, scene: Scene, robot: str, bodies: Sequence[str] | None = None) -> Clip:
    """Read a clip, add missing names, and `fit` it to a robot; lift Isaac Lab's clips out of the ground."""
    clip, is_isaac_lab = read(path, *(list(scene.elements_of(robot, kind)) for kind in ("joint", "body")))
    try:
        fitted = fit(clip, scene, robot, bodies)
    except ConfigError as error:
        raise error.within(str(path)) from None
    if not is_isaac_lab:
        return fitted
    up = np.array([0.0, 0.0, _in_ground(clip, scene, robot)], dtype=np.float32)
    return replace(fitted, body_pos_w=fitted.body_pos_w + up)


def _in_ground(clip: Clip, scene: Scene, robot: str) -> float:
    """Return the robot's penetration of the ground [m] in the frame with the lowest body."""
    data = mujoco.MjData(scene.model)
    data.qpos[:] = positions(clip, scene, robot)[clip.body_pos_w[..., 2].min(axis=1).argmin()]
    mujoco.mj_fwdPosition(scene.model, data)
    with_world = (scene.model.geom_bodyid[data.contact.geom] == 0).any(axis=1)
    return -float(data.contact.dist[with_world].min(initial=0.0))


def fit(clip: Clip, scene: Scene, robot: str, bodies: Sequence[str] | None = None) -> Clip:
    """Reduce a clip to a robot's joints and the given bodies, None = all; ConfigError if the clip does not fit."""
    joints, known = list(scene.elements_of(robot, "joint")), list(scene.elements_of(robot, "body"))
    wanted = known if bodies is None else list(bodies)
    needed = list(dict.fromkeys([known[0], *wanted]))  # the root gives the robot's pose
    for kind, names, there in (("joints", joints, clip.joint_names), ("bodies", needed, clip.body_names)):
        if missing := [name for name in names if name not in there]:
            file = robot_of(clip)
            origin = file.stem if file else f"a robot with {len(there)} {kind} ({', '.join(there[:MOST])}, ...)"
            some = ", ".join(missing[:MOST]) + (f" and {len(missing) - MOST} more" if missing[MOST:] else "")
            raise ConfigError(f"lacks {kind} of {robot!r}: {some}", hint=f"This seems to be a clip of {origin}")
    _check_kinematics(clip, scene, robot)
    columns = {"joint": [clip.joint_names.index(n) for n in joints], "body": [clip.body_names.index(n) for n in wanted]}
    names = ("joint_pos", "joint_vel", "body_pos_w", "body_quat_w", "body_lin_vel_w", "body_ang_vel_w")
    arrays = {name: getattr(clip, name)[:, columns[name.partition("_")[0]]] for name in names}
    return replace(clip, joint_names=tuple(joints), body_names=tuple(wanted), **arrays)


def _check_kinematics(clip: Clip, scene: Scene, robot: str) -> None:
    """Raise ConfigError unless body poses in some frames match the forward kinematics of the robot's model."""
    known = list(scene.elements_of(robot, "body"))
    rows = [row for row, name in enumerate(clip.body_names) if name in known]
    places = [known.index(clip.body_names[row]) for row in rows]
    chosen = np.linspace(0, len(clip.joint_pos) - 1, FRAMES).astype(int)
    pos, quat = clip.body_pos_w[chosen][:, rows], clip.body_quat_w[chosen][:, rows]
    model = from_states(
        scene, robot, positions(clip, scene, robot)[chosen], np.zeros((FRAMES, scene.model.nv)), clip.fps
    )
    far = np.linalg.norm(model.body_pos_w[:, places] - pos, axis=-1)
    cosine = np.abs((model.body_quat_w[:, places] * quat).sum(axis=-1))  # cosine of half the rotation error
    turned = 2.0 * np.arccos(cosine.clip(0.0, 1.0))
    error = np.maximum(far / FAR, turned / TURNED)
    if error.max() < 1.0:
        return
    number, body = np.unravel_index(error.argmax(), error.shape)
    off = f"off by {far[number, body]:.2g} m and {turned[number, body]:.2g} rad"
    problem = f"pose of {known[places[body]]} in frame {chosen[number]} does not match the joints of {robot!r}"
    hint = "Check rotations (wxyz), joint positions (rad) and the order of joints and bodies"
    raise ConfigError(f"{problem}: {off}", hint=hint)


def positions(clip: Clip, scene: Scene, robot: str) -> np.ndarray:
    """Return the qpos of each frame, shape [frames, nq], from the root and all joints."""
    model, (root, body) = scene.model, next(iter(scene.elements_of(robot, "body").items()))
    qpos, row = np.tile(model.qpos0, (len(clip.joint_pos), 1)), clip.body_names.index(root)
    for name, number in scene.elements_of(robot, "joint").items():
        qpos[:, model.jnt_qposadr[number]] = clip.joint_pos[:, clip.joint_names.index(name)]
    first = int(model.body_jntadr[body])
    if first >= 0 and model.jnt_type[first] == mujoco.mjtJoint.mjJNT_FREE.value:
        place = int(model.jnt_qposadr[first])
        qpos[:, place : place + 3] = clip.body_pos_w[:, row]
        qpos[:, place + 3 : place + 7] = clip.body_quat_w[:, row]
    return qpos


def from_states(scene: Scene, robot: str, qpos: np.ndarray, qvel: np.ndarray, fps: float) -> Clip:
    """Build the clip of a robot from qpos and qvel of its scene's model, [frames, nq] and [frames, nv]."""
    model, bodies, joints = scene.model, scene.elements_of(robot, "body"), scene.elements_of(robot, "joint")
    data, ids, numbers = mujoco.MjData(model), list(bodies.values()), list(joints.values())
    pos, quat, velocity = (np.zeros((len(qpos), len(ids), width)) for width in (3, 4, 6))
    for frame in range(len(qpos)):
        data.qpos[:], data.qvel[:] = qpos[frame], qvel[frame]
        mujoco.mj_kinematics(model, data)
        mujoco.mj_comPos(model, data)
        mujoco.mj_comVel(model, data)
        pos[frame], quat[frame] = data.xpos[ids], data.xquat[ids]
        for place, body in enumerate(ids):
            mujoco.mj_objectVelocity(model, data, mujoco.mjtObj.mjOBJ_XBODY.value, body, velocity[frame, place], 0)
    arrays = {"joint_pos": qpos[:, model.jnt_qposadr[numbers]], "joint_vel": qvel[:, model.jnt_dofadr[numbers]]}
    arrays |= {"body_pos_w": pos, "body_quat_w": quat}
    arrays |= {"body_lin_vel_w": velocity[..., 3:], "body_ang_vel_w": velocity[..., :3]}
    single = {name: value.astype(np.float32) for name, value in arrays.items()}
    return Clip(fps=fps, joint_names=tuple(joints), body_names=tuple(bodies), **single)


def robot_of(clip: Clip) -> Path | None:
    """Return the file of the shipped robot with the most joints, all of them in the clip; None without a match."""
    matches: dict[Path, int] = {}
    for file in sorted(assets_dir().rglob("*.xml")):
        joints = set(re.findall(r"<joint[^>]*?\bname=\"([^\"]+)\"", file.read_text(encoding="utf-8")))
        if joints and joints <= set(clip.joint_names):
            matches[file] = len(joints)
    return max(matches, key=lambda file: matches[file], default=None)
