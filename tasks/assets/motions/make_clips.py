"""Generate the motion clips in this folder from foot placements or keyframes by inverse kinematics (mink).

    python tasks/assets/motions/make_clips.py [NAME ...]

Forces are not simulated: standing feet stay in place, keyframes are interpolated, velocities are central differences.
The last frame is the first frame of the next repetition.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import mujoco
import numpy as np

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[3])  # the checkout of this file

from gpusim_rl.env.clip import Clip, save
from gpusim_rl.env.robot_clip import from_states, scene_of
from gpusim_rl.files.paths import assets_dir
from gpusim_rl.sim import Scene

FPS = 50.0
STEPS = 100  # maximum inverse kinematics steps per frame
STILL = 1e-7  # step size below which inverse kinematics has converged [rad, m]
DIGITS = 5  # decimals of all numbers; more would double the file size
ROBOT = "robot"
LEGS = ("FR", "FL", "RR", "RL")
CYCLE, STANCE, CYCLES = 20, 11, 10  # trot: frames per cycle and per stance, cycles in the clip
SPEED, LIFT = 0.6, 0.07  # speed of the trot [m/s], swing height of a foot [m]
CROUCHED = {"*_hip_pitch_joint": -0.312, "*_knee_joint": 0.669, "*_ankle_pitch_joint": -0.363}  # G1's joints [rad]
STAND = {**CROUCHED, "left_shoulder_roll_joint": 0.25, "right_shoulder_roll_joint": -0.25}
UPRIGHT = np.array([1.0, 0.0, 0.0, 0.0])

Target = tuple[np.ndarray, np.ndarray | None]
"""Position [m], and orientation wxyz or None for any."""
Frames = Sequence[tuple[dict[str, Target], np.ndarray]]
"""Element targets and preferred posture of each frame."""


def smooth(x: float) -> float:
    """Return a step from 0 at x = 0 to 1 at x = 1, with zero velocity and acceleration at both ends."""
    x = min(max(x, 0.0), 1.0)
    return x**3 * (10.0 - 15.0 * x + 6.0 * x**2)


def go1_trot() -> Clip:
    """Return a clip of Go1 trotting straight ahead."""
    scene = scene_of(assets_dir() / "go1" / "go1.xml")
    model = scene.model
    radius = float(model.geom(f"{ROBOT}/FR_foot_collision").size[0])
    stand = posture(model, {"*R_hip_joint": 0.1, "*L_hip_joint": -0.1, "*_thigh_joint": 0.9, "*_calf_joint": -1.8})
    data = mujoco.MjData(model)
    data.qpos[:] = stand
    mujoco.mj_kinematics(model, data)
    below = {leg: data.site(f"{ROBOT}/{leg}").xpos - data.body(f"{ROBOT}/trunk").xpos for leg in LEGS}
    height, stride = radius - below["FR"][2], SPEED * CYCLE / FPS

    def targets(frame: int) -> dict[str, Target]:
        phase = 2.0 * math.pi * frame / CYCLE
        trunk = np.array([SPEED * frame / FPS, 0.0, height + 0.004 * math.cos(2.0 * phase)])
        goals: dict[str, Target] = {"body:trunk": (trunk, UPRIGHT)}
        for leg in LEGS:
            # A stance starts half its length ahead of the hip and ends half its length behind.
            first = 0 if leg in ("FR", "RL") else CYCLE // 2
            cycle, since = divmod(frame - first, CYCLE)
            swing = (since - STANCE) / (CYCLE - STANCE)
            middle = SPEED * (first + cycle * CYCLE + 0.5 * STANCE) / FPS
            rise = LIFT * (4.0 * swing * (1.0 - swing)) ** 2 if swing > 0.0 else 0.0
            x = below[leg][0] + middle + stride * smooth(swing)
            goals[f"site:{leg}"] = (np.array([x, below[leg][1], radius + rise]), None)
        return goals

    return clip_of(scene, [(targets(frame), stand) for frame in range(-1, CYCLES * CYCLE + 2)])


def pose(
    height: float = 0.76,
    pelvis: tuple[float, float] = (0.0, 0.0),
    torso: tuple[float, float] = (0.0, 0.0),
    arms: tuple[float, float, float, float] = (0.2, 0.2, 0.6, 0.6),
) -> np.ndarray:
    """Return a keyframe of G1 on both feet, shape [9]: height of the pelvis [m], then angles [rad].

    `pelvis` and `torso` are yaw and pitch from upright; `arms` are shoulder pitches, then elbows, left first.
    """
    return np.array([height, *pelvis, *torso, *arms])


REST = pose()
LOW = pose(0.55, pelvis=(0.0, 0.25), torso=(0.0, 0.45), arms=(-0.7, -0.7, 0.4, 0.4))
BENT = pose(0.7, pelvis=(0.0, 0.45), torso=(0.0, 0.9), arms=(-0.3, -0.3, 0.9, 0.9))
LEFT = pose(0.74, pelvis=(0.35, 0.0), torso=(1.2, 0.1), arms=(0.6, -0.4, 0.3, 0.9))
RIGHT = pose(0.74, pelvis=(-0.35, 0.0), torso=(-1.2, 0.1), arms=(-0.4, 0.6, 0.9, 0.3))


def g1_poses(keyframes: Mapping[float, np.ndarray]) -> Clip:
    """Return a G1 motion through keyframes (see `pose`) by time [s]; feet stand still below the centre of mass."""
    scene = scene_of(assets_dir() / "g1" / "g1.xml")
    model = scene.model
    sole = model.geom(f"{ROBOT}/left_foot4_collision")
    site = model.site(f"{ROBOT}/left_foot").pos[2] - (sole.pos[2] - sole.size[0])  # height while the foot stands
    feet = {f"site:{side}_foot": (np.array([0.0, y, site]), UPRIGHT) for side, y in (("left", 0.12), ("right", -0.12))}
    times, poses = [*keyframes], [*keyframes.values()]

    def frame(time: float) -> tuple[dict[str, Target], np.ndarray]:
        before = max(0, int(np.searchsorted(times, time, side="right")) - 1)
        after = min(before + 1, len(poses) - 1)
        share = smooth((time - times[before]) / max(times[after] - times[before], 1e-9))
        height, *yaws, left, right, left_elbow, right_elbow = (1.0 - share) * poses[before] + share * poses[after]
        goals: dict[str, Target] = {**feet, "com": (np.array([0.0, 0.0, np.nan]), None)}
        goals["body:pelvis"] = (np.array([np.nan, np.nan, height]), turned(*yaws[:2]))
        goals["body:torso_link"] = (np.full(3, np.nan), turned(*yaws[2:]))
        arms = {"left_shoulder_pitch_joint": left, "right_shoulder_pitch_joint": right}
        arms |= {"left_elbow_joint": left_elbow, "right_elbow_joint": right_elbow}
        return goals, posture(model, {**arms, **STAND})

    frames = round(times[-1] * FPS) + 1
    return clip_of(scene, [frame(number / FPS) for number in range(-1, frames + 1)])


def turned(yaw: float, pitch: float) -> np.ndarray:
    """Return the orientation (wxyz) of a pitch followed by a yaw [rad]."""
    quat = np.zeros(4)
    mujoco.mju_euler2Quat(quat, [yaw, pitch, 0.0], "zyx")
    return quat


def posture(model: mujoco.MjModel, angles: Mapping[str, float]) -> np.ndarray:
    """Return the reference pose with joint angles [rad] set by pattern, shape [nq]."""
    qpos = model.qpos0.copy()
    for joint in range(model.njnt):
        for pattern, angle in angles.items():
            if fnmatchcase(model.joint(joint).name.removeprefix(f"{ROBOT}/"), pattern):
                qpos[model.jnt_qposadr[joint]] = angle
    return qpos


def clip_of(scene: Scene, frames: Frames) -> Clip:
    """Return the clip of the frames, without the first and last frame, which are needed only for velocities."""
    model = scene.model
    qpos = np.stack(list(solve(model, frames)))
    qvel = np.zeros((len(qpos) - 2, model.nv))
    for frame, velocity in enumerate(qvel):
        mujoco.mj_differentiatePos(model, velocity, 2.0 / FPS, qpos[frame], qpos[frame + 2])
    clip = from_states(scene, ROBOT, qpos[1:-1], qvel, FPS)
    arrays = {field.name: getattr(clip, field.name) for field in fields(Clip)}
    rounded = {name: array.round(DIGITS) for name, array in arrays.items() if isinstance(array, np.ndarray)}
    return replace(clip, **rounded)


def solve(model: mujoco.MjModel, frames: Frames) -> Iterator[np.ndarray]:
    """Solve the inverse kinematics of each frame by Gauss-Newton steps within the joint limits; yield its qpos [nq]."""
    import mink

    limits, rest = [mink.ConfigurationLimit(model)], mink.PostureTask(model, cost=1e-3)
    configuration, tasks = mink.Configuration(model, frames[0][1]), {}

    def aim(targets: dict[str, Target]) -> None:
        for name, (pos, quat) in targets.items():
            kind, _, element = name.partition(":")
            cost, element = 1.0 - np.isnan(pos), f"{ROBOT}/{element}"
            if name == "com":
                tasks.setdefault(name, mink.ComTask(cost)).set_target(np.nan_to_num(pos))
                continue
            # Errors are in the element's frame, which may be tilted, so free coordinates keep their values.
            here = configuration.get_transform_frame_to_world(element, kind).translation()
            rotation = mink.SO3(UPRIGHT if quat is None else quat)
            pose = mink.SE3.from_rotation_and_translation(rotation, np.where(np.isnan(pos), here, pos))
            task = tasks.setdefault(name, mink.FrameTask(element, kind, cost, 0.0 if quat is None else 1.0))
            task.set_target(pose)

    for targets, near in frames:
        rest.set_target(near)
        step = np.ones(model.nv)
        for _ in range(STEPS):
            if np.abs(step).max() < STILL:
                break
            aim(targets)
            step = mink.solve_ik(configuration, [rest, *tasks.values()], 1.0, "daqp", limits=limits)
            configuration.integrate_inplace(step, 1.0)
        assert np.abs(step).max() < STILL, f"{list(targets)}: out of reach"
        yield configuration.q.copy()


MAKERS: dict[str, Callable[[], Clip]] = {
    "go1_trot": go1_trot,
    "g1_crouch": partial(g1_poses, {0.4: REST, 1.6: LOW, 2.2: LOW, 3.4: REST, 3.8: REST}),
    "g1_bow": partial(g1_poses, {0.4: REST, 1.5: BENT, 2.3: BENT, 3.4: REST, 3.8: REST}),
    "g1_turn": partial(g1_poses, {0.4: REST, 1.3: LEFT, 1.5: LEFT, 2.9: RIGHT, 3.1: RIGHT, 4.0: REST, 4.4: REST}),
}


if __name__ == "__main__":
    for name in sys.argv[1:] or MAKERS:
        save(Path(__file__).with_name(f"{name}.npz"), MAKERS[name]())
