"""Mirror images of observations and actions, from the kinds of observation terms in `Task.mirrors`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
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
"""Signs of each kind's components in the mirror image; a term may hold several quantities of one kind."""
JOINTS, ACTUATORS = "joints", "actuators"
IMAGE = "image"
"""Mirror kind for an image group from a camera in the robot's x-z plane: left and right swap."""
EXACT = 1e-4  # tolerance of mirrored scan points [m]


class PerBody(NamedTuple):
    """Mirror kind for a term with one quantity per named body or site, such as `PerBody(FEET)`."""

    names: Sequence[str]
    kind: str = "scalar"


class AtSite(NamedTuple):
    """Mirror kind for a sensor at a site, in the site's axes, such as `AtSite("imu", "vector", "ang_vel")`.

    The mirror image of a velocity off the symmetry plane depends on the angular velocity: the group's term `omega`.
    """

    site: str
    kind: str  # "vector" for a velocity, "pseudovector" for an angular velocity
    omega: str = ""


def mirrored(env: Environment) -> tuple[dict[str, SignedPermutation], float]:
    """Return mirror maps of all groups and `actions`, and the model's asymmetry; TaskError if no map exists."""
    if not isinstance(env, VecEnv):
        raise TaskError("mirror images are not supported for envs of other libraries", key=type(env).__name__)
    task, scene = env.task, env.sim.scene
    if task.choices is not None:
        raise TaskError("mirror images are not supported for discrete actions", key=env.name)
    if len(scene.articulation_names) != 1:
        raise TaskError(key=f"{env.name}: mirror images", expected="a single robot", got=scene.articulation_names)
    image = MirrorImage(scene, scene.articulation_names[0])
    kinds = _Kinds(env.name, task.mirrors, image)
    maps = {}
    for group in env.obs_sizes:
        index, signs, terms = [], [], []
        sizes = {term.name: term.size * term.history for term in env.obs_terms.get(group, ())}
        columns = dict(zip(sizes, itertools.pairwise([0, *itertools.accumulate(sizes.values())]), strict=True))
        for term in env.obs_terms.get(group, ()):
            frame = kinds.term_map(term.name, term.size)
            for first in range(len(index), len(index) + term.size * term.history, term.size):
                index += [first + i for i in frame.sources]
                signs += frame.signs
                terms += [(first + row, first + source, factor) for row, source, factor in frame.terms]
                terms += kinds.omega_terms(term.name, first, columns)
        if not signs:
            raise TaskError("a mirror image requires named terms", key=f"{env.name}.observe()[{group!r}]")
        maps[group] = SignedPermutation(index, signs, terms)
    for group in env.images:
        if task.mirrors.get(group) != IMAGE:
            hint = f"Try {IMAGE!r} for a camera in the robot's x-z plane"
            raise TaskError("mirror image not defined", key=f"{env.name}.mirrors[{group!r}]", hint=hint)
    maps["actions"] = kinds.term_map("actions", env.num_actions)
    for name, swap in maps.items():
        twice = matrix(swap) @ matrix(swap)
        for k in np.flatnonzero((np.abs(twice - np.eye(len(twice))) > 1e-6).any(axis=1)):
            raise TaskError(f"mirroring {name}[{k}] twice does not restore its value", key=env.name)
    return maps, image.measure()


def matrix(swap: SignedPermutation) -> np.ndarray:
    """Return the matrix of a signed permutation."""
    result = np.zeros((len(swap.sources), len(swap.sources)))
    result[np.arange(len(result)), swap.sources] = swap.signs
    for row, source, factor in swap.terms:
        result[row, source] += factor
    return result


def _terms(matrix: np.ndarray, row: int = 0, column: int = 0) -> list[tuple[int, int, float]]:
    return [(row + int(i), column + int(k), float(matrix[i, k])) for i, k in np.argwhere(matrix)]


class _Kinds:
    """Mirror maps of observation terms, built from their kinds."""

    def __init__(self, task: str, kinds: Any, image: MirrorImage) -> None:
        self._task, self._kinds, self._image = task, kinds, image

    def term_map(self, name: str, size: int) -> SignedPermutation:
        default = ACTUATORS if name == "actions" else None
        kind = self._kinds.get(name, default)
        where = f"{self._task}.mirrors[{name!r}]"
        if kind is None:
            kinds = f"one of {', '.join((*SIGNS, JOINTS, ACTUATORS))}, PerBody(names) or the points of a scan"
            raise TaskError("missing entry", key=where, expected=kinds)
        if isinstance(kind, Tensor):
            swap = self._scan(where, kind)
        elif isinstance(kind, AtSite):
            matrix, signs = self._image.at_site(kind.site, kind.kind)[0], SIGNS[kind.kind]
            swap = SignedPermutation([0, 1, 2], signs, _terms(matrix - np.diag(signs)))
        elif isinstance(kind, PerBody):
            index, width = self._image.among(kind.names), size // len(kind.names)
            signs = self._signs(where, kind.kind, width)
            swap = SignedPermutation([i * width + k for i in index for k in range(width)], signs * len(index))
        elif kind in (JOINTS, ACTUATORS):
            swap = self._image.joints if kind == JOINTS else self._image.actuators
        else:
            swap = SignedPermutation(list(range(size)), self._signs(where, kind, size))
        if size != len(swap.sources):
            raise TaskError(key=where, expected=f"{len(swap.sources)} numbers for this kind", got=size)
        return swap

    def omega_terms(self, name: str, first: int, columns: dict[str, tuple[int, int]]) -> list[tuple[int, int, float]]:
        """Return the matrix entries (row, column, factor) that add the effect of `omega` to the frame at `first`."""
        kind = self._kinds.get(name)
        matrix = self._image.at_site(kind.site, kind.kind)[1] if isinstance(kind, AtSite) else np.zeros((3, 3))
        if not matrix.any():
            return []
        begin, end = columns.get(kind.omega, (0, 0))
        source = end - (columns[name][1] - first)  # the newest frame is the last one
        if source < begin:
            problem, key = f"site {kind.site!r} is not in the plane of symmetry", f"{self._task}.mirrors[{name!r}]"
            raise TaskError(problem, key=key, expected="omega: a term with at least its history", got=kind.omega)
        return _terms(matrix, first, source)

    def _signs(self, where: str, kind: Any, size: int) -> list[float]:
        if kind not in SIGNS:
            hint = did_you_mean(str(kind), SIGNS) or f"Available: {', '.join(SIGNS)}"
            raise TaskError(f"unknown kind {kind!r}", key=where, hint=hint)
        times, rest = divmod(size, len(SIGNS[kind]))
        if rest:
            raise TaskError(key=f"{where}={kind!r}", expected=f"a multiple of {len(SIGNS[kind])} numbers", got=size)
        return SIGNS[kind] * times

    def _scan(self, where: str, points: Tensor) -> SignedPermutation:
        points = points.detach().cpu().double()
        nearest = torch.cdist(points * torch.tensor([1.0, -1.0]), points).min(dim=1)
        if float(nearest.values.max()) > EXACT:
            point = points[int(nearest.values.argmax())].tolist()
            raise TaskError(f"scan point {point} has no counterpart on the other side", key=where)
        return SignedPermutation(nearest.indices.tolist(), [1.0] * len(points))
