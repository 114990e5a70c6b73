"""Browser viewer: served pages, security, controls, scene, and a real browser."""

from __future__ import annotations

import contextlib
import functools
import http.server
import importlib
import io
import os
import re
import shutil
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import mujoco
import numpy as np
import pytest
import torch

from gpusim_rl.api import load_spec
from gpusim_rl.env import Commands
from gpusim_rl.errors import ConfigError
from gpusim_rl.files import checkpoint_file
from gpusim_rl.settings.compose import compose
from gpusim_rl.view.player import Player, whole_episodes
from helpers.raised import raises

pytest_plugins = ["helpers.tool_runs"]

NO_DISPLAY = {"DISPLAY": "", "WAYLAND_DISPLAY": ""}
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@contextmanager
def open_viewer(task: str, num_envs: int = 2, act: str = "zero", settings: Sequence[str] = ()) -> Iterator[Any]:
    """Open a viewer of a task without a trained policy."""
    pytest.importorskip("viser")
    pytest.importorskip("mjviser")
    from gpusim_rl.view.web import WebViewer

    spec = load_spec(compose([f"task={task}", *settings]), [])
    player = Player(whole_episodes(spec, "mujoco", num_envs, seed=0), seed=0, act=act)
    with closing(player), closing(WebViewer(player)) as viewer:
        yield viewer


def test_viewer_listens_on_localhost_only():
    with open_viewer("Cartpole") as viewer:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+", viewer.address)
        with urllib.request.urlopen(viewer.address, timeout=10) as answer:
            assert answer.status == 200 and b"<html" in answer.read().lower()
        with pytest.raises(ConnectionRefusedError):  # other loopback addresses are not served
            socket.create_connection(("127.0.0.2", viewer.port), timeout=5)
        assert viewer._server.request_share_url() is None, "pages can open a tunnel"
    with pytest.raises(OSError):
        urllib.request.urlopen(viewer.address, timeout=2)


def test_busy_port_is_rejected_and_busy_default_moves_on(monkeypatch):
    pytest.importorskip("viser")
    from gpusim_rl.view import web

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127.0.0.1, port {port}: Address"):
            web._free_port("127.0.0.1", port)
        monkeypatch.setattr(web, "PORT", port)
        assert port < web._free_port("127.0.0.1", None) < port + web.PORTS
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1, port 8080"):
        web._free_port("192.0.2.1", 8080)
    with raises(ConfigError, key="--port", got=99999):
        web._free_port("127.0.0.1", 99999)


@pytest.mark.parametrize("host, warned", [("127.0.0.1", False), ("0.0.0.0", True)])
def test_public_host_warns_about_missing_password(run, capsys, host, warned):
    pytest.importorskip("viser")
    from gpusim_rl.view.web import view_in_browser

    with closing(Player.open(str(run), num_envs=2)) as player:
        view_in_browser(player, host=host, port=0, steps=3)
    out, err = capsys.readouterr()
    assert re.fullmatch(rf".*Cartpole .* http://{re.escape(host)}:\d+ .*\n", out)
    assert ("no password" in err) == warned


def test_play_without_display_uses_the_browser(tool_here):
    pytest.importorskip("viser")
    done = tool_here("play", "Cartpole", "--steps", "5", "--num-envs", "2", env=NO_DISPLAY)
    first, second = done.stdout.splitlines()
    assert "checkpoints/last.pt, iteration 6" in first
    assert "Cartpole " in second and " http://127.0.0.1:" in second
    assert done.stderr == ""


