"""Self-contained HTML page with a 3D replay and a timeline."""

from __future__ import annotations

import html
import io
from collections.abc import Iterable
from contextlib import ExitStack, redirect_stdout

from gpusim_rl.env import VecEnv
from gpusim_rl.errors import ConfigError
from gpusim_rl.view.player import Player
from gpusim_rl.view.video import caption_words, frame_rate
from gpusim_rl.view.web_guard import check_installed, guarded_server
from gpusim_rl.view.web_scene import WebScene

CAPTION = (
    '<div style="position:fixed;right:1rem;top:1rem;z-index:9;padding:.4rem .8rem;border-radius:.5rem;font:14px'
    ' system-ui,sans-serif;color:#222;background:#fffc;pointer-events:none">{}</div>'
)


def html_replay(player: Player, steps: Iterable[int], needed_by: str) -> str:
    """Play control steps and return an offline page; raise ConfigError for envs of another library."""
    check_installed(needed_by)
    if not isinstance(player.env, VecEnv):
        problem = f"{player.name} is an env of another library, without a scene"
        raise ConfigError(problem, key=needed_by, hint="Try a video")
    every, fps = frame_rate(player.env.cfg.control_hz)
    with redirect_stdout(io.StringIO()), ExitStack() as stack:  # viser announces the end
        server = guarded_server(None, 0)
        stack.callback(server.stop)
        scene, recording = WebScene(server, player.env.sim), server.get_scene_serializer()
        for step in steps:
            if step % every == 0:
                scene.draw()
                recording.insert_sleep(1.0 / fps)
            player.step()
        page = recording.as_html()
    title = html.escape(", ".join(caption_words(player)))
    page = page.replace("<title>Viser</title>", f"<title>{title}</title>", 1)
    page = page.replace("{darkMode:false}", '{darkMode:matchMedia("(prefers-color-scheme: dark)").matches}', 1)
    return page.replace("<body>", f"<body>{CAPTION.format(title)}", 1)
