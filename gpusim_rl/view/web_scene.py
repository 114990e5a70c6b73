"""Browser scene of all envs side by side, drawn by viser with mjviser's meshes, and its replay as an HTML page."""

from __future__ import annotations

import html
import io
import math
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, redirect_stdout
from typing import Any

import mujoco
import numpy as np

from gpusim_rl.env import VecEnv
from gpusim_rl.errors import ConfigError
from gpusim_rl.sim import Sim
from gpusim_rl.sim.interface import put_pose
from gpusim_rl.view import looks
from gpusim_rl.view.player import Player
from gpusim_rl.view.renderer import FOVY_DEG, SKY, Camera, picture_model
from gpusim_rl.view.video import caption_words, frame_rate
from gpusim_rl.view.web_guard import guarded_server

GAP = 1.15  # distance between neighbouring envs [env sizes]
GROUND = {"infinite_grid": True, "plane_color": (196, 203, 210), "plane_opacity": 1.0, "shadow_opacity": 0.35}
GROUND_LINES = {"cell_color": (180, 187, 195), "section_color": (150, 158, 168)}
VISIBLE_GROUPS = 3  # geoms of groups 0 to 2 are drawn, as in MuJoCo's viewer
CAPTION = (
    '<div style="position:fixed;right:1rem;top:1rem;z-index:9;padding:.4rem .8rem;border-radius:.5rem;font:14px'
    ' system-ui,sans-serif;color:#222;background:#fffc;pointer-events:none">{}</div>'
)


