"""Terrain: patches of increasing difficulty in one height field, with a height table for observations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from gpusim_rl.errors import ConfigError
from gpusim_rl.settings.schema import Count, Natural, NotNegative, Positive, Rule

Heights = Float[np.ndarray, "levels columns x y"]

TREAD = 0.3  # depth of a stair [m]
NOISE_SPACING = 0.2  # grid spacing of rough ground [m]
NUM_OBSTACLES = 40  # per patch
GAP_DEPTH = 1.0  # [m]
MOST_POINTS = 50_000_000  # heights of a terrain; computing this many takes several GB


@dataclass(frozen=True, slots=True, kw_only=True)
class TerrainConfig:
    """Grid of square patches: one row along y per level, one column along x per variation of a kind."""

    seed: Natural  # of the random patches
    levels: Count  # from easy to hard
    columns: Annotated[dict[str, Count], Rule("at least one <kind>: <number of columns>", lambda kinds: len(kinds) > 0)]
    """Number of columns of each kind, in order; see `KINDS`."""
    patch_size: Positive  # m
    platform_size: Positive  # m; a flat square in the middle of every patch
    resolution: Positive  # m between neighbouring heights
    height_step: Positive  # m; heights are rounded to multiples of this step
    border: NotNegative  # m of flat ground around all patches; nothing lies beyond it

    def __post_init__(self) -> None:
        unknown = [kind for kind in self.columns if kind not in KINDS]
        if unknown:
            raise ConfigError(f"unknown kinds {unknown}", key="terrain.columns", hint=f"Available: {', '.join(KINDS)}")
        if not self.platform_size < self.patch_size:
            expected = f"less than patch_size={self.patch_size:g}, such as {self.patch_size / 2:g}"
            raise ConfigError(key="terrain.platform_size", expected=expected, got=self.platform_size)
        along = self.patch_size / self.resolution
        points = self.levels * sum(self.columns.values()) * along * along
        if points > MOST_POINTS:
            problem, hint = f"too many heights: {points:.3g}", "Try fewer levels or columns, or a larger resolution"
            raise ConfigError(problem, key="terrain", expected=f"at most {MOST_POINTS:.3g}", hint=hint)
        for key in ("patch_size", "platform_size"):
            cells = getattr(self, key) / self.resolution
            if abs(cells - round(cells)) > 1e-6 or round(cells) % 2 or cells < 1:
                even = 2 * max(1, round(cells / 2)) * self.resolution
                expected = f"an even multiple of resolution={self.resolution:g}, such as {even:g}"
                raise ConfigError(key=f"terrain.{key}", expected=expected, got=getattr(self, key))


class Terrain:
    """Ground shared by all worlds: a height field around the origin.

    Levels lie along +x, columns along +y. Lines between patches and the border are at height 0.

    Args:
        cfg: Kinds and sizes of the patches.
        device: Device of `height` and `scan`.

    Attributes:
        heights: Ground height on a square grid [m], shape [x, y].
        origins: Centre of each platform [m], shape [levels, columns, 3].
        half_size: Distance of the patches' outer edges from the origin along x and y [m].
        kinds: Kind of each column.
    """

    def __init__(self, cfg: TerrainConfig, device: torch.device | str = "cpu") -> None:
        self.cfg = cfg
        patches = _patches(cfg)
        levels, columns, cells, _ = patches.shape
        field = patches.swapaxes(1, 2).reshape(levels * cells, columns * cells)
        field = np.pad(field, (0, 1))  # n cells have n + 1 points
        x, y = (cfg.patch_size * (np.arange(count) - 0.5 * (count - 1)) for count in (levels, columns))
        z = patches[:, :, cells // 2, cells // 2]
        origins = np.stack([*np.broadcast_arrays(x[:, None], y), z], axis=-1)

        self.kinds = [kind for kind, count in cfg.columns.items() for _ in range(count)]
        self.half_size = (0.5 * levels * cfg.patch_size, 0.5 * columns * cfg.patch_size)
        self.heights: Float[Tensor, "x y"] = torch.tensor(field, dtype=torch.float32, device=device)
        self.origins: Float[Tensor, "levels columns 3"] = torch.tensor(origins, dtype=torch.float32, device=device)
        # A cell's four corners, all addressed by the index of its corner with the lowest x and y.
        table, row = self.heights.flatten(), self.heights.shape[1]
        self._corners = (table, table[1:], table[row:], table[row + 1 :])
        half = torch.tensor([size // 2 for size in self.heights.shape], dtype=torch.float32, device=device)
        self._cells = -half, half - 1.0  # first and last cell along x and y, counted from the middle

    def height(self, x: Float[Tensor, "*batch"], y: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        """Return the ground height at world points [m] as MuJoCo computes it; 0 beyond all patches.

        MuJoCo splits a cell into two triangles along the diagonal from its lowest to its highest x and y.
        """
        return self._height(torch.stack([x, y]))

    def _height(self, points: Float[Tensor, "2 *batch"]) -> Float[Tensor, "*batch"]:
        resolution, (half_x, half_y) = self.cfg.resolution, (size // 2 for size in self.heights.shape)
        first, last = (limit.view(2, *[1] * (points.ndim - 1)) for limit in self._cells)
        cell = (points / resolution).floor_()  # along x and y, counted from the middle
        cell.clamp_(first, last).nan_to_num_()  # NaN of diverged worlds
        # Relative to the cell; relative to the whole field, float32 would be off by a tenth of a millimetre.
        u, v = torch.sub(points, cell, alpha=resolution).div_(resolution).clamp_(0.0, 1.0)
        i, j = cell.int()
        row = self.heights.shape[1]
        index = torch.add(j, i, alpha=row).add_(half_x * row + half_y).flatten()
        z00, z01, z10, z11 = (corner.index_select(0, index).view(u.shape) for corner in self._corners)
        along_x, along_y = z10 - z00, z01 - z00
        fold = (z11 - z10).sub_(along_y)  # change of slope at the diagonal, weighted by min(u, v)
        return z00.addcmul_(u, along_x).addcmul_(v, along_y).addcmul_(torch.minimum(u, v), fold)

    def scan(
        self, pos: Float[Tensor, "envs 3"], yaw: Float[Tensor, " envs"], points: Float[Tensor, "points 2"]
    ) -> Float[Tensor, "envs points"]:
        """Return ground heights [m] at `points` [m] in a level frame at position `pos` [m] and heading `yaw` [rad]."""
        x, y = points.unbind(dim=1)
        ahead = torch.addcmul(pos[:, :2].T[..., None], yaw.cos()[:, None], points.T[:, None])
        sin = yaw.sin()[:, None]
        ahead[0].addcmul_(sin, y, value=-1.0)
        ahead[1].addcmul_(sin, x)
        return self._height(ahead)


@dataclass(frozen=True, slots=True)
class _Canvas:
    """Column block of one terrain kind, at all levels."""

    cfg: TerrainConfig
    random: np.random.Generator
    difficulty: Float[np.ndarray, "levels 1 1 1"]  # in [0, 1)
    columns: int
    edge: np.ndarray  # cells from the patch's edge to each point, shape [x, y]

    @property
    def cells(self) -> int:
        return len(self.edge)

    @property
    def foot(self) -> int:
        """Cells from the patch's edge to the platform's edge."""
        return self.cells_of(0.5 * (self.cfg.patch_size - self.cfg.platform_size))

    @property
    def between(self) -> np.ndarray:
        """Mask of points strictly between the patch's edge and the platform, shape [x, y]."""
        return (self.edge > 0) & (self.edge < self.foot)

    @property
    def climb(self) -> np.ndarray:
        """Cells from the patch's edge to each point, at most `foot`, shape [x, y]."""
        return np.minimum(self.edge, self.foot)

    def cells_of(self, length: float) -> int:
        return max(1, round(length / self.cfg.resolution))

    def uniform(self, low: float, high: float, *shape: int) -> np.ndarray:
        """Return random numbers for every patch, shape [levels, columns, *shape]."""
        return self.random.uniform(low, high, (len(self.difficulty), self.columns, *shape))


