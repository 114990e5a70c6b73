"""Tests of the command `record`: videos, HTML replays, cameras, captions, failures of ffmpeg."""

from __future__ import annotations

import resource
import subprocess
import sys
from contextlib import closing
from functools import partial
from pathlib import Path

import imageio_ffmpeg
import numpy as np
import pytest

from gpusim_rl.env import VecEnv
from gpusim_rl.errors import ConfigError
from gpusim_rl.sim import Scene
from gpusim_rl.view import renderer as rendering
from gpusim_rl.view.playback import scene_by_name as task_scene
from gpusim_rl.view.player import Player
from gpusim_rl.view.video import Caption, caption_words, command_captions, frame_rate, video_writer
from helpers.commands import ROOT

pytest_plugins = ["helpers.tool_runs"]

SMALL = ("--num-envs", "4", "--width", "320", "--height", "240", "--steps", "12")


def decode(path: Path) -> tuple[dict, np.ndarray]:
    reader = imageio_ffmpeg.read_frames(str(path))
    meta = next(reader)
    width, height = meta["size"]
    frames = [np.frombuffer(frame, dtype=np.uint8).reshape(height, width, 3) for frame in reader]
    return meta, np.stack(frames)


def qpos_at_rest(scene: Scene, tiles: int) -> np.ndarray:
    return np.tile(scene.model.qpos0, (tiles, 1))


@pytest.mark.parametrize("task", ["Cartpole", pytest.param("Ant", marks=pytest.mark.slow)])
def test_video_of_a_run_is_saved_in_its_folder(tool_here, runs_folder, task):
    done = tool_here("record", task, *SMALL)
    path = runs_folder / done.stdout.strip()
    assert path.is_relative_to(runs_folder / "runs" / task) and path.parent.name == "videos"
    meta, frames = decode(path)
    assert (meta["codec"], meta["size"], meta["fps"]) == ("h264", (320, 240), 30.0)  # every second step of 60 Hz
    assert len(frames) == 6 and not (frames == frames[0]).all()
    for tile in (frames[0, :118, :158], frames[0, 122:, 162:]):
        assert tile.std() > 10, "empty tile"
    assert {file.suffix for file in path.parent.iterdir()} <= {".mp4", ".html"}, "no temporary files"


def test_record_accepts_checkpoint_and_output_name(tool_here, runs_folder, tmp_path):
    [last] = (runs_folder / "runs" / "Ant").glob("2*/checkpoints/last.pt")
    out = tmp_path / "ant.mp4"
    done = tool_here("record", last, "--out", out, "--steps", "2", "--num-envs", "1", "--width", "64", "--height", "64")
    assert done.stdout == f"{out}\n" and len(decode(out)[1]) == 1


def test_no_caption_needs_no_pillow(tool_here, tmp_path, monkeypatch):
    tiny = ("Pendulum", "--policy", "random", "--steps", "1", "--num-envs", "1", "--width", "320", "--height", "240")
    tool_here("record", *tiny, "--out", tmp_path / "with.mp4")
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    tool_here("record", *tiny, "--no-caption", "--out", tmp_path / "without.mp4")
    captioned, plain = (decode(tmp_path / name)[1][0].astype(int) for name in ("with.mp4", "without.mp4"))
    assert abs(captioned - plain)[:40].max() > 60  # area of the caption


