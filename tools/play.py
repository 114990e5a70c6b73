"""Watch a run in a window or in a browser.

gpusim-rl play Ant                                       the latest Ant run, even while it trains
gpusim-rl play Ant --viewer web --port 8090              in a browser, with controls
gpusim-rl play runs/Go1Velocity/latest/export            an export folder, in plain MuJoCo
gpusim-rl play --replay runs/Ant/latest/diverged.pt      how the first env diverged
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    import _checkout  # noqa: F401

import argparse
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpusim_rl.deployed import open_shown
from gpusim_rl.errors import ConfigError, friendly_errors, import_extra, say
from gpusim_rl.export.of_run import is_export
from gpusim_rl.files.paths import find_checkpoint
from gpusim_rl.machine.hardware import import_torch
from gpusim_rl.options import Parser

if TYPE_CHECKING:
    import mujoco

    from gpusim_rl.view.player import Player
    from gpusim_rl.view.replay_dump import DumpReplay

FOLLOW_INTERVAL_S = 1.0
CLOSE_TIMEOUT_S = 10.0
HEADLESS_ENVS, WEB_ENVS = 16, 9


def main(argv: list[str] | None = None, name: str = "play") -> int:
    with friendly_errors():
        play(parse(argv, name))
    return 0


def parse(argv: list[str] | None, name: str = "play") -> argparse.Namespace:
    parser = Parser(name, __doc__)
    parser.option("run", "or an export folder", nargs="?")
    parser.option("--replay", "diverged.pt or skipped.pt of a run, instead of RUN", "Arguments", type=Path)
    words = "a window (native), a browser (web), or only the mean reward (none)"
    viewers = ["auto", "native", "web", "none"]
    parser.option("--viewer", words, "Viewer", "native with a display, else web", choices=viewers, default="auto")
    parser.options("--host", "--port", "--policy")
    parser.option("--num-envs", note=f"{WEB_ENVS} in a browser, {HEADLESS_ENVS} with --viewer none, else 1")
    parser.option("--steps", note="no limit; 1000 with --viewer none")
    parser.option("--sim", note="mujoco; newton for a run trained on it")
    parser.options("--trust", "--config-dir")
    args = parser.parse_args(argv)
    if (args.run is None) == (args.replay is None):
        parser.error("expected a run or --replay FILE")
    if args.viewer == "auto":
        args.viewer = "native" if has_display() or args.replay is not None else "web"
    if args.viewer != "web" and not (args.host is None and args.port is None):
        parser.error("--host and --port need --viewer web")
    if args.viewer == "web" and args.replay is not None:
        parser.error("a browser cannot show --replay; try --viewer none")
    return args


def play(args: argparse.Namespace) -> None:
    """Show the run in a window or a browser, or step it without a viewer."""
    if args.viewer != "none" and args.run is not None and args.policy == "trained" and not is_export(args.run):
        find_checkpoint(args.run)  # report a missing run first
    if args.viewer == "native" and not has_display():
        others = "none" if args.run is None else "web or none, or gpusim-rl record for a video"
        raise ConfigError("no display: DISPLAY and WAYLAND_DISPLAY are not set", hint=f"Try --viewer {others}")
    if args.replay is not None:
        replay(args)
        return
    if args.viewer == "web":
        for name in ("viser", "mjviser"):
            import_extra(name, "view", "a viewer in the browser")
    num_envs = args.num_envs or {"none": HEADLESS_ENVS, "web": WEB_ENVS}.get(args.viewer, 1)
    render_mode = "human" if args.viewer == "native" else None
    with closing(open_shown(args, num_envs=num_envs, render_mode=render_mode)) as player:
        if player.checkpoint is not None:
            say(f"{player.checkpoint}, iteration {player.iteration}")
        if args.viewer == "none":
            measure(player, 1000 if args.steps is None else args.steps)
        elif args.viewer == "web":
            from gpusim_rl.view.web import LOCALHOST, view_in_browser

            view_in_browser(player, host=args.host or LOCALHOST, port=args.port, steps=args.steps)
        else:
            watch(player, args.steps)


def replay(args: argparse.Namespace) -> None:
    """Replay a dump in a window, or print a line per step with `--viewer none`."""
    import_torch()
    from gpusim_rl.view.replay_dump import DumpReplay

    with closing(DumpReplay.open(args.replay, args.sim, trust=args.trust, config_dir=args.config_dir)) as dump:
        say(dump.title)
        if args.viewer == "none":
            for line in iter(dump.step, None):
                say(line)
        else:
            watch(dump, args.steps)


def has_display() -> bool:
    """Return whether a window can be opened."""
    if not sys.platform.startswith("linux"):
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def measure(player: Player, steps: int) -> None:
    """Step without a window and print the mean reward."""
    mean = sum(float(player.step().reward.mean()) for _ in range(steps)) / steps
    say(f"{player.name}: mean reward {mean:.4g} per step ({steps} steps in {player.env.num_envs} envs)")


def watch(player: Player | DumpReplay, steps: int | None) -> None:
    """Show the first env in real time; the space bar pauses."""
    import mujoco

    from gpusim_rl.env import VecEnv
    from gpusim_rl.sim.interface import put_pose
    from gpusim_rl.view import looks
    from gpusim_rl.view.player import Player
    from gpusim_rl.view.renderer import Camera, picture_model

    env, follow = player.env, follower(player) if isinstance(player, Player) else lambda: None
    if not isinstance(env, VecEnv):  # envs of another library open their own window
        for _ in count() if steps is None else range(steps):
            player.step()
            follow()
        return
    sim = env.sim
    camera = Camera(sim.scene, sim.poses.cpu().numpy())
    model = picture_model(sim.scene, camera)
    data = mujoco.MjData(model)
    say(*looks.hints(sim.scene))
    dt = 1.0 / env.cfg.control_hz
    paused = False

    def pressed(key: int) -> None:
        nonlocal paused
        if key == ord(" "):
            paused = not paused

    with window(model, data, pressed) as viewer:
        viewer.cam.type = mujoco.mjtCamera.mjCAMERA_TRACKING.value
        viewer.cam.trackbodyid = camera.body
        viewer.cam.distance = camera.distance
        viewer.cam.azimuth, viewer.cam.elevation = camera.azimuth_deg, camera.elevation_deg
        done, due = 0, time.perf_counter()
        while viewer.is_running() and (steps is None or done < steps):
            if not paused:
                step = player.step()
                done += 1
                if isinstance(step, str):  # from a replay
                    say(step)
                pose = sim.poses[0]
                if pose.isfinite().all():
                    with viewer.lock():
                        put_pose(model, data, pose.cpu().numpy())
                        mujoco.mj_forward(model, data)
            viewer.sync()
            follow()
            now = time.perf_counter()
            # On a slow machine, fall behind without catching up later.
            due = max(due + dt, now)
            time.sleep(due - now)


def follower(player: Player) -> Callable[[], None]:
    """Return a function that periodically looks for a newer checkpoint and reports it."""
    checked_s = time.perf_counter()

    def follow() -> None:
        nonlocal checked_s
        if time.perf_counter() - checked_s > FOLLOW_INTERVAL_S:
            checked_s = time.perf_counter()
            if player.follow():
                say(f"{player.checkpoint}, iteration {player.iteration}")

    return follow


@contextmanager
def window(model: mujoco.MjModel, data: mujoco.MjData, pressed: Callable[[int], None]) -> Iterator[Any]:
    """Open MuJoCo's viewer, which renders in its own thread."""
    import glfw
    import mujoco.viewer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not glfw.init():  # the viewer's thread would die, and we would wait forever
            problem = f"cannot open a window on display {os.environ.get('DISPLAY')!r}"
            raise ConfigError(problem, hint="Try gpusim-rl record")
    before = set(threading.enumerate())
    try:
        panels = {"show_left_ui": False, "show_right_ui": False}
        viewer = mujoco.viewer.launch_passive(model, data, key_callback=pressed, **panels)
    except RuntimeError as error:  # macOS: windows belong to the main thread
        hint = "Try mjpython -m gpusim_rl play on macOS"
        raise ConfigError(f"cannot open the viewer: {error}", hint=hint) from None
    with viewer:
        yield viewer
    # The thread may still be drawing into the window.
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=CLOSE_TIMEOUT_S)


if __name__ == "__main__":
    sys.exit(main())