def test_missing_viewer_library_names_the_extra(run, load_tool, monkeypatch, capsys):
    for name in [name for name in sys.modules if name.split(".")[0] in ("viser", "mjviser")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    for key, value in NO_DISPLAY.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(SystemExit) as end:
        load_tool("play").main([str(run)])
    assert end.value.code == 2
    assert "viser is missing. Try pip install 'gpusim-rl[view]'\n" in capsys.readouterr().err


class Missing:
    """Import finder that reports the viewer's libraries as missing."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.split(".")[0] in ("viser", "mjviser"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_viewer_rejects_third_party_envs():
    pytest.importorskip("viser")
    from gpusim_rl.view.web import WebViewer

    class ThirdPartyPlayer:
        name, env = "ThirdParty", object()

    with raises(ConfigError, key="ThirdParty"):
        WebViewer(ThirdPartyPlayer())


def connect(viewer: Any, host: str | None = None, origin: str | None = None, path: str = "", **options: Any) -> Any:
    """Open a websocket like viser's page, from a page of the given origin."""
    client = pytest.importorskip("websockets.sync.client")
    viser = pytest.importorskip("viser")
    with socket.create_connection(("127.0.0.1", viewer.port)) as opened:
        sock = opened.dup()
    return client.connect(
        f"ws://{host or f'127.0.0.1:{viewer.port}'}{path}",
        sock=sock,
        origin=origin,
        subprotocols=[f"viser-v{viser.__version__}"],
        compression=None,
        max_size=None,
        **options,
    )


def test_pages_of_other_origins_are_rejected():
    exceptions = pytest.importorskip("websockets.exceptions")
    with open_viewer("Cartpole") as viewer:
        port = viewer.port
        own = [f"127.0.0.1:{port}", f"localhost:{port}", f"LocalHost:{port}"]
        for host in own:
            for origin in (None, f"http://{host.lower()}"):
                with connect(viewer, host.lower(), origin):
                    pass
        foreign = [
            (own[0], "http://evil.com"),
            (own[0], f"https://127.0.0.1:{port}"),
            (own[0], f"http://localhost:{port}"),  # same machine, but another origin
            (own[0], f"http://127.0.0.1:{port}.evil.com"),
            (f"evil.com:{port}", f"http://evil.com:{port}"),  # DNS rebinding
            (f"[::2]:{port}", None),  # other hosts without an origin: `test_host_header_must_name_this_server`
        ]
        for host, origin in foreign:
            with pytest.raises(exceptions.InvalidStatus) as refused, connect(viewer, host, origin):
                pass
            assert refused.value.response.status_code == 403, (host, origin)
        with pytest.raises(exceptions.InvalidStatus), connect(viewer, path="/?websocket=ws://evil.com"):
            pass


REQUESTS = [
    (["GET / HTTP/1.1", "Host: localhost:PORT"], 200),
    (["GET / HTTP/1.1", "Host: 127.0.0.1:PORT", "Origin: http://127.0.0.1:PORT"], 200),
    (["GET / HTTP/1.1", "Host: evil.com:PORT"], 403),
    (["GET / HTTP/1.1", "Host: localhost:PORT", "Origin: http://evil.com"], 403),
    (["GET / HTTP/1.1", "Host: localhost:PORT", "Host: evil.com"], 403),
    (["GET / HTTP/1.1"], 403),
    (["GET /?websocket=ws://evil.com HTTP/1.1", "Host: localhost:PORT"], 403),
    (["GET /?playbackPath=http://evil.com/x HTTP/1.1", "Host: localhost:PORT"], 403),
    (["GET /%2e%2e/%2e%2e/etc/passwd HTTP/1.1", "Host: localhost:PORT"], 404),
    (["POST / HTTP/1.1", "Host: localhost:PORT"], None),
    (["GET / HTTP/9.9", "Host: localhost:PORT"], None),
    ([chr(0xFF) * 100], None),
    (["GET / HTTP/1.1", "x" * 100_000], None),
    (["GET / HTTP/1.1", "Host: localhost:PORT", *["A: b"] * 300], None),
]


def test_raw_requests_are_served_or_rejected_silently(capfd, caplog):
    with open_viewer("Cartpole") as viewer:
        for lines, status in REQUESTS:
            with socket.create_connection(("127.0.0.1", viewer.port), timeout=10) as client:
                with contextlib.suppress(OSError):
                    client.sendall("\r\n".join([*lines, "", ""]).replace("PORT", str(viewer.port)).encode("latin-1"))
                head = b""
                with contextlib.suppress(OSError):
                    while b"\r\n\r\n" not in head and (part := client.recv(4096)):
                        head += part
            got = int(head.split()[1]) if head.startswith(b"HTTP") else None
            assert got == status or (status is None and got in (None, 400, 405, 500)), lines
            assert status != 200 or b"X-Frame-Options" in head
        with urllib.request.urlopen(viewer.address, timeout=10) as answer:
            assert answer.status == 200
    assert capfd.readouterr() == ("", "") and not caplog.records


def test_invalid_messages_are_dropped_silently(capfd, caplog, recwarn):
    msgpack = pytest.importorskip("msgspec.msgpack")
    with open_viewer("Anymal", num_envs=3) as viewer:
        gui = viewer._server.gui
        controls = {handle.label: handle._impl.uuid for handle in gui._gui_input_handle_from_uuid.values()}
        slider = viewer._sliders[0]

        def update(label: str, value: Any, **more: Any) -> dict[str, Any]:
            return {"type": "GuiUpdateMessage", "uuid": controls[label], "updates": {"value": value, **more}}

        camera = {"type": "ViewerCameraMessage", "wxyz": [1.0, 0, 0, 0], "fov": 1.0, "near": 0.1, "far": 10}
        camera |= {name: [0.0, 0.0, 1.0] for name in ("position", "look_at", "up_direction")}
        camera |= {"image_height": 100, "image_width": 100.0}
        wrong = [
            *(update("Speed", value) for value in (True, 1, "3 x", None, ["real time"], {"a": 1}, "x" * 10_000)),
            *(update("Env", value) for value in (-1, 3, 1.5, "1", True, float("nan"), float("inf"), 1 << 62, [1])),
            *(update(slider.label, value) for value in (1e9, -1e9, "0", False, None, float("nan"))),
            *(update("Camera follows", value) for value in (0, 1, "true", None, [])),
            *(update("Time", value) for value in ("end", 0, ["pause"])),
            update("Env", 1, min=-5),
            {**update("Env", 1), "updates": {"uuid": "x"}},
            {**update("Env", 1), "updates": {"update_cb": []}},
            {**update("Env", 1), "updates": {}},
            {**update("Env", 1), "updates": [1]},
            {**update("Env", 1), "uuid": ["x"]},
            {**update("Env", 1), "uuid": "none"},
            {**update("Env", 1), "more": 1},
            {"type": "ShareUrlRequest"},
            {"type": "ShareUrlDisconnect"},
            {"type": "RunJavascriptMessage", "source": "alert()"},
            {"type": "FileTransferStartUpload", "source_component_uuid": controls["Env"], "transfer_uuid": "x"}
            | {"filename": "x", "mime_type": "x", "part_count": 1 << 40, "size_bytes": 1 << 40},
            {"type": "Nothing"},
            {"type": 5},
            {},
            [],
            5,
            {**camera, "wxyz": [1.0, 0.0]},
            {**camera, "wxyz": "abcd"},
            {**camera, "fov": "x"},
            {**camera, "fov": float("inf")},
            {**camera, "more": 1},
            {"type": "ViewerCameraMessage"},
        ]
        raw = [b"", b"\xc1", b"\x91" * 20_000, os.urandom(1000), "text", "", b"\xdf\xff\xff\xff\xff"]
        before = [(handle, handle._impl.value) for handle in gui._gui_input_handle_from_uuid.values()]
        with connect(viewer, origin=viewer.address) as page:
            page.send(msgpack.encode(camera))
            for content in (*map(msgpack.encode, wrong), *raw):
                page.send(content)
            assert wait_for(lambda: viewer._server.get_clients())
            page.send(msgpack.encode(update("Env", 2)))
            assert wait_for(lambda: viewer.queue.qsize() == 1)
            viewer.drain()
            assert viewer.env == 2
            page.send(msgpack.encode(update(slider.label, slider.max)))
            page.send(msgpack.encode(update("Time", "pause")))
            page.send(msgpack.encode(update("Camera follows", False)))
            assert wait_for(lambda: viewer.queue.qsize() == 3)
            viewer.drain()
            assert viewer.held is not None and viewer.paused and not viewer._scene.following
        changed = {handle.label for handle, value in before if handle._impl.value != value}
        assert changed <= {"Env", "Time", "Camera follows", "Hold", *(each.label for each in viewer._sliders)}
        for frame in (b"\x8f\x80abcd", b"\x82\xff" + b"\xff" * 12, b"\x00" * 10, b"\x81\x84abcd\xff\xff\xff\xff"):
            page = connect(viewer)
            page.socket.sendall(frame)
            page.socket.close()
        with connect(viewer) as page, contextlib.suppress(Exception):
            page.send(bytes(1 << 20))
            page.recv(timeout=10)
        with urllib.request.urlopen(viewer.address, timeout=10) as answer:
            assert answer.status == 200
    assert capfd.readouterr() == ("", "") and not caplog.records and not recwarn.list


def wait_for(condition: Callable[[], Any], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not condition():
        time.sleep(0.02)
    return bool(condition())


def test_page_of_another_viser_version_is_closed_silently(capfd):
    client = pytest.importorskip("websockets.sync.client")
    closed = pytest.importorskip("websockets.exceptions").ConnectionClosedError
    with open_viewer("Cartpole") as viewer:
        page = client.connect(f"ws://127.0.0.1:{viewer.port}", subprotocols=["viser-v0.0.0"])
        with page, pytest.raises(closed):
            page.recv(timeout=10)
        assert capfd.readouterr() == ("", "")


def test_only_open_pages_count_for_the_limit(monkeypatch):
    client = pytest.importorskip("websockets.sync.client")
    refused = pytest.importorskip("websockets.exceptions").InvalidStatus
    monkeypatch.setattr("gpusim_rl.view.web_guard.CLIENTS", 1)
    with open_viewer("Cartpole") as viewer:
        address, protocol = ("127.0.0.1", viewer.port), f"viser-v{importlib.import_module('viser').__version__}"
        connect = functools.partial(client.connect, f"ws://127.0.0.1:{viewer.port}", subprotocols=[protocol])
        with socket.create_connection(address), connect(), pytest.raises(refused, match="503"):
            connect()


@pytest.mark.parametrize(
    ("host", "header", "own"),
    [
        ("0.0.0.0", "10.1.2.3:8080", True),
        ("0.0.0.0", "localhost:8080", True),
        ("0.0.0.0", f"{socket.gethostname()}:8080", True),
        ("0.0.0.0", "evil.com:8080", False),
        ("0.0.0.0", "10.1.2.4:8080", False),
        ("robot.lab", "robot.lab:8080", True),
        ("robot.lab", "ROBOT.lab:8080", True),
        ("robot.lab", "robot.lab.evil.com:8080", False),
        ("127.0.0.1", f"{socket.gethostname()}:8080", False),
        ("127.0.0.1", "[::1]:8080", True),
        ("127.0.0.1", "[0:0:0:0:0:0:0:1]:8080", True),
        ("127.0.0.1", "localhost:8081", False),
        ("127.0.0.1", "localhost", False),
        ("127.0.0.1", "", False),
        ("127.0.0.1", "localhost:8080:8080", False),
        (None, "localhost:8080", False),
    ],
)
def test_host_header_must_name_this_server(host, header, own):
    from gpusim_rl.view.web_guard import Guard

    assert (Guard(host).problem(("10.1.2.3", 8080), [header], [], "/") == "") == own


def test_guard_without_viser_server_is_an_error(monkeypatch):
    monkeypatch.setattr(pytest.importorskip("viser"), "ViserServer", lambda **_: None)
    from gpusim_rl.view.web_guard import guarded_server

    with pytest.raises(ConfigError, match="viser"):
        guarded_server("127.0.0.1", 0, "")


def test_control_queue_is_limited(monkeypatch):
    pytest.importorskip("viser")
    from gpusim_rl.view import web

    monkeypatch.setattr(web, "TOUCHES", 5)
    with open_viewer("Cartpole") as viewer:
        for _ in range(20):
            touch(viewer._buttons, "step")
        assert viewer.queue.qsize() == 5


class Touch:
    """Event of a changed control, as viser passes it."""

    def __init__(self, handle: Any, value: Any) -> None:
        self.client_id = 0
        self.target = type("Target", (), {"value": value, **bounds(handle)})()


def bounds(handle: Any) -> dict[str, Any]:
    return {name: getattr(handle, name) for name in ("options", "min", "max") if hasattr(handle, name)}


def touch(handle: Any, value: Any) -> None:
    """Call a control's callbacks like the server does."""
    for callback in handle._impl.update_cb:
        with pytest.raises(StopIteration):
            callback(Touch(handle, value)).send(None)


@pytest.mark.parametrize("task", ["Go1Velocity", pytest.param("AnymalTerrain", marks=pytest.mark.slow)])
def test_slider_sets_the_command_of_the_task(task):
    with open_viewer(task, num_envs=3) as viewer:
        viewer.step()
        viewer.follow(1)
        before = viewer.commands.value.clone()
        touch(viewer._sliders[0], 0.25)
        assert torch.equal(viewer.commands.value, before), "changed from the server thread"
        viewer.drain()
        env, player = viewer._vec_env, viewer._player
        for _ in range(3):
            command = viewer.commands.value
            assert command[1].tolist() == pytest.approx([0.25, *before[1, 1:].tolist()])
            terms = env.obs_terms["policy"]
            place = next(n for n, part in enumerate(terms) if part.name == "command")
            column = sum(part.size * part.history for part in terms[:place])
            clean = sum(part.size for part in terms[:place])
            seen = float(player.obs["policy"][1, column])
            assert seen == float(env.clean_obs()["policy"][1, clean])
            if task != "AnymalTerrain":  # which zeroes slow commands
                assert seen == pytest.approx(0.25 * env.task.scales.get("command", 1.0))
            viewer.step()
        viewer.restart()
        assert float(viewer.commands.value[1, 0]) == pytest.approx(0.25), "reset by a new episode"
        viewer.stand()
        assert viewer.commands.value[1].tolist() == [slider.value for slider in viewer._sliders] == [0.0, 0.0, 0.0]
        viewer.hold(False)
        for _ in range(20):  # some commands are zero
            viewer.restart()
            if drawn := viewer.commands.value[1].any():
                break
        assert drawn


def test_held_command_keeps_images_and_random_stream():
    ages, random = {}, {}
    for held in (False, True):
        with open_viewer("Go1Velocity", settings=["task.vision=depth"]) as viewer:
            viewer.hold(held)
            ages[held] = [int(viewer.step() or viewer._vec_env.sim.camera("eye").age[0]) for _ in range(7)]
            random[held] = viewer._vec_env.task.random.state_dict()
    assert ages[True] == ages[False] and set(ages[True]) == {0, 1, 2, 3, 4}
    assert torch.equal(random[True]["key"], random[False]["key"])


def test_slider_range_follows_command_limits():
    with open_viewer("Go1Velocity") as viewer:
        limits = viewer.commands.limits
        limits[:, 0] = torch.tensor([-2.5, 3.5])  # widened by a curriculum
        viewer.steer(0, 3.0)
        viewer.show()
        assert (viewer._sliders[0].min, viewer._sliders[0].max) == (-2.5, 3.5) and viewer._sliders[0].value == 3.0
        touch(viewer._sliders[0], 3.25)
        viewer.drain()
        assert float(viewer.commands.value[0, 0]) == 3.25
        limits[:, 0] = torch.tensor([0.5, 0.5])
        viewer.hold(False)
        viewer.show()
        assert (viewer._sliders[0].min, viewer._sliders[0].max) == (0.0, 0.5)


def test_pause_step_and_reset_buttons():
    with open_viewer("Cartpole") as viewer:
        progress = viewer._vec_env.progress
        touch(viewer._buttons, "pause")
        viewer.drain()
        assert viewer.paused and viewer._buttons.options == ("run", "step", "reset")
        threading.Timer(0.3, lambda: [touch(viewer._buttons, "step") for _ in range(2)]).start()
        viewer.run(steps=2)  # paused: only requested steps are taken
        assert progress.tolist() == [2, 2] and viewer.paused
        touch(viewer._buttons, "reset")
        viewer.drain()
        assert progress.tolist() == [0, 0]


class Clock:
    """Clock that advances only during sleep."""

    now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.mark.parametrize("speed", [0.5, 4.0])
def test_playback_speed_does_not_catch_up_after_slow_steps(speed, monkeypatch):
    with open_viewer("Cartpole") as viewer:
        from gpusim_rl.view import web

        clock = Clock()
        monkeypatch.setattr(web, "time", clock)
        dt, step = viewer._vec_env.task.dt / speed, viewer.step
        viewer.speed = speed
        viewer.run(steps=30)
        assert clock.now_s == pytest.approx(30 * dt)
        took = iter([3.0 * dt] + [0.1 * dt] * 9)
        monkeypatch.setattr(viewer, "step", lambda: clock.sleep(next(took)) or step())
        viewer.run(steps=10)
        assert clock.now_s == pytest.approx((30 + 3 + 9) * dt)


def test_checkpoint_can_be_switched_and_reloads_when_newer(run):
    pytest.importorskip("viser")
    from gpusim_rl.view.web import WebViewer

    folder = run / "checkpoints"
    with closing(Player.open(str(run))) as player, closing(WebViewer(player)) as viewer:
        assert viewer._checkpoint.value == "last.pt" and "best.pt" in viewer._checkpoint.options
        state = checkpoint_file.load(folder / "last.pt")
        state["policy"]["head.mean.bias"] += 100.0
        checkpoint_file.save(folder / "000077.pt", {**state, "iteration": 77})
        viewer.look_for_checkpoints()
        assert set(viewer._checkpoint.options) >= {"last.pt", "best.pt", "000077.pt"}
        touch(viewer._checkpoint, "000077.pt")
        viewer.drain()
        assert player.iteration == 77 and player.checkpoint.resolve() == folder / "000077.pt"
        viewer.step()
        assert float(viewer._vec_env.task.actions.min()) == 1.0
        checkpoint_file.save(folder / "000077.pt", {**state, "iteration": 78})
        viewer.look_for_checkpoints()
        assert player.iteration == 78 and "78" in viewer._iteration.content
        (folder / "000077.pt").unlink()
        assert not player.follow()
        (folder / "last.pt").write_bytes(b"damaged")
        viewer.take("last.pt")
        assert player.iteration == 78 and "last.pt" in viewer._problem.content
        viewer.look_for_checkpoints()
        assert "last.pt" in viewer._problem.content, "message was cleared"
        touch(viewer._checkpoint, "../../other.pt")
        assert viewer.queue.empty()


def test_rewards_and_metrics_are_shown():
    with open_viewer("Go1Velocity", act="random") as viewer:
        for _ in range(5):
            viewer.step()
        viewer.show()
        for name in ("lin_vel", "sum"):
            assert f">{name}<" in viewer._rewards.content
        for name in ("lin_vel_error", "falls_per_minute", "return"):
            assert f">{name}<" in viewer._table.content


@pytest.mark.parametrize("image, channels", [("rgb", 3), ("depth", 1)])
def test_page_shows_the_images_of_the_policy(image, channels, monkeypatch):
    with open_viewer("CartpoleCamera", act="random", settings=[f"task.image={image}"]) as viewer:
        env, player = viewer._vec_env, viewer._player
        [handle] = viewer._images.values()

        def expected(env_id: int) -> np.ndarray:
            seen = player.obs["camera"][env_id].numpy()
            assert seen.shape == (36, 96, channels)
            return np.broadcast_to(seen, (36, 96, 3)).repeat(3, axis=0).repeat(3, axis=1)

        assert np.array_equal(handle.image, expected(0)) and handle.format == "png"
        for followed in (1, 0, 1):
            for _ in range(3):
                viewer.step()
            viewer.follow(followed)
            monkeypatch.setattr(env.sim, "draw", None)  # the page must not render
            viewer.show_images()
            monkeypatch.undo()
            assert np.array_equal(handle.image, expected(followed))
        assert not np.array_equal(expected(0), expected(1))
        sent = handle._data
        viewer.show_images()
        assert handle._data is sent, "unchanged images are sent again"
        viewer.run(steps=2)
        assert handle._data is not sent


def test_page_without_cameras_shows_no_images():
    with open_viewer("Cartpole") as viewer:
        assert viewer._images == {}
        viewer.run(steps=2)


@pytest.mark.parametrize("task", ["Cartpole", "AnymalTerrain", "FrankaCubeStack"])
def test_envs_are_placed_around_the_followed_env(task):
    with open_viewer(task, num_envs=3) as viewer:
        scene = viewer._scene
        for env in (0, 2):
            viewer.follow(env)
            viewer.step()
            scene.draw()
            qpos = viewer._vec_env.sim.qpos[env].numpy()
            data = scene._data
            data.qpos[:] = qpos
            mujoco.mj_kinematics(scene._model, data)
            assert np.allclose(scene._pos[env, 1:], data.xpos[1:]), "differs from the simulator"
            assert np.allclose(scene._scene._scene_offset[:2], -data.xpos[scene._camera.body, :2]), "not centred"
        roots = scene._pos[:, scene._camera.body, :2]
        apart = [float(np.linalg.norm(roots[a] - roots[b])) for a, b in ((0, 1), (1, 2), (0, 2))]
        assert min(apart) > (0.0 if task == "AnymalTerrain" else scene._camera.radius)
        scene.show("show_contact_points", True)
        scene.show("show_contact_forces", True)
        scene.show("show_only_selected", True)
        scene.draw()
        assert scene._scene.show_only_selected and all(not handle.visible for handle, _ in scene._fixed)


def test_commands_have_ranges_and_units():
    class Now:
        num_envs, dt, device, random = 2, 0.02, torch.device("cpu"), None

    commands = Commands(Now(), {"x": (-1.0, 2.0), "turn": (0.0, 1.0)}, interval=0.04, units={"x": "m/s"})
    assert commands.controls() == {"x [m/s]": (-1.0, 2.0), "turn": (0.0, 1.0)}
    commands.hold(torch.tensor([False, True]), torch.tensor([0.5, 0.25]))
    assert commands.value.tolist() == [[0.0, 0.0], [0.5, 0.25]]


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_browser_renders_the_page_and_steers():
    api = pytest.importorskip("playwright.sync_api")
    from PIL import Image

    with open_viewer("Anymal") as viewer, api.sync_playwright() as playwright:
        flags = ["--no-sandbox", "--use-angle=swiftshader", "--enable-unsafe-swiftshader"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        page = browser.new_page(viewport={"width": 800, "height": 700}, locale="en-US")
        errors, requests = [], []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: message.type == "error" and errors.append(message.text))
        page.on("request", lambda request: requests.append(request.url))
        page.on("websocket", lambda opened: requests.append(opened.url))
        page.goto(viewer.address)
        slider = page.get_by_role("slider").nth(1)  # after the slider of the env
        slider.wait_for(timeout=120_000)
        before = float(viewer.commands.value[0, 0])
        slider.focus()
        page.keyboard.press("End")
        for _ in range(200):
            page.wait_for_timeout(50)
            viewer.drain()
            if viewer.held is not None:
                break
        highest = viewer.commands.controls()["x [m/s]"][1]
        assert before != highest and float(viewer.commands.value[0, 0]) == highest
        viewer._scene.draw()
        for _ in range(60):  # the image fades in
            page.wait_for_timeout(1000)
            picture = page.locator("canvas").first.screenshot(timeout=120_000)
            colours = Image.open(io.BytesIO(picture)).convert("RGB").crop((0, 0, 450, 700))
            if len(colours.getcolors(1 << 24)) > 1000 and colours.getextrema()[0][0] < 120:
                break
        else:
            pytest.fail("only the background is drawn")
        browser.close()
    assert errors == []
    assert {url.split("/")[2] for url in requests if not url.startswith(("data:", "blob:"))} == {
        viewer.address.partition("//")[2]
    }


class Site(http.server.BaseHTTPRequestHandler):
    """Page of another site, on another port of this machine."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<html><body>another site</body></html>")

    def log_message(self, format: str, *args: Any) -> None:
        pass


OPEN = """([address, version]) => new Promise(done => {
    const socket = new WebSocket(address.replace("http", "ws"), "viser-v" + version);
    socket.onopen = () => done("open");
    socket.onerror = () => done("refused");
})"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_browser_page_of_another_site_cannot_connect():
    api, viser = pytest.importorskip("playwright.sync_api"), pytest.importorskip("viser")
    site = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Site)
    threading.Thread(target=site.serve_forever, daemon=True).start()
    with open_viewer("Cartpole") as viewer, api.sync_playwright() as playwright:
        rebound = f"--host-resolver-rules=MAP evil.com:{viewer.port} 127.0.0.1:{viewer.port}"
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", rebound])
        page, arguments = browser.new_page(), [viewer.address, viser.__version__]
        page.goto(f"http://127.0.0.1:{site.server_port}")
        assert page.evaluate(OPEN, arguments) == "refused"
        page.set_content(f"<iframe src='{viewer.address}'></iframe>")
        page.wait_for_timeout(2000)
        assert not any(frame.url.startswith(viewer.address) and frame.query_selector("#root") for frame in page.frames)
        page.goto(f"http://evil.com:{viewer.port}")
        assert "refused" in page.inner_text("body")
        assert page.evaluate(OPEN, [f"http://evil.com:{viewer.port}", viser.__version__]) == "refused"
        page.goto("about:blank")
        assert page.evaluate(OPEN, arguments) == "refused"
        assert not viewer._server.get_clients()
        page.goto(viewer.address)
        assert page.evaluate(OPEN, arguments) == "open"
        browser.close()
    site.shutdown()
