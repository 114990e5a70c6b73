"""Offscreen rendering of envs as tiles, each with a camera that follows its robot."""

from __future__ import annotations

import importlib
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

import mujoco
import numpy as np

from gpusim_rl.errors import ConfigError, first_line, say
from gpusim_rl.sim import Scene
from gpusim_rl.sim.interface import put_pose
from gpusim_rl.view import looks

FOVY_DEG = 45.0
DISTANCE = 2.7  # camera distance [radii of the robot]
LIGHT_SLOPE = 0.7  # horizontal over vertical component of the light's direction
ROUGH_LIGHT_SLOPE = 0.15  # steeper light over rough ground, which would otherwise be half in shadow
SLICES = 48  # sides of a cylinder
THINNER = 0.0075  # fraction of a radius; exceeds the error of a cylinder with SLICES sides
SKY = ((0.62, 0.72, 0.85), (0.93, 0.95, 0.97))  # zenith and horizon
HEIGHT_RATE = 0.1  # smoothing factor of the camera's height per frame
GAP = 2  # pixels between tiles
CAMERA = "gpusim_rl/camera"
SOFTWARE = ("llvmpipe", "softpipe", "swrast", "software")  # OpenGL renderers on the CPU
DEBIAN_GL = "libegl1 libopengl0 libgl1-mesa-dri, or libosmesa6"


@dataclass(frozen=True, slots=True)
class Grid:
    """Near-square grid of equal tiles, filled row by row; sizes in pixels."""

    tiles: int
    width: int
    height: int
    columns: int
    rows: int
    tile_width: int
    tile_height: int

    @classmethod
    def of(cls, tiles: int, width: int, height: int) -> Grid:
        """Return the grid for an image of this size [pixels]."""
        columns = math.ceil(math.sqrt(tiles))
        rows = math.ceil(tiles / columns)
        tile_width, tile_height = (width - GAP * (columns - 1)) // columns, (height - GAP * (rows - 1)) // rows
        if min(tile_width, tile_height) < 16:
            problem = f"{width}x{height} pixels are too few for {tiles} envs"
            raise ConfigError(problem, hint="Try --num-envs 4 or --width 1920")
        return cls(tiles, width, height, columns, rows, tile_width, tile_height)

    def corner(self, tile: int) -> tuple[int, int]:
        """Return the left and top pixel of a tile."""
        row, column = divmod(tile, self.columns)
        return column * (self.tile_width + GAP), row * (self.tile_height + GAP)


