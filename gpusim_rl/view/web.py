"""Browser viewer of envs, with commands, policy images, reward terms, metrics and checkpoints.

The main thread owns simulation and policy; the page queues callbacks, which `WebViewer.run` calls between steps.
"""

from __future__ import annotations

import contextlib
import errno
import html
import io
import os
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

from gpusim_rl.env import VecEnv
from gpusim_rl.env.command import steerable
from gpusim_rl.env.encoded_env import EncodedEnv
from gpusim_rl.errors import ConfigError, first_line, say, warn
from gpusim_rl.view import looks
from gpusim_rl.view.player import Player
from gpusim_rl.view.video import newest
from gpusim_rl.view.web_guard import guarded_server, is_possible
from gpusim_rl.view.web_numbers import LOSS, PAD, Numbers, bars, table
from gpusim_rl.view.web_scene import WebScene

LOCALHOST = "127.0.0.1"
PORT, PORTS = 8080, 100  # first port, number of ports to try
DISTANCE = 1.3  # camera distance relative to a video's, to leave room for panels and other robots
FRAME_S = 1 / 30  # time between scene updates [s]
SPEEDS = {"0.1 x": 0.1, "0.25 x": 0.25, "0.5 x": 0.5, "real time": 1.0, "2 x": 2.0, "4 x": 4.0}
IMAGE_SIDE = 300  # about the panel's width [pixels]
TOUCHES = 1000  # maximum number of queued control changes
BUTTONS = {False: ("pause", "step", "reset"), True: ("run", "step", "reset")}  # keyed by `paused`


def view_in_browser(
    player: Player, *, host: str = LOCALHOST, port: int | None = None, steps: int | None = None
) -> None:
    """Print the viewer's address and serve it until Ctrl-C or the last control step.

    A `host` other than localhost lets others connect without a password. `port` None means the first free port from
    8080; `steps` None means no limit, and a pause while nobody watches. Raise ConfigError if viser is missing, the
    envs cannot be shown, or the port cannot be used.
    """
    with contextlib.closing(WebViewer(player, host=host, port=port)) as viewer:
        say(f"viewing {player.name} at {viewer.address} (Ctrl-C to stop)", *viewer.hints)
        sys.stdout.flush()  # a pipe would buffer it
        if host not in (LOCALHOST, "localhost", "::1"):
            warn(f"anyone who can reach {host} on port {viewer.port} can watch and steer: there is no password")
        with contextlib.suppress(KeyboardInterrupt):
            viewer.run(steps)


