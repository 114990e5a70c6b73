"""Motion clips in npz files, with mjlab's array names plus the frame rate and the names of joints and bodies."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpusim_rl.errors import ConfigError, warn
from gpusim_rl.files import npz_file
from gpusim_rl.files.budgets import CLIP_BYTES

MAX_NAMES, MAX_LETTERS = 10_000, 256
"""Maximum number of names and maximum length of a name: a file of 2 kB can hold millions of empty names."""
UNIT = 1e-3  # tolerance of a quaternion's norm
LIKENESS, SCALE = 0.8, 1.1  # of velocities and position differences: minimum cosine similarity, maximum ratio of norms
GIMBAL = 0.05  # lower bound on the cosine of a ball joint's second angle, which divides rates
STILL = 1e-3  # RMS velocity below which nothing is compared [rad/s or m/s]
SAME, PAUSE = 1e-6, 0.1  # tolerance of equal poses [rad or m], minimum duration of a pause [s]
HOLDS, MIN_HELD = 1.2, 4  # minimum mean frames per pose, and minimum number of poses, of a clip with held poses
STRIDE, UNEVEN = 3, 1.5  # maximum stride of checked frames; maximum ratio of norms, as `SCALE`, for strided frames
DOCS = "docs/motion.md#clips"
ISAAC_LAB = {
    "joint_names": "dof_names",
    "joint_pos": "dof_positions",
    "joint_vel": "dof_velocities",
    "body_pos_w": "body_positions",
    "body_quat_w": "body_rotations",
    "body_lin_vel_w": "body_linear_velocities",
    "body_ang_vel_w": "body_angular_velocities",
}
"""Map from our array names to Isaac Lab's."""

Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """Motion of a robot, frame by frame. Body poses and velocities are in the world frame, quaternions are wxyz."""

    fps: float  # [Hz]
    joint_names: tuple[str, ...]
    body_names: tuple[str, ...]
    joint_pos: Array  # [frames, joints], rad or m
    joint_vel: Array  # [frames, joints], rad/s or m/s
    body_pos_w: Array  # origins of the body frames, [frames, bodies, 3], m
    body_quat_w: Array  # [frames, bodies, 4]
    body_lin_vel_w: Array  # velocities of the origins, [frames, bodies, 3], m/s
    body_ang_vel_w: Array  # [frames, bodies, 3], rad/s

    def __post_init__(self) -> None:
        for names in (self.joint_names, self.body_names):
            if twice := [name for name, count in Counter(names).items() if count > 1]:
                raise ConfigError(f"duplicate name {twice[0]!r}")
        frames, joints, bodies = len(self.joint_pos), len(self.joint_names), len(self.body_names)
        expected = {"joint_pos": (joints,), "joint_vel": (joints,)}
        expected |= {"body_pos_w": (bodies, 3), "body_quat_w": (bodies, 4)}
        expected |= {"body_lin_vel_w": (bodies, 3), "body_ang_vel_w": (bodies, 3)}
        for name, shape in expected.items():
            value = getattr(self, name)
            if value.shape != (frames, *shape):
                raise ConfigError(key=name, expected=f"shape {[frames, *shape]}", got=list(value.shape))
            if not np.isfinite(value).all():
                frame = int((~np.isfinite(value).reshape(frames, -1).all(axis=1)).argmax())
                raise ConfigError(f"contains NaN or infinity in frame {frame}", key=name)
        if frames < 2 or not joints or not bodies:
            problem = f"not enough data: {frames} frames, {joints} joints, {bodies} bodies"
            raise ConfigError(problem, expected="at least 2 frames, 1 joint and 1 body")
        if not 0.0 < self.fps < 10_000.0:
            raise ConfigError(key="fps", expected="a frame rate in (0, 10000) Hz", got=self.fps)
        error = np.abs((norm := np.linalg.norm(self.body_quat_w, axis=-1)) - 1.0)
        if error.max() > UNIT:
            frame, body = np.unravel_index(error.argmax(), error.shape)
            problem = f"quaternion of {self.body_names[body]!r} in frame {frame} is not normalised"
            raise ConfigError(problem, key="body_quat_w", got=f"norm {norm[frame, body]:.3g}")

    @property
    def seconds(self) -> float:
        """Duration [s]."""
        return (len(self.joint_pos) - 1) / self.fps


def load(path: Path) -> Clip:
    """Read a clip (ours or Isaac Lab's); ConfigError if it is invalid or has no names (use `robot_clip.load_for`)."""
    return read(path, None, None)[0]