class WebScene:
    """Envs of a simulator, shown in a web page.

    The world moves under the camera to keep the followed env centred while users orbit and zoom. `distance` scales
    the camera distance of videos.
    """

    def __init__(self, server: Any, sim: Sim, distance: float = 1.0) -> None:
        from mjviser import ViserMujocoScene

        self._sim = sim
        qpos = sim.poses.cpu().numpy()
        self._camera = Camera(sim.scene, qpos[:1])
        self._camera.distance *= distance
        self._model = picture_model(sim.scene, self._camera)
        self._data = mujoco.MjData(self._model)
        self._pos = np.zeros((sim.num_envs, self._model.nbody, 3))
        self._mat = np.tile(np.eye(3), (sim.num_envs, self._model.nbody, 1, 1))
        self._moved = np.flatnonzero(self._model.body_mocapid >= 0)  # mocap bodies, in the order of `mocap_pos`
        self._moved_quat = np.zeros((sim.num_envs, len(self._moved), 4))
        self._scene = ViserMujocoScene(server, self._model, sim.num_envs)
        self._scene._tracked_body_id = 0  # the world, placed by `draw` at the camera's target
        self._places = self._side_by_side(qpos[0])
        self._fixed = self._copy_fixed(server)
        self.following = True
        self._env, self._target, self._retarget = 0, np.zeros(3), True
        self.look_at(0)
        self._light(server)
        server.initial_camera.fov = math.radians(FOVY_DEG)
        server.initial_camera.position = self._camera.pose(np.zeros(3))[0]
        server.initial_camera.look_at = np.zeros(3)

    def _light(self, server: Any) -> None:
        """Add ground and sky, so that light-coloured robots do not vanish on white, and dim the lights."""
        model, far = self._model, 20.0 * self._camera.distance
        cell = 10.0 ** round(math.log10(self._camera.radius))
        sizes = {"cell_size": cell, "section_size": 5.0 * cell, "fade_distance": far}
        for geom in np.flatnonzero(model.geom_type == mujoco.mjtGeom.mjGEOM_PLANE):
            body = model.body(model.geom_bodyid[geom]).name
            server.scene.remove_by_name(f"/fixed_bodies/{body}/{model.geom(geom).name}")
            place = {"position": model.geom_pos[geom], "wxyz": model.geom_quat[geom]}
            server.scene.add_grid(f"/fixed_bodies/ground/{geom}", **place, **sizes, **GROUND, **GROUND_LINES)
        sky = np.linspace(*SKY, 64)[:, None] * np.ones((1, 2, 1))
        server.scene.set_background_image((255.0 * sky).astype(np.uint8), format="png")
        server.scene.configure_fog(0.3 * far, far, color=SKY[1])
        server.scene.configure_environment_map(environment_intensity=0.35)
        server.scene.configure_default_lights(cast_shadow=True)

    def _side_by_side(self, qpos: np.ndarray) -> np.ndarray:
        """Return env positions [m], [envs, 3], in a grid; zero on terrain, where the task spreads the robots."""
        model, data, number = self._model, self._data, self._sim.num_envs
        places = np.zeros((number, 3))
        if (model.geom_type == mujoco.mjtGeom.mjGEOM_HFIELD).any():
            return places
        put_pose(model, data, qpos)
        solid = (model.geom_type != mujoco.mjtGeom.mjGEOM_PLANE) & (model.geom_group < VISIBLE_GROUPS)
        pos, radius = data.geom_xpos[solid, :2], model.geom_rbound[solid, None]
        size = (pos + radius).max(axis=0, initial=0.0) - (pos - radius).min(axis=0, initial=0.0)
        size = GAP * np.maximum(size, 2.0 * self._camera.radius)
        columns = min(range(1, number + 1), key=lambda c: max(c * size[0], math.ceil(number / c) * size[1]))
        for env in range(number):
            places[env, :2] = size * (-(env % columns), env // columns)  # the first is nearest to the camera
        return places

    def _copy_fixed(self, server: Any) -> list[tuple[Any, np.ndarray]]:
        """Copy static geometry except the ground to the other envs; return handles and positions within an env [m]."""
        others, handles = self._sim.num_envs - 1, []
        for number, fixed in enumerate(self._scene._fixed_geom_handles.values()):
            if others and self._places.any() and fixed.visible:
                wxyzs, positions = np.tile(fixed.wxyz, (others, 1)), np.zeros((others, 3))
                name = f"/fixed_bodies/others/{number}"
                handle = server.scene.add_batched_glb(name, fixed.glb_data, wxyzs, positions, lod="off")
                handles.append((handle, np.array(fixed.position)))
        return handles

    def look_at(self, env: int) -> None:
        """Move an env to the centre, with the others around it."""
        self._retarget = self._retarget or env != self._env
        self._env = env
        places, alone = self._places - self._places[env], self._scene.show_only_selected
        self._around = np.zeros_like(places) if alone else places
        for handle, position in self._fixed:
            handle.batched_positions = np.delete(places, env, axis=0) + position
            handle.visible = not alone
        self._scene.env_idx = env

    def show(self, flag: str, on: bool) -> None:
        """Turn `show_only_selected`, `show_contact_points` or `show_contact_forces` on or off for the followed env."""
        setattr(self._scene, flag, on)
        self.look_at(self._env)

    def draw(self) -> None:
        """Send the current state of the envs."""
        sim, model, data = self._sim, self._model, self._data
        qpos = sim.poses.cpu().numpy()
        for env in range(sim.num_envs):
            if np.isfinite(qpos[env]).all():
                put_pose(model, data, qpos[env])
                self._pos[env] = data.xpos + self._around[env]
                self._mat[env] = data.xmat.reshape(-1, 3, 3)
                self._moved_quat[env] = data.xquat[self._moved]
        if self.following or self._retarget:
            self._target = self._camera.follow(self._env, self._pos[self._env, self._camera.body])
            self._retarget = False
        self._pos[:, 0] = self._target
        qvel, ctrl = sim.qvel.cpu().numpy(), sim.ctrl.cpu().numpy()
        moved = self._pos[:, self._moved], self._moved_quat
        self._scene.update_from_arrays(self._pos, self._mat, *moved, qpos=qpos[:, : model.nq], qvel=qvel, ctrl=ctrl)


def html_replay(player: Player, steps: Iterable[int], needed_by: str, words: Sequence[str] = ()) -> str:
    """Return a self-contained page that replays control steps, captioned by `words`; ConfigError without a VecEnv."""
    if not isinstance(player.env, VecEnv):
        raise ConfigError(f"{player.name} is from another library and has no scene", key=needed_by, hint="Try a video")
    title = html.escape(", ".join(words or caption_words(player)))
    every, fps = frame_rate(player.env.cfg.control_hz)
    with redirect_stdout(io.StringIO()), ExitStack() as stack:  # viser prints when it stops
        server = guarded_server(None, 0, needed_by)
        stack.callback(server.stop)
        scene, recording = WebScene(server, player.env.sim), server.get_scene_serializer()
        for step in steps:
            if step % every == 0:
                scene.draw()
                recording.insert_sleep(1.0 / fps)
            player.step()
        page = recording.as_html().replace("<title>Viser</title>", f"<title>{title}</title>", 1)
    used, _ = looks.find(player.env.sim.scene.model)
    licence = f"<!-- {html.escape(used.licence).replace('--', '- -')} -->" if used is not None else ""
    page = page.replace("{darkMode:false}", '{darkMode:matchMedia("(prefers-color-scheme: dark)").matches}', 1)
    return page.replace("<body>", f"<body>{licence}{CAPTION.format(title)}", 1)