def test_existing_video_needs_overwrite(tool_here, tmp_path):
    tiny = ("Pendulum", "--policy", "random", "--steps", "2", "--num-envs", "1", "--width", "64", "--height", "64")
    names = [tool_here("record", *tiny, cwd=tmp_path).stdout.strip() for _ in range(2)]
    assert names == ["Pendulum-random.mp4", "Pendulum-random-2.mp4"]
    before = (tmp_path / names[1]).read_bytes()
    again = (*tiny, "--out", names[1], "--width", "96")
    done = tool_here("record", *again, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "") and done.refuses(f"--out {names[1]}: ")
    assert (tmp_path / names[1]).read_bytes() == before
    assert tool_here("record", *again, "--overwrite", cwd=tmp_path).stdout == f"{names[1]}\n"
    meta, frames = decode(tmp_path / names[1])
    assert (meta["size"], meta["fps"], len(frames)) == ((96, 64), 20.0, 2)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("Cartpole", "--out", "new/x.mp4"), "--out new/x.mp4: "),
        (("Cartpole", "--num-envs", "400"), "320x240 pixels"),
        (("Cartpole", "--renderer", "gl"), "OpenGL does not"),
    ],
)
def test_bad_input_is_rejected_in_one_line(tool_here, arguments, line):
    without = {"MUJOCO_GL": "glfw", "DISPLAY": "", "WAYLAND_DISPLAY": ""}
    sizes = [] if "--num-envs" in arguments else ["--num-envs", "1"]
    done = tool_here("record", "--width", "320", "--height", "240", *sizes, *arguments, env=without)
    assert done.returncode == 2
    errors = [text for text in done.stderr.splitlines() if text.startswith("error: ")]
    assert len(errors) == 1 and errors[0].startswith(f"error: {line}"), done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("Nothing",), "no checkpoint 'Nothing'"),
        (("Cartpole", "--width", "321"), "video width and height: "),
        (("Cartpole", "--out", "x.gif"), "--out: "),
    ],
)
def test_bad_arguments_are_rejected_before_importing_torch(tool, tmp_path, arguments, line):
    (tmp_path / "torch.py").write_text("raise ImportError('too early')")
    done = tool("record", *arguments, check=False, env={"PYTHONPATH": str(tmp_path)})
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith(f"error: {line}"), done.stderr


@pytest.mark.parametrize(
    ("arguments", "line"), [(("--out", "x.mp4"), "got 'x.mp4'"), (("--num-envs", "4"), "--num-envs: ")]
)
def test_html_replay_rejects_mp4_and_several_envs(tool_here, arguments, line):
    done = tool_here("record", "Cartpole", "--html", *arguments)
    assert done.refuses(line)


def test_html_replay_is_one_page_with_a_local_server(load_tool, runs_folder, monkeypatch, capsys):
    viser = pytest.importorskip("viser")
    pytest.importorskip("mjviser")
    hosts = []
    server = viser.ViserServer
    monkeypatch.setattr(viser, "ViserServer", lambda host, **more: hosts.append(host) or server(host=host, **more))
    monkeypatch.chdir(runs_folder)
    tool = load_tool("record")
    path = tool.record(tool.parse(["Cartpole", "--html", "--steps", "6"]))
    assert path.suffix == ".html" and path.parent.name == "videos"
    page = path.read_text()
    assert "<title>Cartpole, iteration 6, return " in page and "__VISER_EMBED_DATA__" in page
    assert 'darkMode:matchMedia("(prefers-color-scheme: dark)").matches' in page
    assert hosts == ["127.0.0.1"] and capsys.readouterr().out == f"{path}\n"


@pytest.mark.parametrize(
    ("control_hz", "every", "fps"),
    [(60, 2, 30), (20, 1, 20), (50, 2, 25), (100, 4, 25), (30, 1, 30), (1000, 34, 29.41)],
)
def test_frame_rate_is_real_time(control_hz, every, fps):
    assert frame_rate(control_hz) == (every, pytest.approx(fps, abs=0.01))


@pytest.mark.parametrize(("tiles", "columns", "rows"), [(1, 1, 1), (2, 2, 1), (5, 3, 2), (9, 3, 3), (10, 4, 3)])
def test_tiles_fit_the_picture_without_overlap(tiles, columns, rows):
    grid = rendering.Grid.of(tiles, 321, 203)
    assert (grid.columns, grid.rows) == (columns, rows)
    covered = np.zeros((203, 321), dtype=int)
    for tile in range(tiles):
        left, top = grid.corner(tile)
        covered[top : top + grid.tile_height, left : left + grid.tile_width] += 1
    assert covered.max() == 1 and covered.sum() == tiles * grid.tile_width * grid.tile_height


@pytest.mark.parametrize(
    ("task", "body", "radius"),
    [
        ("Ant", "ant/torso", (0.7, 1.3)),
        ("Cartpole", "cartpole/cart", (0.9, 1.1)),
        ("Pendulum", "pendulum/base", (1.0, 1.2)),
        ("FrankaCabinet", "franka/link0", (1.1, 1.4)),  # fingers slide, but carry no body
    ],
)
def test_camera_follows_the_supporting_body(task, body, radius):
    scene = task_scene(task)
    camera = rendering.Camera(scene, qpos_at_rest(scene, 2))
    assert scene.model.body(camera.body).name == body and radius[0] < camera.radius < radius[1]
    position, rotation = camera.pose(np.array([10.0, 2.0, 1.0]))
    np.testing.assert_allclose(rotation.T @ rotation, np.eye(3), atol=1e-12)
    target = rotation.T @ (np.array([10.0, 2.0, 1.0]) - position)  # in the camera's frame
    np.testing.assert_allclose(target, [0.0, 0.0, -camera.distance], atol=1e-12)


