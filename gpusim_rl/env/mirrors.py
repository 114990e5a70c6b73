"""Mirror images of observations and actions, from what a task says of the parts of its observation: `Task.mirrors`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpusim_rl.env.environment import Environment
from gpusim_rl.env.vec_env import VecEnv
from gpusim_rl.errors import TaskError, did_you_mean
from gpusim_rl.sim.mirror_image import PSEUDOVECTOR, QUATERNION, VECTOR, MirrorImage
from gpusim_rl.spaces import SignedPermutation

SIGNS: dict[str, list[float]] = {
    "scalar": [1.0],
    "vector": VECTOR.tolist(),
    "pseudovector": PSEUDOVECTOR.tolist(),
    "quaternion": QUATERNION.tolist(),
    "planar": [1.0, -1.0],  # x, y
    "planar_velocity": [1.0, -1.0, -1.0],  # x, y, turn about z
    "turn": [-1.0],  # about z or x
}
"""Kinds of quantities, and the signs of their numbers in the mirror image; a part may hold several of a kind."""
JOINTS, ACTUATORS = "joints", "actuators"
IMAGE = "image"
"""Kind of a group of images by a camera in the x-z plane of the robot: left and right change places."""
EXACT = 1e-4  # m, between points of a scan


class PerBody(NamedTuple):
    """Kind of a part that has a quantity for each of some bodies or sites, by their names: `PerBody(FEET)`."""

    names: Sequence[str]
    kind: str = "scalar"


class Mirrored(NamedTuple):
    """Mirror images of what a policy gets and does."""

    maps: dict[str, SignedPermutation]
    """Maps of the observation groups by name, and of `actions`."""
    asymmetry: float
    """Difference of the model from its mirror image, see `MirrorImage.measure`."""


def mirrored(env: Environment) -> Mirrored:
    """Derives the mirror images of a task's observations and actions; call it after `reset`.

    Raises:
        TaskError: The robot has none, or the task does not say of which kind a part of its observation is.
    """
    if not isinstance(env, VecEnv):
        raise TaskError(f"{type(env).__name__}: the mirror images of another library's envs are not known")
    task, scene = env.task, env.sim.scene
    if task.choices is not None:
        raise TaskError(f"{env.name}: discrete actions have no mirror image")
    if len(scene.articulation_names) != 1:
        raise TaskError(f"{env.name} has {scene.articulation_names}: mirror images are known of one robot alone")
    image = MirrorImage(scene, scene.articulation_names[0])
    kinds = _Kinds(env.name, task.mirrors, image)
    maps = {}
    for group in env.obs_sizes:
        index, signs = [], []
        for part in env.obs_parts.get(group, ()):
            frame = kinds.of_part(part.name, part.size)
            for first in range(len(index), len(index) + part.size * part.history, part.size):
                index += [first + i for i in frame.sources]
                signs += frame.signs
        if not signs:
            raise TaskError(f"{env.name}.observe()[{group!r}] has no named parts, so its mirror image is not known")
        maps[group] = SignedPermutation(index, signs)
    for group in env.images:
        if task.mirrors.get(group) != IMAGE:
            known = f"{IMAGE!r} is that of a camera in the x-z plane of the robot"
            raise TaskError(f"{env.name}.mirrors[{group!r}]: the mirror image of these images is not known; {known}")
    maps["actions"] = kinds.of_part("actions", env.num_actions)
    for name, (index, signs) in maps.items():
        for k, i in enumerate(index):
            if index[i] != k or signs[i] != signs[k]:
                raise TaskError(f"{env.name}: {name}, number {k}: the mirror image of the mirror image is another one")
    return Mirrored(maps, image.measure())


class _Kinds:
    """Makes the map of a part from its kind."""

    def __init__(self, task: str, kinds: Any, image: MirrorImage) -> None:
        self._task, self._kinds, self._image = task, kinds, image

    def of_part(self, name: str, size: int) -> SignedPermutation:
        """Returns the map of one frame of a part."""
        default = ACTUATORS if name == "actions" else None
        kind = self._kinds.get(name, default)
        where = f"{self._task}.mirrors[{name!r}]"
        if kind is None:
            known = f"{', '.join((*SIGNS, JOINTS, ACTUATORS))}, PerBody(names) or the points of a scan"
            raise TaskError(f"{where}: the task does not say which kind of quantity it is: {known}")
        if isinstance(kind, Tensor):
            return self._scan(where, kind, size)
        if isinstance(kind, PerBody):
            index, width = self._image.among(kind.names), size // len(kind.names)
            signs = self._signs(where, kind.kind, width)
            self._check(where, size, len(index) * width)
            return SignedPermutation([i * width + k for i in index for k in range(width)], signs * len(index))
        if kind in (JOINTS, ACTUATORS):
            found = self._image.joints if kind == JOINTS else self._image.actuators
            self._check(where, size, len(found.sources))
            return found
        signs = self._signs(where, kind, size)
        return SignedPermutation(list(range(size)), signs)

    def _signs(self, where: str, kind: Any, size: int) -> list[float]:
        if kind not in SIGNS:
            hint = did_you_mean(str(kind), SIGNS) or f" Try one of {', '.join(SIGNS)}"
            raise TaskError(f"{where}={kind!r} is no kind.{hint}")
        times, rest = divmod(size, len(SIGNS[kind]))
        if rest:
            raise TaskError(f"{where}={kind!r}: expected a multiple of {len(SIGNS[kind])} numbers, got {size}")
        return SIGNS[kind] * times

    def _scan(self, where: str, points: Tensor, size: int) -> SignedPermutation:
        self._check(where, size, len(points))
        flipped = points.detach().cpu().double().clone()
        flipped[:, 1].neg_()
        away = torch.cdist(flipped, points.detach().cpu().double())
        nearest = away.min(dim=1)
        if float(nearest.values.max()) > EXACT:
            lonely = points[int(nearest.values.argmax())].tolist()
            raise TaskError(f"{where}: the point {lonely} of the scan has no counterpart on the other side")
        return SignedPermutation(nearest.indices.tolist(), [1.0] * size)

    def _check(self, where: str, size: int, expected: int) -> None:
        if size != expected:
            raise TaskError(f"{where}: the part has {size} numbers, and its kind {expected}")
