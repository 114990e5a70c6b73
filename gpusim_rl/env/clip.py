"""Motion clips: how a robot moves, frame by frame, in a file.

The arrays and their names are those of mjlab's motion files. A file also says its rate and the names of joints and
bodies, so no order has to be guessed.
"""

from __future__ import annotations

import io
import zipfile
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpusim_rl.errors import ConfigError
from gpusim_rl.files import safe_open

MAX_BYTES = 256 << 20
"""Size of a file, packed and unpacked; 10 minutes of a humanoid at 50 Hz have 60 MB."""
UNIT = 1e-3
"""Most by which the length of a quaternion may differ from 1."""

Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """A motion, frame by frame. Bodies are in the world frame, orientations wxyz."""

    fps: float
    """Frames per second [Hz]."""
    joint_names: tuple[str, ...]
    body_names: tuple[str, ...]
    joint_pos: Array
    """[frames, joints], rad or m."""
    joint_vel: Array
    """[frames, joints], rad/s or m/s."""
    body_pos_w: Array
    """Origins of the bodies' frames, [frames, bodies, 3], m."""
    body_quat_w: Array
    """[frames, bodies, 4]."""
    body_lin_vel_w: Array
    """Velocities of the origins, [frames, bodies, 3], m/s."""
    body_ang_vel_w: Array
    """[frames, bodies, 3], rad/s."""

    def __post_init__(self) -> None:
        frames, joints, bodies = len(self.joint_pos), len(self.joint_names), len(self.body_names)
        expected = {"joint_pos": (joints,), "joint_vel": (joints,)}
        expected |= {"body_pos_w": (bodies, 3), "body_quat_w": (bodies, 4)}
        expected |= {"body_lin_vel_w": (bodies, 3), "body_ang_vel_w": (bodies, 3)}
        for name, shape in expected.items():
            value = getattr(self, name)
            if value.shape != (frames, *shape):
                raise ConfigError(f"{name} is {list(value.shape)}, expected {[frames, *shape]}")
            if not np.isfinite(value).all():
                frame = int((~np.isfinite(value).reshape(frames, -1).all(axis=1)).argmax())
                raise ConfigError(f"{name} has a number that is not finite in frame {frame}")
        if frames < 2 or not joints or not bodies:
            raise ConfigError(f"it has {frames} frames, {joints} joints and {bodies} bodies; it needs 2, 1 and 1")
        if not 0.0 < self.fps < 10_000.0:
            raise ConfigError(f"fps is {self.fps:g}, expected frames per second")
        error = np.abs(np.linalg.norm(self.body_quat_w, axis=-1) - 1.0)
        if error.max() > UNIT:
            frame, body = np.unravel_index(error.argmax(), error.shape)
            raise ConfigError(f"the quaternion of {self.body_names[body]} in frame {frame} has not length 1")

    @property
    def seconds(self) -> float:
        """Duration [s]."""
        return (len(self.joint_pos) - 1) / self.fps


def load(path: Path) -> Clip:
    """Reads a clip, as data only.

    Raises:
        ConfigError: The file is not there or is no clip; arrays are missing, or do not fit each other.
    """
    try:
        content = safe_open.read_bytes(path, MAX_BYTES)
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > MAX_BYTES:
                raise ConfigError(f"{path} is larger than {MAX_BYTES >> 20} MB unpacked: no motion clip")
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            values: dict[str, Any] = {field.name: arrays[field.name] for field in fields(Clip)}
    except (OSError, zipfile.BadZipFile, KeyError, ValueError, EOFError) as error:
        raise ConfigError(f"{path} is no motion clip: {error}. Try docs/imitation.md#clips") from None
    try:
        names = {key: tuple(str(name) for name in values.pop(key)) for key in ("joint_names", "body_names")}
        fps = float(values.pop("fps"))
        return Clip(fps=fps, **names, **{name: value.astype(np.float32) for name, value in values.items()})
    except (ConfigError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from None


def save(path: Path, clip: Clip) -> None:
    """Writes a clip.

    Raises:
        OSError: The file cannot be written.
    """
    with safe_open.replacing(path) as file:
        np.savez_compressed(file, **{field.name: np.asarray(getattr(clip, field.name)) for field in fields(Clip)})
