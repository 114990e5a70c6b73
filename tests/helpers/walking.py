"""Makes the walk of our own that HumanoidAMP imitates by default, by foot placement and inverse kinematics.

    python tests/helpers/walking.py        writes tasks/assets/motions/humanoid_walk.npz

Feet roll from heel to toe and do not slide while they stand. The hips follow a course that both legs can reach. Arms
swing against the legs. No forces are looked at: a robot can come near this motion, and cannot have it exactly.
"""

from __future__ import annotations

import math
import sys
from dataclasses import fields, replace

import mujoco
import numpy as np

from gpusim_rl.env.clip import Clip, save
from gpusim_rl.env.robot_clip import from_states, scene_of
from gpusim_rl.files.paths import assets_dir

FILE = assets_dir() / "motions" / "humanoid_walk.npz"
FPS, CYCLE, CYCLES, SPEED = 60, 1.0, 4, 1.0  # Hz, s, cycles, m/s
STANCE = 0.6  # share of a cycle in which a foot stands
AHEAD = 0.22  # m from the hip to where the ankle comes down
THIGH, SHIN, HIP = 0.42155, 0.40987, 0.08489  # m
HEEL, TOE, SOLE = -0.05, 0.145, 0.025  # m from the ankle, and radius of the foot's ends, which are so far below it
STRIKE, PUSH = -0.22, 0.55  # pitch of the foot when it comes down and when it leaves [rad], down is positive
LOADED, LEAVING = 0.15, 0.6  # shares of the stance at which the foot is flat, and at which its heel leaves


def smooth(x: float) -> float:
    x = min(max(x, 0.0), 1.0)
    return x * x * (3.0 - 2.0 * x)


def rolled(pivot: float, pitch: float) -> np.ndarray:
    """Ankle, from where it is when the foot is flat: the foot turns about its heel or toe [m]."""
    c, s = math.cos(pitch), math.sin(pitch)
    x, z = -pivot, SOLE
    return np.array([pivot + c * x + s * z, SOLE + c * z - s * x])


def foot(phase: float) -> tuple[np.ndarray, float]:
    """Ankle [m], from below the hip at the start of the stance, and pitch of the foot; x is the world's."""
    stride, stance = SPEED * CYCLE, phase / STANCE
    at = np.array([AHEAD, 0.0])
    if stance < LOADED:
        pitch = STRIKE * (1.0 - smooth(stance / LOADED))
        return at + rolled(HEEL, pitch), pitch
    if stance < 1.0:
        pitch = PUSH * smooth(0.5 * (stance - LEAVING) / (1.0 - LEAVING)) * 2.0
        return at + rolled(TOE, pitch), pitch
    share = (phase - STANCE) / (1.0 - STANCE)
    begin, end = at + rolled(TOE, PUSH), at + rolled(HEEL, STRIKE) + [stride, 0.0]
    pos = begin + smooth(share) * (end - begin)
    pos[1] += 0.05 * math.sin(math.pi * share) ** 2
    return pos, PUSH + smooth(share * 1.2) * (STRIKE - PUSH)


def about(axis: str, angle: float) -> np.ndarray:
    c, s = math.cos(angle), math.sin(angle)
    x, y, z = {
        "x": ([1, 0, 0], [0, c, -s], [0, s, c]),
        "y": ([c, 0, s], [0, 1, 0], [-s, 0, c]),
        "z": ([c, -s, 0], [s, c, 0], [0, 0, 1]),
    }[axis]
    return np.array([x, y, z], dtype=float)