def read(path: Path, joint_names: Sequence[str] | None, body_names: Sequence[str] | None) -> tuple[Clip, bool]:
    """Read a clip, adding names to files without them (mjlab's); also return whether the format is Isaac Lab's."""
    if not os.path.isfile(path):  # False if the name is too long
        hint = "Try gpusim-rl clip record to create one"
        raise ConfigError("no such file", key=str(path), expected="a motion clip (.npz)", hint=hint)
    ours = {field.name: field.name for field in fields(Clip)}
    arrays, _ = npz_file.load(path.resolve(), CLIP_BYTES, {*ours, *ISAAC_LAB.values()})
    is_isaac_lab = "dof_positions" in arrays
    keys = ours | ISAAC_LAB if is_isaac_lab else ours
    values = {name: np.asarray(arrays[key]) for name, key in keys.items() if key in arrays}
    present = ", ".join(values) or "nothing"
    given = {"joint_names": joint_names, "body_names": body_names}
    values |= {key: np.array(names) for key, names in given.items() if names is not None and key not in values}
    try:
        if missing := [field.name for field in fields(Clip) if field.name not in values]:
            hint = "mjlab's clips lack joint and body names: name the robot. " if set(missing) == set(given) else ""
            raise ConfigError(f"missing arrays {', '.join(missing)}; found {present}", hint=f"{hint}See {DOCS}")
        for key in given:
            it = values[key]
            if it.dtype.kind != "U" or it.ndim != 1 or not 0 < it.size <= MAX_NAMES or it.itemsize > 4 * MAX_LETTERS:
                raise ConfigError(key=key, expected=f"1 to {MAX_NAMES} names of up to {MAX_LETTERS} characters")
        names: dict[str, Any] = {key: tuple(values.pop(key).tolist()) for key in given}
        if wrong := [key for key, value in values.items() if value.dtype.kind not in "fiu"]:
            raise ConfigError(key=wrong[0], expected="numbers", got=values[wrong[0]].dtype)
        if (fps := values.pop("fps")).size != 1:
            raise ConfigError(f"array of shape {list(fps.shape)}", key="fps", expected="one number")
        with np.errstate(over="ignore"):
            single: dict[str, Any] = {name: value.astype(np.float32) for name, value in values.items()}
            clip = Clip(fps=float(fps.item()), **names, **single)
        if is_isaac_lab:
            clip = _with_hinges(clip)
        smooth = _without_holds(clip)
        if smooth is clip:
            _check_velocities(clip)
            smooth = _with_even_velocities(clip)
        if smooth is not clip:
            reason = "velocities jump from frame to frame"
            if smooth.fps != clip.fps:
                reason = f"each pose occurs {clip.fps / smooth.fps:.2g} times, so reading it at {smooth.fps:.4g} Hz"
            warn(f"{path}: {reason}; recomputing velocities from positions")
        return smooth, is_isaac_lab
    except ConfigError as error:
        raise error.within(str(path)) from None
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error), key=str(path)) from None


def _with_hinges(clip: Clip) -> Clip:
    """Convert Isaac Lab's ball joints (rotation vectors in `<name>_x`, `_y`, `_z`) to hinge angles and rates."""
    angles, rates = clip.joint_pos.copy(), clip.joint_vel.copy()
    for i, name in enumerate(clip.joint_names):
        if clip.joint_names[i : i + 3] != tuple(f"{name.removesuffix('_x')}_{axis}" for axis in "xyz"):
            continue
        vector = clip.joint_pos[:, i : i + 3].astype(np.float64)
        half = 0.5 * np.linalg.norm(vector, axis=1)
        w, (x, y, z) = np.cos(half), (0.5 * np.sinc(half / np.pi)[:, None] * vector).T
        a = np.unwrap(np.arctan2(2.0 * (w * x - y * z), 1.0 - 2.0 * (x * x + y * y)))
        b = np.arcsin(np.clip(2.0 * (x * z + w * y), -1.0, 1.0))
        c = np.unwrap(np.arctan2(2.0 * (w * z - x * y), 1.0 - 2.0 * (y * y + z * z)))
        # p, q, r: angular velocity in the frame of the outer link
        p, q, r = clip.joint_vel[:, i : i + 3].astype(np.float64).T
        rate_a = (p * np.cos(c) - q * np.sin(c)) / np.maximum(np.cos(b), GIMBAL)
        angles[:, i : i + 3] = np.stack([a, b, c], axis=1)
        rates[:, i : i + 3] = np.stack([rate_a, p * np.sin(c) + q * np.cos(c), r - rate_a * np.sin(b)], axis=1)
    return replace(clip, joint_pos=angles, joint_vel=rates)


def _without_holds(clip: Clip) -> Clip:
    """Drop repeated poses (Isaac Lab's 60 Hz files repeat 30 Hz poses), except pauses, and recompute velocities."""
    poses = np.concatenate([clip.joint_pos, *(v.reshape(len(v), -1) for v in (clip.body_pos_w, clip.body_quat_w))], 1)
    changes = np.flatnonzero((np.abs(np.diff(poses, axis=0)) > SAME).any(axis=1))
    held = np.diff(changes)
    moving = held[held <= max(2.0, PAUSE * clip.fps)]
    if len(moving) < MIN_HELD or moving.mean() < HOLDS:
        return clip
    each = float(moving.mean())
    frames = np.append(changes, len(poses) - 1)  # last frame of each pose
    times = np.maximum(1, np.round(np.diff(frames, prepend=-1) / each)).astype(int)
    return _with_own_velocities(_frames(clip, np.repeat(frames, times), clip.fps / each))