def _slope(canvas: _Canvas) -> Heights:
    return 0.4 * canvas.difficulty * canvas.cfg.resolution * canvas.climb


def _stairs(canvas: _Canvas) -> Heights:
    return (0.05 + 0.175 * canvas.difficulty) * (canvas.climb // canvas.cells_of(TREAD))


def _rough(canvas: _Canvas) -> Heights:
    """Return bilinearly interpolated random heights [m]."""
    spacing = canvas.cells_of(NOISE_SPACING)
    size = canvas.cells // spacing + 2
    coarse = canvas.uniform(-1.0, 1.0, size, size)
    cell, rest = np.divmod(np.arange(canvas.cells), spacing)
    weight = rest / spacing
    along_x = coarse[:, :, cell] * (1.0 - weight)[:, None] + coarse[:, :, cell + 1] * weight[:, None]
    noise = along_x[..., cell] * (1.0 - weight) + along_x[..., cell + 1] * weight
    return (0.025 + 0.075 * canvas.difficulty) * noise * canvas.between


def _obstacles(canvas: _Canvas) -> Heights:
    """Return heights [m] of low boxes and holes with sides of 1 to 2 m; the last one wins where they overlap."""
    place = np.arange(canvas.cells) * canvas.cfg.resolution
    middle = canvas.uniform(0.0, canvas.cfg.patch_size, 2, NUM_OBSTACLES, 1)
    half_side = 0.5 * canvas.uniform(1.0, 2.0, 2, NUM_OBSTACLES, 1)
    covers_x, covers_y = np.moveaxis(np.abs(place - middle) < half_side, 2, 0)
    covers = covers_x[..., :, None] & covers_y[..., None, :]  # [levels, columns, obstacles, x, y]
    last = NUM_OBSTACLES - 1 - np.argmax(covers[:, :, ::-1], axis=2)
    height = canvas.random.choice([-1.0, -0.5, 0.5, 1.0], (*covers.shape[:3], 1, 1))
    height = np.take_along_axis(height, last[:, :, None], axis=2)[:, :, 0]
    return (0.025 + 0.15 * canvas.difficulty) * height * covers.any(axis=2) * canvas.between


def _stepping_stones(canvas: _Canvas) -> Heights:
    """Return heights [m] of square stones with sides of 1.5 to 0.4 m, 0.2 to 0.4 m apart."""
    side = np.rint((1.5 - 1.1 * canvas.difficulty) / canvas.cfg.resolution)
    pitch = side + np.rint((0.2 + 0.2 * canvas.difficulty) / canvas.cfg.resolution)
    place = np.arange(canvas.cells) + np.floor(pitch * canvas.uniform(0.0, 1.0, 2, 1))
    on_x, on_y = np.moveaxis(place % pitch <= side, 2, 0)
    stone = on_x[..., :, None] & on_y[..., None, :]
    return -GAP_DEPTH * (canvas.between & ~stone)


def _gap(canvas: _Canvas) -> Heights:
    """Return heights [m] of a trench around the platform, 0.2 to 1 m wide."""
    width = np.rint((0.2 + 0.8 * canvas.difficulty) / canvas.cfg.resolution)
    return -GAP_DEPTH * (canvas.between & (canvas.edge > canvas.foot - width))


KINDS: dict[str, Callable[[_Canvas], Heights]] = {
    "slope_up": lambda canvas: -_slope(canvas),
    "slope_down": _slope,
    "rough_slope_up": lambda canvas: _rough(canvas) - _slope(canvas),
    "rough_slope_down": lambda canvas: _rough(canvas) + _slope(canvas),
    "stairs_up": lambda canvas: -_stairs(canvas),
    "stairs_down": _stairs,
    "rough": _rough,
    "obstacles": _obstacles,
    "stepping_stones": _stepping_stones,
    "gap": _gap,
}
"""Kinds of ground, named as seen from the platform: on `stairs_up`, the platform is at the bottom of a pit."""


def _patches(cfg: TerrainConfig) -> Heights:
    """Return heights of all patches [m], each without its edges at the highest x and y."""
    cells = round(cfg.patch_size / cfg.resolution)
    place = np.arange(cells)
    to_edge = np.minimum(place, cells - place)
    edge = np.minimum(to_edge[:, None], to_edge)
    difficulty = (np.arange(cfg.levels) / cfg.levels)[:, None, None, None]
    random = np.random.default_rng(cfg.seed)
    kinds = []
    for kind, count in cfg.columns.items():
        canvas = _Canvas(cfg, random, difficulty, count, edge)
        shape = (cfg.levels, count, cells, cells)
        kinds.append(np.broadcast_to(KINDS[kind](canvas), shape))
    return np.rint(np.concatenate(kinds, axis=1) / cfg.height_step) * cfg.height_step