class Camera:
    """Camera that follows the robot's main body at a fixed angle.

    The main body is the first body of the first articulation with a free or slide joint and over half of the mass (a
    cart, a planar walker), else the root: sliding fingers of an arm are not followed. The distance fits the body and
    its descendants at `qpos`, [tiles, nq].
    """

    azimuth_deg, elevation_deg = 120.0, -18.0  # from the front right of a robot that runs along +x
    shadow_pixels = 1024  # shadow map size; one is drawn per tile

    def __init__(self, scene: Scene, qpos: np.ndarray) -> None:
        model, bodies = scene.model, scene.bodies_of(scene.articulation_names[0])
        root = bodies[0] if bodies else 0
        translating = (mujoco.mjtJoint.mjJNT_FREE.value, mujoco.mjtJoint.mjJNT_SLIDE.value)
        heavy = [body for body in bodies if model.body_subtreemass[body] > 0.5 * model.body_subtreemass[root]]
        moving = [body for body in heavy if np.isin(model.jnt_type[model.jnt_bodyid == body], translating).any()]
        self.body = moving[0] if moving else root
        self.radius = max(0.05, *(self._reach(model, positions) for positions in qpos))
        self.distance = DISTANCE * self.radius
        self._heights: dict[int, float] = {}

    def _reach(self, model: mujoco.MjModel, qpos: np.ndarray) -> float:
        """Return the distance from the body's origin to the farthest point of its subtree [m]."""
        data = mujoco.MjData(model)
        put_pose(model, data, qpos)
        geoms = np.isin(model.geom_bodyid, list(self.carried(model)))
        distance = np.linalg.norm(data.geom_xpos[geoms] - data.xpos[self.body], axis=1)
        return float((distance + model.geom_rbound[geoms]).max(initial=0.0))

    def carried(self, model: mujoco.MjModel) -> set[int]:
        """Return the followed body and all its descendants."""
        bodies = {self.body}
        for body in range(self.body + 1, model.nbody):  # parents precede children
            if int(model.body_parentid[body]) in bodies:
                bodies.add(body)
        return bodies

    def follow(self, tile: int, position: np.ndarray) -> np.ndarray:
        """Return the look-at point [m] for the body's position [m], with smoothed height so that steps stay visible."""
        previous = self._heights.get(tile, float(position[2]))
        jumped = abs(position[2] - previous) > self.radius  # a new episode
        height = position[2] if jumped else previous + HEIGHT_RATE * (position[2] - previous)
        self._heights[tile] = float(height)
        return np.array([position[0], position[1], height])

    def pose(self, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return position [m] and rotation matrix (x right, y up, z backward) of a camera looking at `target`."""
        azimuth, elevation = math.radians(self.azimuth_deg), math.radians(self.elevation_deg)
        flat = np.array([math.cos(azimuth), math.sin(azimuth), 0.0])
        forward = flat * math.cos(elevation) + np.array([0.0, 0.0, math.sin(elevation)])
        right = np.cross(forward, [0.0, 0.0, 1.0]) / math.cos(elevation)
        return target - self.distance * forward, np.stack([right, np.cross(right, forward), -forward], axis=1)


def picture_model(scene: Scene, camera: Camera) -> mujoco.MjModel:
    """Return the scene's model with a sky, a camera and softer light; `qpos` stays compatible."""
    spec = scene.spec.copy()
    skybox, gradient = mujoco.mjtTexture.mjTEXTURE_SKYBOX, mujoco.mjtBuiltin.mjBUILTIN_GRADIENT
    if not any(texture.type == skybox for texture in spec.textures):
        sky = spec.add_texture(name="gpusim_rl/sky", type=skybox, builtin=gradient, width=256, height=6 * 256)
        sky.rgb1, sky.rgb2 = SKY
    spec.worldbody.add_camera(name=CAMERA, fovy=FOVY_DEG)
    model = looks.compiled(spec, scene)
    model.stat.extent = camera.radius  # unit of clipping planes, haze and shadows
    visual = model.vis
    visual.global_.fovy = FOVY_DEG
    visual.map.zfar = 80.0
    visual.map.shadowclip = 2.7  # half width of the shadow region
    visual.quality.shadowsize = camera.shadow_pixels
    visual.quality.numslices, visual.quality.numstacks = SLICES, SLICES // 2
    visual.headlight.ambient[:] = visual.headlight.diffuse[:] = 0.35
    visual.headlight.specular[:] = 0.1
    visual.rgba.haze[:3] = SKY[1]
    if model.nlight == 1 and model.light_type[0] == mujoco.mjtLightType.mjLIGHT_DIRECTIONAL.value:
        # Shadows exist only near the light, so it tracks the robot, from behind the camera.
        azimuth = math.radians(camera.azimuth_deg)
        slope = ROUGH_LIGHT_SLOPE if model.nhfield else LIGHT_SLOPE
        direction = np.array([slope * math.cos(azimuth), slope * math.sin(azimuth), -1.0])
        direction /= np.linalg.norm(direction)
        model.light_mode[0] = mujoco.mjtCamLight.mjCAMLIGHT_TRACK.value
        model.light_bodyid[0] = camera.body
        model.light_dir0[0], model.light_pos0[0] = direction, -4.0 * camera.radius * direction
    # Coincident ends of capsules would flicker: shrink them imperceptibly, children and siblings differently.
    depth, side, children = np.zeros((3, model.nbody), dtype=np.int64)
    for body in range(1, model.nbody):  # parents precede children
        parent = model.body_parentid[body]
        depth[body], side[body] = depth[parent] + 1, (side[parent] + children[parent]) % 2
        children[parent] += 1
    ends = np.isin(model.geom_type, (mujoco.mjtGeom.mjGEOM_SPHERE.value, mujoco.mjtGeom.mjGEOM_CAPSULE.value))
    model.geom_size[ends, 0] *= 1.0 - THINNER * (2 * (depth % 2) + side)[model.geom_bodyid[ends]]
    return model


def tiled(pictures: Sequence[np.ndarray], width: int, height: int, *, pixels_stay: bool = False) -> np.ndarray:
    """Tile images, uint8 [h, w, 3], into one, uint8 [height, width, 3]; `pixels_stay`: scale by nearest neighbour."""
    from PIL import Image, ImageOps

    method = Image.Resampling.NEAREST if pixels_stay else Image.Resampling.BICUBIC
    grid = Grid.of(len(pictures), width, height)
    canvas = Image.new("RGB", (width, height))
    for tile, pixels in enumerate(pictures):
        picture = ImageOps.pad(Image.fromarray(pixels), (grid.tile_width, grid.tile_height), method)
        canvas.paste(picture, grid.corner(tile))
    return np.asarray(canvas)


def make_renderer(
    scene: Scene, qpos: np.ndarray, width: int, height: int, name: str = "auto", camera: Camera | None = None
) -> Renderer:
    """Build the best available renderer for images of this size [pixels] of envs at `qpos`, shape [tiles, nq].

    `name` is `gl` (OpenGL), `ray` (MuJoCo Warp's ray caster) or `auto`; the default camera follows the robot. Raise
    ConfigError, listing packages to install, if none works.
    """
    grid = Grid.of(len(qpos), width, height)
    camera = camera or Camera(scene, qpos)
    if name == "ray":
        return RayRenderer(scene, camera, grid)
    tried = gl_platforms()
    if (working := next(filter(gl_works, tried), None)) is not None:
        return GlRenderer(scene, camera, grid, working)
    missing = f"OpenGL does not work here without a display (tried {', '.join(tried)})"
    fix = f"On Debian or Ubuntu: apt-get install {DEBIAN_GL}"
    if name == "gl":
        raise ConfigError(missing, hint=fix)
    try:
        renderer = RayRenderer(scene, camera, grid)
    except (ConfigError, NotImplementedError, RuntimeError, ValueError) as error:
        problem = f"{missing}, and MuJoCo Warp cannot render this scene ({first_line(error)[:80]})"
        raise ConfigError(problem, hint=fix) from None
    say(f"{missing}; using MuJoCo Warp's ray caster. {fix}", file=sys.stderr)
    return renderer


def gl_platforms() -> list[str]:
    """Return OpenGL platforms to try, best first. MUJOCO_GL selects one, as in MuJoCo."""
    name = os.environ.get("MUJOCO_GL", "").lower()
    if name in ("egl", "osmesa", "glfw", "cgl"):
        return [name]
    names = {"darwin": ["cgl", "glfw"], "win32": ["glfw"]}
    return names.get(sys.platform, ["egl", "osmesa", *["glfw"] * ("DISPLAY" in os.environ)])


@cache
def gl_works(platform: str) -> bool:
    """Return whether a platform can render, by trying it in a subprocess."""
    # A broken driver may abort, and PyOpenGL cannot switch platforms once loaded.
    probe = "import mujoco; mujoco.Renderer(mujoco.MjModel.from_xml_string('<mujoco/>'), 8, 8).close()"
    command, variables = [sys.executable, "-c", probe], {**os.environ, "MUJOCO_GL": platform}
    with suppress(subprocess.TimeoutExpired):
        done = subprocess.run(command, env=variables, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
        return done.returncode == 0
    return False


class GlRenderer:
    """MuJoCo's OpenGL renderer on `egl`, `osmesa`, `glfw` or `cgl`; all tiles share one buffer."""

    def __init__(self, scene: Scene, camera: Camera, grid: Grid, platform: str) -> None:
        self._grid, self._camera = grid, camera
        self._model = picture_model(scene, camera)
        self._model.vis.global_.offwidth, self._model.vis.global_.offheight = grid.width, grid.height
        self._gl = importlib.import_module(f"mujoco.{platform}").GLContext(grid.width, grid.height)
        self._gl.make_current()
        # Antialiasing is free on a graphics card and triples the time on a CPU.
        gl = importlib.import_module("OpenGL.GL")
        driver = (gl.glGetString(gl.GL_RENDERER) or b"software").decode(errors="replace").lower()
        self._model.vis.quality.offsamples = 0 if any(word in driver for word in SOFTWARE) else 4
        self._context = mujoco.MjrContext(self._model, mujoco.mjtFontScale.mjFONTSCALE_100.value)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN.value, self._context)
        self._scene = mujoco.MjvScene(self._model, maxgeom=max(1000, 2 * self._model.ngeom))
        self._option = mujoco.MjvOption()
        self._data = mujoco.MjData(self._model)
        self._picture = np.zeros((grid.height, grid.width, 3), dtype=np.uint8)

    def render(self, qpos: np.ndarray) -> np.ndarray:
        """Render all envs at positions [tiles, nq]; return uint8 [height, width, 3], overwritten by the next call."""
        grid, model, data = self._grid, self._model, self._data
        frame = mujoco.MjrRect(0, 0, grid.width, grid.height)
        mujoco.mjr_rectangle(frame, 0.0, 0.0, 0.0, 1.0)
        view = mujoco.MjvCamera()
        view.azimuth, view.elevation = self._camera.azimuth_deg, self._camera.elevation_deg
        view.distance = self._camera.distance
        for tile, positions in enumerate(qpos):
            put_pose(model, data, positions)
            mujoco.mj_comPos(model, data)
            mujoco.mj_camlight(model, data)
            mujoco.mj_tendon(model, data)
            view.lookat[:] = self._camera.follow(tile, data.xpos[self._camera.body])
            everything = mujoco.mjtCatBit.mjCAT_ALL.value
            mujoco.mjv_updateScene(model, data, self._option, None, view, everything, self._scene)
            left, top = grid.corner(tile)
            bottom = grid.height - top - grid.tile_height  # OpenGL's origin is at the bottom
            rectangle = mujoco.MjrRect(left, bottom, grid.tile_width, grid.tile_height)
            mujoco.mjr_render(rectangle, self._scene, self._context)
        mujoco.mjr_readPixels(self._picture, None, frame, self._context)
        return self._picture[::-1]

    def close(self) -> None:
        """Free the OpenGL context."""
        self._context.free()
        self._gl.free()


class RayRenderer:
    """MuJoCo Warp's ray caster on the CPU; needs no OpenGL, system library or display."""

    def __init__(self, scene: Scene, camera: Camera, grid: Grid) -> None:
        import torch

        from gpusim_rl.sim.warp import start_warp

        start_warp(torch.device("cpu"))
        import mujoco_warp
        import warp

        self._mjw, self._wp, self._grid, self._camera = mujoco_warp, warp, grid, camera
        self._model = picture_model(scene, camera)
        self._index = self._model.camera(CAMERA).id
        with self._wp.ScopedDevice("cpu"):
            self._warp_model = mujoco_warp.put_model(self._model)
            self._warp_data = mujoco_warp.make_data(self._model, nworld=grid.tiles, nconmax=16, njmax=64)
            parts = {"render_rgb": True, "render_skybox": True, "use_shadows": True, "cam_active": [CAMERA]}
            size = (grid.tile_width, grid.tile_height)
            self._rays = mujoco_warp.create_render_context(self._model, nworld=grid.tiles, cam_res=size, **parts)
            self._rgb = warp.zeros((grid.tiles, grid.tile_height, grid.tile_width), dtype=warp.vec3)
        self._picture = np.zeros((grid.height, grid.width, 3), dtype=np.uint8)

    def render(self, qpos: np.ndarray) -> np.ndarray:
        """Render all envs; see `GlRenderer.render`."""
        mjw, model, data, grid = self._mjw, self._warp_model, self._warp_data, self._grid
        qpos, moved = np.split(qpos.astype(np.float32), [self._model.nq], axis=1)  # joints, mocap bodies
        with self._wp.ScopedDevice("cpu"):
            data.qpos.assign(qpos)
            if moved.size:
                pos, quat = np.split(moved, [3 * self._model.nmocap], axis=1)
                data.mocap_pos.assign(pos.reshape(grid.tiles, -1, 3))
                data.mocap_quat.assign(quat.reshape(grid.tiles, -1, 4))
            mjw.kinematics(model, data)
            mjw.com_pos(model, data)
            mjw.camlight(model, data)
            position, rotation = data.cam_xpos.numpy(), data.cam_xmat.numpy()
            for tile, body in enumerate(data.xpos.numpy()[:, self._camera.body]):
                target = self._camera.follow(tile, body)
                position[tile, self._index], rotation[tile, self._index] = self._camera.pose(target)
            data.cam_xpos.assign(position)
            data.cam_xmat.assign(rotation)
            mjw.refit_bvh(model, data, self._rays)
            mjw.render(model, data, self._rays)
            mjw.get_rgb(self._rays, 0, self._rgb)
        for tile, rgb in enumerate(self._rgb.numpy()):
            left, top = grid.corner(tile)
            self._picture[top : top + grid.tile_height, left : left + grid.tile_width] = np.rint(rgb * 255.0)
        return self._picture

    def close(self) -> None:
        """Do nothing: there is no OpenGL context to free."""


Renderer = GlRenderer | RayRenderer
