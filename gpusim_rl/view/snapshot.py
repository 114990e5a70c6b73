"""One picture of an env, framed by its camera, and its file."""

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
from gpusim_rl.view.renderer import FOVY_DEG, Camera, Grid, make_renderer, posed

WIDE_AZIMUTH_DEG = 150.0  # angle for robots that are wider than long: more from ahead
WIDE = 1.25  # width over length, above which a robot is looked at from there
FLAT_ELEVATION_DEG = -30.0
FLAT = 0.6  # height over width, below which things are looked at from higher up
NEAR = 2.0  # radii of the robot, within which an object belongs to the picture
LARGE = 1.5  # radii of the robot; what is larger is what it stands on, and need not be in the picture
FILL = 0.86  # share of the picture's width or height that the framed things take
SMOOTH = 2  # pixels drawn for one of the picture, each way: smooth edges where OpenGL has none
INSET = 0.4  # share of a tile's width or height, at most, for what its policy sees
FRAME = 2  # pixels around that
HIDDEN_GROUP = 3  # geoms of this group and above are not drawn


class FramingCamera(Camera):
    """A camera that frames the robot and the objects near it, as they are now.

    The robot is what `Camera` follows: of a cart on a rail the cart and its pole. `aspect` is the width over height of
    a tile, `fill` the share of its width or height that the framed things take.
    """

    shadow_pixels = 4096  # one picture may take its time

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
        """Returns the middle of what is framed, wherever the body is."""
        return self._targets[tile]

    def _fit(self, points: np.ndarray, half_width: float, half_height: float) -> tuple[np.ndarray, float]:
        """Returns a target [m] and a distance [m] so that all points are within these slopes of the line of sight."""
        target = 0.5 * (points.min(axis=0) + points.max(axis=0))
        _, axes = self.pose(target)
        distance, shift = 0.0, np.zeros(2)
        for _ in range(5):  # perspective moves the middle: a few rounds bring it to rest
            target = target + axes[:, :2] @ shift
            right, up, toward = ((points - target) @ axes).T
            distance = float((toward + np.maximum(abs(right) / half_width, abs(up) / half_height)).max())
            slopes = [side / (distance - toward) for side in (right, up)]
            shift = np.array([0.5 * distance * (slope.min() + slope.max()) for slope in slopes])
        return target, distance

    def _points(self, scene: Scene, qpos: np.ndarray) -> np.ndarray:
        """Returns the corners of the boxes around all that is framed, world frame [m]."""
        model, data = scene.model, posed(scene.model, qpos)
        robot = self._corners(model, data, self.carried(model))
        if not len(robot):
            return data.xpos[self.body] + self.radius * np.array([[-1.0, -1.0, -1.0], [1.0, 1.0, 1.0]])
        middle, radius = robot.mean(axis=0), 0.5 * np.linalg.norm(np.ptp(robot, axis=0))
        framed = [robot]
        for name in scene.articulation_names[1:]:
            corners = self._corners(model, data, set(scene.bodies_of(name)))
            if not len(corners) or 0.5 * np.linalg.norm(np.ptp(corners, axis=0)) > LARGE * radius:
                continue
            if np.linalg.norm(corners.mean(axis=0) - middle) < NEAR * radius:
                framed.append(corners)
        return np.concatenate(framed)

    @staticmethod
    def _corners(model: mujoco.MjModel, data: mujoco.MjData, bodies: set[int]) -> np.ndarray:
        """Returns the corners of the boxes around the visible geoms of some bodies, world frame [m]."""
        signs = np.array(np.meshgrid([-1, 1], [-1, 1], [-1, 1])).T.reshape(-1, 3)
        corners = [np.zeros((0, 3))]
        for geom in range(model.ngeom):
            hidden = model.geom_group[geom] >= HIDDEN_GROUP or model.geom_rgba[geom, 3] == 0
            if hidden or int(model.geom_bodyid[geom]) not in bodies:
                continue
            middle, half = model.geom_aabb[geom, :3], model.geom_aabb[geom, 3:]
            if model.geom_type[geom] == mujoco.mjtGeom.mjGEOM_PLANE.value:
                middle, half = np.zeros(3), model.geom_size[geom] * [1, 1, 0]  # as large as it is drawn
            if half.max() > 0:
                corners.append(data.geom_xpos[geom] + (middle + signs * half) @ data.geom_xmat[geom].reshape(3, 3).T)
        return np.concatenate(corners)


def draw(
    scene: Scene, qpos: np.ndarray, width: int, height: int, renderer: str = "auto", fill: float = FILL
) -> np.ndarray:
    """Draws envs at these positions, shape [envs, nq], each framed: with other arguments as `make_renderer` does.

    `fill` is the share of a tile's width or height that the framed things take.

    Returns:
        The picture, uint8, shape [height, width, 3].

    Raises:
        ConfigError: Nothing can draw here, or the picture is too small for the envs or too large for OpenGL.
    """
    grid = Grid.of(len(qpos), width, height)
    camera = FramingCamera(scene, qpos, grid.tile_width / grid.tile_height, fill)
    try:
        drawn = make_renderer(scene, qpos, SMOOTH * width, SMOOTH * height, renderer, camera)
    except mujoco.FatalError as error:  # what OpenGL can draw at once depends on the driver
        raise ConfigError(
            f"cannot draw {SMOOTH * width}x{SMOOTH * height} pixels for a picture of {width}x{height}: {error}."
            " Try a smaller --width and --height"
        ) from None
    with closing(drawn):
        large = drawn.render(qpos).reshape(height, SMOOTH, width, SMOOTH, 3)
    return np.rint(large.mean(axis=(1, 3))).astype(np.uint8)


def add_seen(picture: np.ndarray, images: Sequence[np.ndarray]) -> np.ndarray:
    """Returns a picture of envs with the image that each policy sees in the upper right corner of its tile.

    Args:
        picture: Picture of the envs, uint8, shape [height, width, 3].
        images: Image of each env, uint8, shape [h, w, 3]; enlarged by whole pixels.
    """
    grid, picture = Grid.of(len(images), picture.shape[1], picture.shape[0]), picture.copy()
    for tile, image in enumerate(images):
        factor = min(grid.tile_height / image.shape[0], grid.tile_width / image.shape[1])
        stride = max(1, math.ceil(1.0 / (INSET * factor)))  # subsample an image that is too large
        image = image[::stride, ::stride].repeat(max(1, int(INSET * factor)), 0).repeat(max(1, int(INSET * factor)), 1)
        framed = np.pad(image, ((FRAME, FRAME), (FRAME, FRAME), (0, 0)), constant_values=255)
        left, top = grid.corner(tile)
        right = left + grid.tile_width
        picture[top : top + framed.shape[0], right - framed.shape[1] : right] = framed
    return picture


def write_png(path: Path, picture: np.ndarray) -> None:
    """Writes an 8-bit RGB picture, shape [height, width, 3].

    Raises:
        ConfigError: The extra is missing, or the file cannot be written.
    """
    images = import_extra("PIL.Image", "view", "snapshot")
    with writing(path) as file:
        images.fromarray(picture).save(file, "PNG", optimize=True)