def test_camera_smooths_height_and_jumps_at_new_episodes():
    camera = rendering.Camera(task_scene("Ant"), qpos_at_rest(task_scene("Ant"), 1))
    assert camera.follow(0, np.array([0.0, 0.0, 0.5]))[2] == 0.5
    assert camera.follow(0, np.array([3.0, 1.0, 0.7])).tolist() == pytest.approx([3.0, 1.0, 0.52])
    assert camera.follow(0, np.array([0.0, 0.0, 5.0]))[2] == 5.0
    assert camera.follow(1, np.array([0.0, 0.0, 0.6]))[2] == 0.6  # per tile


@pytest.mark.parametrize("task", [pytest.param("Ant", marks=pytest.mark.slow), "Pendulum"])
def test_gl_and_ray_renderers_agree(task):
    platform = next((name for name in rendering.gl_platforms() if rendering.gl_works(name)), None)
    if platform is None:
        pytest.skip("no OpenGL here")
    scene = task_scene(task)
    qpos = qpos_at_rest(scene, 3)
    if task == "Ant":
        qpos[1, 0] = 30.0  # far from the default lights and floor
    pictures = []
    for name in ("gl", "ray"):
        renderer = rendering.make_renderer(scene, qpos, 160, 120, name)
        pictures.append(renderer.render(qpos).astype(float))
        renderer.close()
    # pixels differ at edges, shadows and the horizon
    small = [picture.reshape(15, 8, 20, 8, 3).mean(axis=(1, 3)) for picture in pictures]
    assert np.corrcoef(small[0].ravel(), small[1].ravel())[0, 1] > 0.95


def test_caption_has_task_iteration_and_return(runs_folder):
    [run] = [path for path in (runs_folder / "runs" / "Cartpole").glob("2*") if path.is_dir()][:1]
    with closing(Player.open(str(run))) as player:
        last = (run / "metrics.csv").read_text().splitlines()[-1].split(",")
        columns = (run / "metrics.csv").read_text().splitlines()[0].split(",")
        value = float(last[columns.index("episode/return")])
        assert caption_words(player) == ["Cartpole", f"iteration {last[0]}", f"return {value:,.4g}"]
        player.iteration = 10**6  # missing in the file
        assert caption_words(player) == ["Cartpole", "iteration 1,000,000"]
        assert command_captions(player.env) == []


def test_caption_without_policy_names_random_actions():
    with closing(Player.open("Pendulum", act="random", from_yaml=True)) as player:
        assert caption_words(player) == ["Pendulum", "random actions"]


@pytest.mark.parametrize("task", ["Anymal", pytest.param("Go1Velocity", marks=pytest.mark.slow)])
def test_captions_have_the_command_of_each_env(task):
    with closing(Player.open(task, act="zero", num_envs=2, from_yaml=True)) as player:
        assert isinstance(player.env, VecEnv)
        texts = command_captions(player.env)
        command = vars(player.env.task).get("commands") or vars(player.env.task)["command"]
        expected = ["command  x {:.2f}  y {:.2f}  yaw {:.2f}".format(*row) for row in command.value.tolist()]
    assert texts == expected and texts[0] != texts[1]


def test_captions_fit_into_the_corners():
    picture = np.full((240, 480, 3), 90, dtype=np.uint8)
    grid = rendering.Grid.of(2, 480, 240)
    written = Caption(grid, ["Ant", "iteration 7"]).write(picture, ["command  x 1.00", "command  x 2.00"])
    changed = (written != picture).any(axis=2)
    assert changed[:30, :150].any() and changed[210:, :200].any() and changed[210:, 241:].any()
    assert not changed[40:200].any(), "the middle stays free"
    assert (picture == 90).all(), "the renderer's buffer is unchanged"
    narrow = Caption(rendering.Grid.of(1, 60, 60), ["Ant", "iteration 7"]).write(picture[:60, :60], ["much too long"])
    assert (narrow != 90).any() and (narrow[30:] == 90).all(), "captions that do not fit are omitted"


