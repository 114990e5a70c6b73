"""Cameras of a scene and their images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mujoco
import numpy as np
from jaxtyping import Float, Int, UInt8
from torch import Tensor, uint8

from gpusim_rl.errors import TaskError, available, did_you_mean

OUTPUTS = ("rgb", "depth", "segmentation")
FAR = 100.0  # depth of the far plane, and of pixels without a hit [m]
SKY = (0.70, 0.80, 0.90)  # background colour (RGB) of scenes without a sky texture


@dataclass(frozen=True, slots=True)
class SceneCamera:
    """Camera declared by `Scene.add_camera`."""

    name: str
    size: tuple[int, int]  # height and width [pixels]
    outputs: tuple[str, ...]
    every: int  # control steps per frame
    groups: tuple[int, ...]  # visible geom groups
    samples: int  # rays per pixel along each side


def add_camera(
    spec: mujoco.MjSpec,
    camera: SceneCamera,
    body: str | None,
    pos: Sequence[float] | None,
    quat: Sequence[float] | None,
    target: Sequence[float] | None,
    fovy: float | None,
) -> None:
    """Validate a camera, and add it to the spec unless a file defines it; see `Scene.add_camera`."""
    call = f"Scene.add_camera({camera.name!r})"
    _check(call, camera)
    if fovy is not None and not 0.0 < fovy < 180.0:
        raise TaskError(key=f"{call}: fovy", expected="an angle between 0 and 180 degrees", got=fovy)
    known = [each.name for each in spec.cameras]
    if camera.name in known:
        if (body, pos, quat, target) != (None, None, None, None):
            raise TaskError("a file already defines this camera; omit body, pos, quat and target", key=call)
        if fovy is not None:
            spec.camera(camera.name).fovy = fovy
        return
    if pos is None:
        problem = f"a new camera needs pos; the files define {', '.join(known) or 'no cameras'}"
        raise TaskError(problem, key=call, hint=did_you_mean(camera.name, known).strip())
    bodies = [each.name for each in spec.bodies[1:]]  # without the world
    if body is not None and body not in bodies:
        raise TaskError(f"no body {body!r}", key=call, hint=available(body, bodies))
    if quat is not None and target is not None:
        raise TaskError("quat and target are mutually exclusive", key=call)
    for name, value, length in (("pos", pos, 3), ("quat", quat, 4), ("target", target, 3)):
        if value is None or (len(value) == length and np.isfinite(value).all() and (name != "quat" or any(value))):
            continue
        expected = f"{length} finite numbers" + ", not all 0" * (name == "quat")
        raise TaskError(key=f"{call}: {name}", expected=expected, got=list(value))
    if target is not None:
        quat = _look(call, pos, target)
    owner, quat = spec.worldbody if body is None else spec.body(body), quat or (1.0, 0.0, 0.0, 0.0)
    owner.add_camera(name=camera.name, pos=list(pos), quat=list(quat), fovy=45.0 if fovy is None else fovy)


def _check(call: str, camera: SceneCamera) -> None:
    size, outputs, groups = camera.size, camera.outputs, camera.groups
    is_size = len(size) == 2 and all(isinstance(length, int) and 1 <= length <= 4096 for length in size)
    for name, valid, expected in (
        ("size", is_size, "a height and a width from 1 to 4096 pixels"),
        ("outputs", {*outputs} <= {*OUTPUTS} and 0 < len(outputs) == len({*outputs}), f"some of {', '.join(OUTPUTS)}"),
        ("every", isinstance(camera.every, int) and camera.every >= 1, "a positive int [control steps]"),
        ("samples", isinstance(camera.samples, int) and 1 <= camera.samples <= 8, "an int from 1 to 8"),
        ("groups", groups and {*groups} <= {*range(6)}, "one or more geom groups from 0 to 5"),
    ):
        if not valid:
            raise TaskError(key=f"{call}: {name}", expected=expected, got=getattr(camera, name))
    if camera.samples > 1 and "rgb" not in outputs:
        raise TaskError(key=f"{call}: samples", expected="1 unless outputs include rgb", got=camera.samples)


def _look(call: str, pos: Sequence[float], target: Sequence[float]) -> list[float]:
    """Return the orientation (wxyz) of a camera at `pos` that looks at `target`, with z up in the image."""
    backward = np.subtract(pos, target, dtype=np.float64)
    if not backward.any():
        raise TaskError(key=f"{call}: target", expected="a point other than pos", got=list(target))
    backward /= np.linalg.norm(backward)
    right = np.cross([0.0, 0.0, 1.0], backward)
    right = right / np.linalg.norm(right) if np.linalg.norm(right) > 1e-6 else np.array([0.0, -1.0, 0.0])  # +x is up
    quat = np.zeros(4)
    mujoco.mju_mat2Quat(quat, np.stack([right, np.cross(backward, right), backward], axis=1).ravel())
    return quat.tolist()


class CameraImages:
    """Images of one camera in every world; created by `Sim.camera`. Frames are written in place.

    Attributes:
        name: Name of the camera.
        size: Height H and width W [pixels].
        outputs: Available images: `rgb`, `depth`, `segmentation`.
        age: Control steps since the frame was rendered, int64 [num_envs]; the frame may show the previous episode.
    """

    def __init__(self, camera: SceneCamera, tensors: dict[str, Tensor], age: Int[Tensor, " envs"]) -> None:
        self.name, self.size, self.outputs, self.age = camera.name, camera.size, camera.outputs, age
        self._tensors = tensors

    @property
    def rgb(self) -> UInt8[Tensor, "envs height width 3"]:
        """RGB image, uint8 [num_envs, H, W, 3]; row 0 is the top."""
        return self._output("rgb")

    @property
    def depth(self) -> Float[Tensor, "envs height width"]:
        """Distance along the viewing direction [m], float32 [num_envs, H, W]; `FAR` (100 m) without a hit."""
        return self._output("depth")

    def depth_bytes(self, near: float, far: float) -> UInt8[Tensor, "envs height width 1"]:
        """Return the depth as an image for a policy, uint8 [num_envs, H, W, 1]: 0 at `near`, 255 at `far` [m]."""
        return ((self.depth - near) * (255.0 / (far - near))).clamp_(0.0, 255.0)[..., None].to(uint8)

    @property
    def segmentation(self) -> Int[Tensor, "envs height width"]:
        """Body id per pixel, int32 [num_envs, H, W]; -1 for background, 0 for everything fixed to the world."""
        return self._output("segmentation")

    def _output(self, name: str) -> Tensor:
        if name not in self._tensors:
            hint = f"Try add_camera(..., outputs={(*self.outputs, name)})"
            raise TaskError(f"camera {self.name!r} has no {name} output", hint=hint)
        return self._tensors[name]
