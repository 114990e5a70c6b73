"""Snapshots of envs, framed automatically."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import mujoco
import numpy as np

from gpusim_rl.errors import ConfigError, import_extra
from gpusim_rl.files.safe_open import writing
from gpusim_rl.sim import Scene
from gpusim_rl.sim.interface import put_pose
from gpusim_rl.view.renderer import FOVY_DEG, Camera, Grid, make_renderer

WIDE_AZIMUTH_DEG = 150.0  # view of wide robots, more from the front
WIDE = 1.25  # minimum width over length of a wide robot
FLAT_ELEVATION_DEG = -30.0
FLAT = 0.6  # maximum height over width of a flat robot
NEAR = 2.0  # maximum distance of framed objects [radii of the robot]
LARGE = 1.5  # maximum size of framed objects [radii of the robot]; the robot stands on larger ones
FILL = 0.86  # fraction of the image's width or height that framed objects cover
SMOOTH = 2  # supersampling per axis, for OpenGL without antialiasing
INSET = 0.4  # maximum fraction of a tile for the policy's image
FRAME = 2  # border of that image [pixels]
HIDDEN_GROUP = 3  # first geom group that is not drawn


class FramingCamera(Camera):
    """Camera that frames the robot (see `Camera`) and nearby objects.

    `aspect` is a tile's width over height; `fill` is the fraction of the tile that the framed objects cover.
    """

    shadow_pixels = 4096

    def __init__(self, scene: Scene, qpos: np.ndarray, aspect: float, fill: float = FILL) -> None:
        super().__init__(scene, qpos)
        points = [self._points(scene, positions) for positions in qpos]
        length, width, height = np.ptp(points[0], axis=0)
        if width > WIDE * length:
            self.azimuth_deg = WIDE_AZIMUTH_DEG
        if height < FLAT * max(length, width):
            self.elevation_deg = FLAT_ELEVATION_DEG
        self.radius = max(0.05, *(0.5 * float(np.linalg.norm(np.ptp(tile, axis=0))) for tile in points))
        half_height = fill * math.tan(math.radians(FOVY_DEG) / 2)
        fits = [self._fit(tile, half_height * aspect, half_height) for tile in points]
        self._targets = [target for target, _ in fits]
        self.distance = max(distance for _, distance in fits)

    def follow(self, tile: int, position: np.ndarray) -> np.ndarray:
        """Return the center of the framed objects."""
        return self._targets[tile]

    def _fit(self, points: np.ndarray, half_width: float, half_height: float) -> tuple[np.ndarray, float]:
        """Return the camera's target and distance [m] at which all points fit; `half_*`: tangents of the half FOVs."""
        target = 0.5 * (points.min(axis=0) + points.max(axis=0))
        _, axes = self.pose(target)
        distance, shift = 0.0, np.zeros(2)
        for _ in range(5):  # iterate, since perspective moves the center
            target = target + axes[:, :2] @ shift
            right, up, toward = ((points - target) @ axes).T
            distance = float((toward + np.maximum(abs(right) / half_width, abs(up) / half_height)).max())
            slopes = [side / (distance - toward) for side in (right, up)]
            shift = np.array([0.5 * distance * (slope.min() + slope.max()) for slope in slopes])
        return target, distance

    def _points(self, scene: Scene, qpos: np.ndarray) -> np.ndarray:
        """Return the box corners of all framed objects, world frame [m]."""
        model, data = scene.model, mujoco.MjData(scene.model)
        put_pose(model, data, qpos)
        robot = self._corners(model, data, self.carried(model))
        if not len(robot):
            return data.xpos[self.body] + self.radius * np.array([[-1.0, -1.0, -1.0], [1.0, 1.0, 1.0]])
        center, radius = robot.mean(axis=0), 0.5 * np.linalg.norm(np.ptp(robot, axis=0))
        others = [self._corners(model, data, set(scene.bodies_of(name))) for name in scene.articulation_names[1:]]
        small = [it for it in others if len(it) and 0.5 * np.linalg.norm(np.ptp(it, axis=0)) <= LARGE * radius]
        near = [it for it in small if np.linalg.norm(it.mean(axis=0) - center) < NEAR * radius]
        return np.concatenate([robot, *near])

    @staticmethod
    def _corners(model: mujoco.MjModel, data: mujoco.MjData, bodies: set[int]) -> np.ndarray:
        """Return the box corners of these bodies' visible geoms, world frame [m]."""
        signs = np.array(np.meshgrid([-1, 1], [-1, 1], [-1, 1])).T.reshape(-1, 3)
        corners = [np.zeros((0, 3))]
        for geom in range(model.ngeom):
            hidden = model.geom_group[geom] >= HIDDEN_GROUP or model.geom_rgba[geom, 3] == 0
            if hidden or int(model.geom_bodyid[geom]) not in bodies:
                continue
            middle, half = model.geom_aabb[geom, :3], model.geom_aabb[geom, 3:]
            if model.geom_type[geom] == mujoco.mjtGeom.mjGEOM_PLANE.value:
                middle, half = np.zeros(3), model.geom_size[geom] * [1, 1, 0]  # the drawn part
            if half.max() > 0:
                corners.append(data.geom_xpos[geom] + (middle + signs * half) @ data.geom_xmat[geom].reshape(3, 3).T)
        return np.concatenate(corners)


def draw(
    scene: Scene, qpos: np.ndarray, width: int, height: int, renderer: str = "auto", fill: float = FILL
) -> np.ndarray:
    """Render framed envs at `qpos` [envs, nq] to uint8 [height, width, 3]; raise ConfigError if that fails."""
    grid = Grid.of(len(qpos), width, height)
    camera = FramingCamera(scene, qpos, grid.tile_width / grid.tile_height, fill)
    try:
        drawn = make_renderer(scene, qpos, SMOOTH * width, SMOOTH * height, renderer, camera)
    except mujoco.FatalError as error:  # the largest buffer depends on the OpenGL driver
        problem = f"cannot render {SMOOTH * width}x{SMOOTH * height} pixels for an image of {width}x{height}: {error}"
        raise ConfigError(problem, hint="Try a smaller --width and --height") from None
    with closing(drawn):
        large = drawn.render(qpos).reshape(height, SMOOTH, width, SMOOTH, 3)
    return np.rint(large.mean(axis=(1, 3))).astype(np.uint8)


def add_seen(picture: np.ndarray, images: Sequence[np.ndarray]) -> np.ndarray:
    """Inset each env's policy image, uint8 [h, w, 3], into its tile of `picture`, uint8 [height, width, 3]."""
    grid, picture = Grid.of(len(images), picture.shape[1], picture.shape[0]), picture.copy()
    for tile, image in enumerate(images):
        factor = INSET * min(grid.tile_height / image.shape[0], grid.tile_width / image.shape[1])
        stride, times = max(1, math.ceil(1.0 / factor)), max(1, int(factor))  # subsample an image that is too large
        image = image[::stride, ::stride].repeat(times, axis=0).repeat(times, axis=1)
        framed = np.pad(image, ((FRAME, FRAME), (FRAME, FRAME), (0, 0)), constant_values=255)
        left, top = grid.corner(tile)
        right = left + grid.tile_width
        picture[top : top + framed.shape[0], right - framed.shape[1] : right] = framed
    return picture


def write_png(path: Path, picture: np.ndarray) -> None:
    """Write an image, uint8 [height, width, 3], as PNG."""
    images = import_extra("PIL.Image", "view", "snapshot")
    with writing(path) as file:
        images.fromarray(picture).save(file, "PNG", optimize=True)