def leg(way: np.ndarray, foot: np.ndarray, twist: float) -> dict[str, float]:
    """Angles of a leg with a twist of the hip, from the way to the ankle [m] and the foot's matrix, pelvis frame."""

    def shin(angles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        tilt, hip, knee = angles
        thigh = about("x", tilt) @ about("y", hip) @ about("z", twist)
        shin = thigh @ about("y", knee)
        return thigh @ [0.0, 0.0, -THIGH] + shin @ [0.0, 0.0, -SHIN], shin

    length = min(float(np.linalg.norm(way)), THIGH + SHIN - 1e-3)
    knee = math.pi - math.acos((THIGH**2 + SHIN**2 - length**2) / (2.0 * THIGH * SHIN))
    angles = np.array([0.0, -math.atan2(way[0], -way[2]) - 0.5 * knee, knee])
    for _ in range(20):  # Newton's method
        error = shin(angles)[0] - way
        slopes = [(shin(angles + 1e-6 * axis)[0] - shin(angles - 1e-6 * axis)[0]) / 2e-6 for axis in np.eye(3)]
        angles = angles - np.linalg.solve(np.array(slopes).T, error)
    assert np.abs(shin(angles)[0] - way).max() < 1e-9, "the foot is out of reach"
    turn = shin(angles)[1].T @ foot
    ankle = -math.atan2(turn[1, 2], turn[2, 2]), math.asin(turn[0, 2]), -math.atan2(turn[0, 1], turn[0, 0])
    names = "hip_x", "hip_y", "knee", "ankle_x", "ankle_y", "ankle_z"
    return {"hip_z": twist, **dict(zip(names, (*angles, *ankle), strict=True))}


def pose(time: float) -> tuple[np.ndarray, np.ndarray, dict[str, float]]:
    """Place [m] and matrix of the pelvis, and angles of the joints [rad]."""
    turn = 2.0 * math.pi * time / CYCLE
    middle = 0.5 * STANCE * 2.0 * math.pi  # phase in which the left leg is in the middle of its stance
    pelvis = np.array([SPEED * time, 0.018 * math.cos(turn - middle), 0.854 - 0.012 * math.cos(2.0 * turn - 0.6)])
    yaw, roll, pitch = -0.06 * math.cos(turn - 0.2), 0.03 * math.sin(turn - 0.2), 0.03 + 0.01 * math.sin(2.0 * turn)
    body = about("z", yaw) @ about("y", pitch) @ about("x", roll)
    angles: dict[str, float] = {}
    for side, sign, begins in (("left", 1.0, 0.0), ("right", -1.0, 0.5)):
        cycles = time / CYCLE - begins
        phase = cycles - math.floor(cycles)
        (x, z), down = foot(phase)
        hip = pelvis + body @ [0.0, sign * HIP, 0.0]
        ankle = np.array([x + SPEED * (time - phase * CYCLE), sign * HIP, z])
        found = leg(body.T @ (ankle - hip), body.T @ about("y", down), -0.5 * yaw)
        angles |= {f"{side}_{name}": value for name, value in found.items()}
        swing = math.cos(turn + math.pi * (sign > 0.0) - 0.3)  # backward while the leg of its side is ahead
        angles[f"{side}_shoulder_x"] = sign * (0.12 + 0.02 * swing)
        angles[f"{side}_shoulder_y"] = -0.3 * swing
        angles[f"{side}_shoulder_z"] = sign * 0.1 * swing
        angles[f"{side}_elbow"] = -0.45 - 0.15 * swing
    trunk = -2.0 * yaw
    angles |= {"abdomen_x": -roll, "abdomen_y": 0.02 * math.cos(2.0 * turn), "abdomen_z": trunk}
    angles |= {"neck_x": 0.3 * roll, "neck_y": -pitch - angles["abdomen_y"], "neck_z": -0.7 * (yaw + trunk)}
    return pelvis, body, angles


def walk() -> Clip:
    """Returns the clip."""
    scene = scene_of(assets_dir() / "humanoid_28.xml")
    model, joints = scene.model, list(scene.elements_of("robot", "joint"))
    # A frame more at both ends, for central differences.
    qpos = np.zeros((round(FPS * CYCLE * CYCLES) + 3, model.nq))
    for frame, state in enumerate(qpos, start=-1):
        state[:3], body, angles = pose(frame / FPS)
        mujoco.mju_mat2Quat(state[3:7], body.ravel())
        state[7:] = [angles[name] for name in joints]
    qvel = np.zeros((len(qpos) - 2, model.nv))
    for velocity, before, after in zip(qvel, qpos, qpos[2:], strict=False):
        mujoco.mj_differentiatePos(model, velocity, 2.0 / FPS, before, after)
    clip = from_states(scene, "robot", qpos[1:-1], qvel, float(FPS))
    arrays = [field.name for field in fields(clip) if isinstance(getattr(clip, field.name), np.ndarray)]
    return replace(clip, **{name: getattr(clip, name).round(5) for name in arrays})


if __name__ == "__main__":
    FILE.parent.mkdir(exist_ok=True)
    save(FILE, walk())
    sys.stdout.write(f"wrote {FILE}\n")