def test_interrupted_recording_leaves_no_file(tmp_path):
    picture = np.zeros((32, 32, 3), dtype=np.uint8)
    with pytest.raises(KeyboardInterrupt), video_writer(tmp_path / "v" / "x.mp4", (32, 32), 30.0, "record") as write:
        write(picture)
        raise KeyboardInterrupt
    assert list((tmp_path / "v").iterdir()) == []


@pytest.mark.parametrize(
    "script",
    [
        "exit 1",
        "cat > /dev/null; exit 1",
        'echo partial > "$last"; cat > /dev/null; echo "No space left on device" >&2; exit 228',
        'head -c 100 > "$last"; kill -9 $$',
        "exit 0",
        'echo partial > "$last"; exit 0',
        "cat > /dev/null; exit 0",
    ],
    ids=["fails at start", "fails at end", "full disk", "killed", "no read", "partial file", "no file"],
)
def test_ffmpeg_failure_keeps_the_previous_video(tmp_path, monkeypatch, script):
    fake, out = tmp_path / "ffmpeg", tmp_path / "v" / "x.mp4"
    fake.write_text(f"#!/bin/sh\nfor last; do :; done\n{script}\n")
    fake.chmod(0o755)
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(fake))
    out.parent.mkdir()
    out.write_bytes(b"good")
    with pytest.raises(ConfigError, match="ffmpeg") as error, video_writer(out, (320, 320), 30.0, "") as write:
        for _ in range(50):
            write(np.zeros((320, 320, 3), dtype=np.uint8))
    assert "No space left" in str(error.value) or "228" not in script
    assert [(file.name, file.read_bytes()) for file in out.parent.iterdir()] == [("x.mp4", b"good")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments", "out"),
    [
        ("record", ["Cartpole", *SMALL, "--policy", "random"], "x.mp4"),
        ("snapshot", ["Cartpole"], "x.png"),
        ("clip", ["play", "go1_trot", "--steps", "20"], "x.mp4"),
    ],
)
def test_full_disk_keeps_the_previous_file(name, arguments, out, tmp_path):
    (tmp_path / out).write_bytes(b"good")
    words = [sys.executable, str(ROOT / "tools" / f"{name}.py"), *arguments, "--out", out, "--overwrite"]
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (512, 512))
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, preexec_fn=limit)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "cannot write x" in done.stderr
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [(out, b"good")]


def test_unwritable_folder_is_reported(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(ConfigError, match="cannot write"),
        video_writer(tmp_path / "file" / "x.mp4", (32, 32), 30.0, ""),
    ):
        pass


def test_picture_model_matches_the_scene():
    scene = task_scene("Ant")
    model = rendering.picture_model(scene, rendering.Camera(scene, qpos_at_rest(scene, 1)))
    assert (model.nq, model.nbody, model.ngeom) == (scene.model.nq, scene.model.nbody, scene.model.ngeom)
    assert scene.model.ncam == 0, "the scene is unchanged"


def test_picture_model_separates_coincident_capsule_ends():
    scene = task_scene("Ant")
    before = scene.model.geom_size.copy()
    model = rendering.picture_model(scene, rendering.Camera(scene, qpos_at_rest(scene, 1)))
    leg, foot = (float(model.geom(f"ant/{name}").size[0]) for name in ("leg_1", "foot_1"))
    corners = 1.0 - np.cos(np.pi / model.vis.quality.numslices)  # distance of polygon sides from the circle
    assert abs(leg - foot) > 2.0 * corners * 0.08 and max(leg, foot) == 0.08
    assert (scene.model.geom_size == before).all(), "the physics are unchanged"


def test_rough_terrain_is_lit_from_above():
    def slope(task: str) -> float:
        scene = task_scene(task)
        model = rendering.picture_model(scene, rendering.Camera(scene, qpos_at_rest(scene, 1)))
        x, y, z = model.light_dir0[0]
        return float(np.hypot(x, y) / -z)

    steepest = 0.1 / 0.2  # m along over m up of a stair in AnymalTerrain's height field
    assert slope("AnymalTerrain") < steepest < slope("Anymal")