def _with_even_velocities(clip: Clip) -> Clip:
    """Recompute velocities that match the positions only when averaged over frames: resampling picks single frames."""
    own, window = _with_own_velocities(clip), max(1, round(PAUSE * clip.fps))
    for name in ("joint_vel", "body_lin_vel_w", "body_ang_vel_w"):
        for every, first in ((step, place) for step in range(2, STRIDE + 1) for place in range(step)):
            got, expected = (getattr(each, name)[first::every] for each in (clip, own))
            count = min(max(1, window // every), len(got))
            scale, likeness = _compare(_mean(got, count), _mean(expected, count))
            if likeness < LIKENESS or abs(math.log(max(scale, 1e-9))) > math.log(UNEVEN):
                return own
    return clip


def _with_own_velocities(clip: Clip) -> Clip:
    """Return the clip with velocities from central differences."""
    turns = clip.fps * _turns(clip.body_quat_w)
    values = {
        "joint_vel": np.gradient(clip.joint_pos.astype(np.float64), 1.0 / clip.fps, axis=0),
        "body_lin_vel_w": np.gradient(clip.body_pos_w.astype(np.float64), 1.0 / clip.fps, axis=0),
        "body_ang_vel_w": 0.5 * (np.concatenate([turns[:1], turns]) + np.concatenate([turns, turns[-1:]])),
    }
    for value in values.values():
        value[2:-2] -= np.diff(value, 2, axis=0)[1:-1] / 6.0
    return replace(clip, **{name: value.astype(np.float32) for name, value in values.items()})


def _frames(clip: Clip, chosen: np.ndarray | slice, fps: float) -> Clip:
    arrays = {f.name: v[chosen] for f in fields(clip) if isinstance(v := getattr(clip, f.name), np.ndarray)}
    return replace(clip, fps=fps, **arrays)


def _check_velocities(clip: Clip) -> None:
    """Raise ConfigError unless velocities match pose changes over 0.1 s, a window that spans duplicate frames."""
    window = min(max(1, round(0.1 * clip.fps)), len(clip.joint_pos) - 1)
    for name, of, names, change, hint in (
        (
            "body_lin_vel_w",
            "body_pos_w",
            clip.body_names,
            np.diff(clip.body_pos_w, axis=0),
            "velocities of body origins",
        ),
        ("joint_vel", "joint_pos", clip.joint_names, np.diff(clip.joint_pos, axis=0), "rad/s"),
        ("body_ang_vel_w", "body_quat_w", clip.body_names, _turns(clip.body_quat_w), "rad/s, world frame and wxyz"),
    ):
        velocity = getattr(clip, name)
        got, expected = _mean(0.5 * (velocity[1:] + velocity[:-1]), window), clip.fps * _mean(change, window)
        scale, likeness = _compare(got, expected)
        if likeness > LIKENESS and abs(math.log(scale)) < math.log(SCALE):
            continue
        place = np.unravel_index(np.abs(got - expected).argmax(), got.shape)
        frames = f"mean of {names[place[1]]} over frames {place[0]} to {place[0] + window} is {got[place]:.3g}"
        if likeness > LIKENESS:
            rate = clip.fps * scale
            hint = f"fps={rate:{'.0f' if rate >= 10.0 else '.2g'}} or so, not {clip.fps:g}"
        problem = f"does not match the rate of change of {of}: {frames}"
        raise ConfigError(problem, key=name, expected=f"{expected[place]:.3g}", hint=f"Use {hint}")


def _mean(values: np.ndarray, window: int) -> np.ndarray:
    sums = np.cumsum(np.concatenate([np.zeros_like(values[:1], dtype=np.float64), values]), axis=0)
    return (sums[window:] - sums[:-window]) / window


def _compare(value: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
    """Return the ratio of the norms and the cosine similarity of two arrays; both are 1 if nothing moves."""
    a, b = value.astype(np.float64).ravel(), expected.astype(np.float64).ravel()
    squares = float(a @ a), float(b @ b)
    if max(squares) < STILL**2 * a.size:
        return 1.0, 1.0
    likeness = float(a @ b) / math.sqrt(max(squares[0] * squares[1], 1e-30))
    return math.sqrt(squares[0] / max(squares[1], 1e-30)), likeness


def _turns(quat: np.ndarray) -> np.ndarray:
    """Return the rotation vectors between consecutive frames [rad], world frame."""
    before, after = (part.astype(np.float64) for part in (quat[:-1], quat[1:]))
    w = (before * after).sum(axis=-1, keepdims=True)
    xyz = before[..., :1] * after[..., 1:] - after[..., :1] * before[..., 1:]
    xyz = np.where(w < 0.0, -1.0, 1.0) * (xyz - np.cross(after[..., 1:], before[..., 1:]))
    length = np.linalg.norm(xyz, axis=-1, keepdims=True)
    return xyz * 2.0 * np.arctan2(length, np.abs(w)) / np.maximum(length, 1e-12)


def save(path: Path, clip: Clip) -> None:
    """Write a clip; raise ConfigError if its velocities do not match the positions."""
    _check_velocities(clip)
    npz_file.save(path, {field.name: np.asarray(getattr(clip, field.name)) for field in fields(Clip)})
