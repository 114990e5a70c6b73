"""A replay as one page: a scene in 3D with a time line, which a browser draws from the file alone."""

from __future__ import annotations

import copy
import html
import io
from collections.abc import Iterable
from contextlib import ExitStack, redirect_stdout

import mujoco
import numpy as np

from gpusim_rl.env import VecEnv
from gpusim_rl.errors import ConfigError, import_extra
from gpusim_rl.view.caption import words_of
from gpusim_rl.view.player import Player
from gpusim_rl.view.renderer import FOVY_DEG, Camera
from gpusim_rl.view.video import frame_rate

CAPTION = (
    '<div style="position:fixed;right:1rem;top:1rem;z-index:9;padding:.4rem .8rem;border-radius:.5rem;font:14px'
    ' system-ui,sans-serif;color:#222;background:#fffc;pointer-events:none">{}</div>'
)


def html_replay(player: Player, steps: Iterable[int], needed_by: str) -> str:
    """Plays the first env of a player; the camera goes with its robot.

    Args:
        player: Run at the beginning of an episode.
        steps: Control steps to take, counted from 0.
        needed_by: Command of the user's, named if the extra is missing.

    Returns:
        The page, which loads nothing from anywhere; it is light or dark as the browser is.

    Raises:
        ConfigError: The extra is missing, or the envs are another library's.
    """
    viser, mjviser = (import_extra(name, "view", needed_by) for name in ("viser", "mjviser"))
    if not isinstance(player.env, VecEnv):
        raise ConfigError(f"{needed_by}: {player.name} is an env of another library, which has no scene. Try a video")
    sim, (every, fps) = player.env.sim, frame_rate(player.env.cfg.control_hz)
    model = copy.copy(sim.scene.model)  # the library writes to it
    camera, data = Camera(sim.scene, sim.qpos[:1].cpu().numpy()), mujoco.MjData(model)
    with redirect_stdout(io.StringIO()), ExitStack() as stack:  # it announces a server that nobody is to visit
        server = viser.ViserServer(host="127.0.0.1", port=0)  # 0 is a free one
        stack.callback(server.stop)
        position, _ = camera.pose(np.zeros(3))
        server.scene.set_up_direction("+z")
        server.initial_camera.position, server.initial_camera.look_at = position, np.zeros(3)
        server.initial_camera.fov = np.radians(FOVY_DEG)
        scene = mjviser.ViserMujocoScene(server, model, num_envs=1)
        scene.camera_tracking_enabled = False  # ours follows heights slowly: steps stay visible
        recording = server.get_scene_serializer()
        for step in steps:
            if step % every == 0:
                data.qpos[:] = sim.qpos[0].cpu().numpy()
                mujoco.mj_kinematics(model, data)
                target = camera.follow(0, data.xpos[camera.body])
                scene.update_from_arrays(data.xpos[None] - target, data.xmat.reshape(1, -1, 3, 3))
                scene.fixed_bodies_frame.position = -target
                recording.insert_sleep(1.0 / fps)
            player.step()
        page = recording.as_html()
    title = html.escape(", ".join(words_of(player)))
    page = page.replace("<title>Viser</title>", f"<title>{title}</title>", 1)
    page = page.replace("{darkMode:false}", '{darkMode:matchMedia("(prefers-color-scheme: dark)").matches}', 1)
    return page.replace("<body>", f"<body>{CAPTION.format(title)}", 1)