class WebViewer:
    """Web server with a scene and a control panel for a player."""

    def __init__(self, player: Player, *, host: str = LOCALHOST, port: int | None = None) -> None:
        if not isinstance(player.env, VecEnv):
            hint = "Try --viewer native with a display, --viewer none, or gpusim-rl record for a video"
            raise ConfigError("envs of another library cannot be shown in a browser", key=player.name, hint=hint)
        self._player, self._vec_env = player, player.env
        self.commands = steerable(player.env.task)  # None for a task without commands
        self.env = 0  # followed env
        self.held: list[float] | None = None  # the followed env's commands while held
        self.paused = False
        self.speed = 1.0  # requested simulated seconds per second
        self.queue: SimpleQueue[Callable[[], None]] = SimpleQueue()  # calls to make between steps
        self._steps, self._steps_to_take = 0, 0  # steps taken, and steps to take while paused
        self._shown_s, self._steps_shown = 0.0, 0  # time and steps of the displayed numbers
        self.hints = looks.hints(player.env.sim.scene)
        self._numbers = Numbers(player.env)
        self._server = guarded_server(host, _free_port(host, port), "a viewer in the browser")
        self.port = self._server.get_port()
        self.address = f"http://{f'[{host}]' if ':' in host else host}:{self.port}"
        self._scene = WebScene(self._server, player.env.sim, DISTANCE)
        self._panel()
        self._scene.draw()

    def run(self, steps: int | None = None) -> None:
        """Step the envs at the speed set on the page."""
        dt = self._vec_env.task.dt
        every_s = {self._scene.draw: FRAME_S, self.show_images: 0.1, self.show: 0.2, self.look_for_checkpoints: 1.0}
        due, refreshed_s = time.perf_counter(), dict.fromkeys(every_s, 0.0)
        end = None if steps is None else self._steps + steps
        while end is None or self._steps < end:
            self.drain()
            watched = steps is not None or bool(self._server.get_clients())
            go = watched and (not self.paused or self._steps_to_take > 0)
            if go:
                self.step()
                self._steps_to_take = max(0, self._steps_to_take - 1)
            now = time.perf_counter()
            for act, interval_s in every_s.items() if watched else ():
                if now - refreshed_s[act] >= interval_s:
                    act()
                    refreshed_s[act] = now
            # On a slow machine, fall behind without catching up later.
            now = time.perf_counter()
            due = max(due + (dt / self.speed if go else FRAME_S), now)
            time.sleep(due - now)

    def drain(self) -> None:
        """Call the callbacks that the page has queued."""
        while not self.queue.empty():  # the only consumer
            self.queue.get_nowait()()

    def step(self) -> None:
        """Take one control step in all envs, then apply the held commands."""
        step = self._player.step()
        self._steps += 1
        self._numbers.add(step, self.env)
        self._obey()

    def _obey(self) -> None:
        if self.commands is None or self.held is None:
            return
        value = torch.tensor(self.held, device=self._vec_env.device)
        followed = torch.arange(self._vec_env.num_envs, device=self._vec_env.device) == self.env
        self.commands.hold(followed, value)
        assert isinstance(self._player.observed, VecEnv | EncodedEnv)
        self._player.obs = self._player.observed.look()

    def close(self) -> None:
        """Stop the server."""
        with contextlib.redirect_stdout(io.StringIO()):
            self._server.stop()

    def follow(self, env: int) -> None:
        """Follow another env; held commands then apply to it."""
        self.env = min(max(int(env), 0), self._vec_env.num_envs - 1)
        self._numbers.forget()
        self._scene.look_at(self.env)

    def steer(self, index: int, value: float) -> None:
        """Set one command of the followed env and hold all of them."""
        assert self.commands is not None
        if self.held is None:
            self.held = self.commands.value[self.env].tolist()
        self.held[index] = value
        self._sliders[index].value, self._hold_box.value = value, True
        self._obey()

    def hold(self, on: bool) -> None:
        """Hold the current commands, or hand them back to the task."""
        self.held = self.commands.value[self.env].tolist() if on and self.commands is not None else None

    def stand(self) -> None:
        """Set all commands to zero."""
        for index in range(len(self._sliders)):
            self.steer(index, 0.0)

    def restart(self) -> None:
        """Begin new episodes."""
        self._player.restart()
        self._numbers = Numbers(self._vec_env)
        self._obey()

    def take(self, name: str) -> None:
        """Load the policy of another checkpoint of the run."""
        assert self._player.checkpoint is not None
        file = self._player.checkpoint.with_name(name)
        self._try(lambda: self._player.take(file))

    def look_for_checkpoints(self) -> None:
        """Load a newer checkpoint and refresh the list."""
        if self._player.checkpoint is None:
            return
        self._try(self._player.follow)
        names = _checkpoints(self._player.checkpoint)
        if tuple(names) != tuple(self._checkpoint.options):
            self._checkpoint.options = names
        self._checkpoint.value = self._player.checkpoint.name
        self._iteration.content = f"<div style='{PAD}'>iteration {self._player.iteration}</div>"

    def _try(self, act: Callable[[], object]) -> None:
        """Call `act` (returns False if nothing is new); on a damaged file, keep the policy and show the error."""
        try:
            if act() is not False:
                self._problem.content = ""
        except (ConfigError, OSError) as error:
            self._problem.content = f"<div style='{PAD}color:{LOSS}'>{html.escape(first_line(error))}</div>"

    def _panel(self) -> None:
        gui, num_envs = self._server.gui, self._vec_env.num_envs
        gui.set_panel_label(self._player.name)
        gui.configure_theme(show_share_button=False, show_logo=False)
        self._buttons = self._on(gui.add_button_group("Time", BUTTONS[False]), self._press)
        speed = gui.add_dropdown("Speed", list(SPEEDS), initial_value="real time")
        self._on(speed, lambda name: setattr(self, "speed", SPEEDS[name]))
        if num_envs > 1:
            self._on(gui.add_slider("Env", 0, num_envs - 1, 1, 0, hint="followed env"), self.follow)
        self._on(gui.add_checkbox("Camera follows", True), lambda on: setattr(self._scene, "following", on))
        if num_envs > 1:
            self._on(gui.add_checkbox("Hide others", False), partial(self._scene.show, "show_only_selected"))
        self._sliders: list[Any] = []
        if self.commands is not None and (controls := self.commands.controls()):
            with gui.add_folder("Command"):
                self._hold_box = gui.add_checkbox("Hold", False, hint="the followed robot obeys the sliders")
                self._on(self._hold_box, self.hold)
                for index, name in enumerate(controls):
                    slider = gui.add_slider(name, 0.0, 0.01, 0.01, 0.0)  # `show` sets the range
                    self._sliders.append(self._on(slider, lambda value, index=index: self.steer(index, value)))
                self._on(gui.add_button("Stand still"), lambda _: self.stand())
        self._images: dict[str, Any] = {}  # handles of the newest image of each group
        if groups := self._player.images if self._player.env.images else {}:
            with gui.add_folder("Camera"):
                for name in groups:
                    label = name if len(groups) > 1 else None
                    self._images[name] = gui.add_image(self._seen(name), label=label, format="png")
        with gui.add_folder("Reward per step"):
            self._rewards = gui.add_html("")
        with gui.add_folder("Numbers"):
            self._table = gui.add_html("")
        if self._player.checkpoint is not None:
            with gui.add_folder("Policy"):
                acts = gui.add_dropdown("Actions", ["trained", "zero", "random"], initial_value=self._player.act)
                self._on(acts, lambda name: setattr(self._player, "act", name))
                names = _checkpoints(self._player.checkpoint)
                self._checkpoint = gui.add_dropdown("Checkpoint", names, initial_value=self._player.checkpoint.name)
                self._on(self._checkpoint, self.take)
                self._iteration = gui.add_html("")
                self._problem = gui.add_html("")
        with gui.add_folder("Show"):
            for label, flag in (("Contact points", "show_contact_points"), ("Contact forces", "show_contact_forces")):
                self._on(gui.add_checkbox(label, False), partial(self._scene.show, flag))
        self.show()

    def _on(self, handle: Any, act: Callable[[Any], None]) -> Any:
        """Queue `act` with the value of a control whenever the page changes it; return the control."""

        async def touched(event: Any) -> None:  # in the server's thread
            value = event.target.value
            # Skip our own updates, which have no client, and floods.
            if event.client_id is not None and is_possible(event.target, value) and self.queue.qsize() < TOUCHES:
                self.queue.put(lambda: act(value))

        (handle.on_click if hasattr(handle, "on_click") else handle.on_update)(touched)
        return handle

    def _press(self, name: str) -> None:
        if name == "reset":
            self.restart()
        elif name == "step":
            self.paused, self._steps_to_take = True, self._steps_to_take + 1
        else:
            self.paused = not self.paused
        self._buttons.options = BUTTONS[self.paused]

    def show(self) -> None:
        """Update the displayed numbers and the command sliders."""
        self._rewards.content = bars(self._numbers.terms)
        now = time.perf_counter()
        pace = (self._steps - self._steps_shown) * self._vec_env.task.dt / (now - self._shown_s)
        self._shown_s, self._steps_shown = now, self._steps
        speed = ("speed", f"{pace:.2f} x real time" if pace else "–", "")
        self._table.content = table([speed, *self._numbers.rows(self._vec_env, self.env)])
        if self.commands is None or not self._sliders:
            return
        for slider, (low, high) in zip(self._sliders, self.commands.controls().values(), strict=True):
            slider.min, slider.max = round(min(low, 0.0), 2), max(round(high, 2), 0.01)  # includes 0, to stand still
        if self.held is None:
            for slider, value in zip(self._sliders, self.commands.value[self.env].tolist(), strict=True):
                slider.value = round(min(max(value, slider.min), slider.max), 2)

    def show_images(self) -> None:
        """Send changed policy images of the followed env."""
        for name, handle in self._images.items():
            if not np.array_equal(picture := self._seen(name), handle.image):
                handle.image = picture

    def _seen(self, group: str) -> np.ndarray:
        """Return an image upscaled by whole pixels, since the browser would blur it."""
        image = newest(self._player.images[group][self.env, None])[0]
        times = max(1, IMAGE_SIDE // max(image.shape[:2]))
        return image.repeat(times, axis=0).repeat(times, axis=1)


def _checkpoints(current: Path) -> list[str]:
    files = {path.name for path in current.parent.glob("*.pt")} | {current.name}
    named = [name for name in ("last.pt", "best.pt") if name in files]
    return named + sorted(files - {*named}, reverse=True)


def _free_port(host: str, port: int | None) -> int:
    """Return a free port; viser would wait forever for a port in use."""
    if port is not None and not 0 <= port < 2**16:
        raise ConfigError(key="--port", expected=f"0 (any free port) to {2**16 - 1}", got=port)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for number in range(PORT, PORT + PORTS) if port is None else [port]:
        try:
            with socket.create_server((host, number), family=family) as free:
                return free.getsockname()[1]
        except OSError as error:
            problem = first_line(error) if error.errno is None or error.errno < 0 else os.strerror(error.errno)
            if port is None and error.errno == errno.EADDRINUSE:
                continue
            hint = "Try another --port or --host"
            raise ConfigError(f"cannot serve on {host}, port {number}: {problem}", hint=hint) from None
    raise ConfigError(f"cannot serve on {host}: ports {PORT} to {PORT + PORTS - 1} are in use", hint="Try --port 0")
