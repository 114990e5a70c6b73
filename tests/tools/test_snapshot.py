"""Tests of the command `snapshot`, its framing camera and the gallery of tasks."""

from __future__ import annotations

import inspect
import math
import re

import matplotlib.image
import mujoco
import numpy as np
import pytest

from gpusim_rl.env.task import load_task_or_environment
from gpusim_rl.errors import ConfigError
from gpusim_rl.settings import compose as composing
from gpusim_rl.settings import discover
from gpusim_rl.settings.discover import tasks
from gpusim_rl.sim import Scene
from gpusim_rl.view import snapshot
from gpusim_rl.view.playback import scene_by_name as task_scene
from gpusim_rl.view.player import Player
from gpusim_rl.view.renderer import FOVY_DEG
from helpers.commands import ROOT
from helpers.scenes import scene_with

pytest_plugins = ["helpers.tool_runs"]

SMALL = ("--width", "160", "--height", "120")

# A wide and low robot, with a small object next to it, one far away, and a large one below.
TABLE = """
<mujoco>
  <worldbody>
    <body name="table">
      <geom type="box" size="0.2 0.6 0.05" pos="0 0 0.3"/>
      <geom type="sphere" size="5" group="3"/>
      <geom type="sphere" size="5" rgba="1 1 1 0"/>
    </body>
  </worldbody>
</mujoco>
"""
THING = "<mujoco><worldbody><body><freejoint/><geom size='{}' pos='{} 0 {}'/></body></worldbody></mujoco>"


def table_scene() -> Scene:
    scene = scene_with(100, table=TABLE, near=THING.format(0.05, 0.3, 0.5), far=THING.format(0.05, 30, 0.5))
    scene.add("planet", mujoco.MjSpec.from_string(THING.format(1, 0, -1)))
    return scene


def seen(camera: snapshot.FramingCamera, points: np.ndarray, aspect: float, tile: int = 0) -> np.ndarray:
    """Project points to the picture: -1 to 1 across and up, shape [points, 2]; infinite behind the camera."""
    position, axes = camera.pose(camera.follow(tile, np.zeros(3)))
    right, up, toward = ((points - position) @ axes).T
    slope = math.tan(math.radians(FOVY_DEG) / 2)
    places = np.stack([right / (slope * aspect), up / slope], axis=1) / -toward[:, None]
    return np.where(toward[:, None] < 0, places, np.inf)


def test_snapshot_of_a_task_without_a_run(tool_here, tmp_path):
    done = tool_here("snapshot", "Cartpole", *SMALL, cwd=tmp_path)
    assert done.stdout == "Cartpole.png\n"
    picture = matplotlib.image.imread(tmp_path / "Cartpole.png")
    assert picture.shape == (120, 160, 3) and picture.std() > 0.05
    red, green, blue = picture[..., 0], picture[..., 1], picture[..., 2]
    assert ((red > 2 * blue) & (red > 1.3 * green)).mean() > 0.01, "orange pole"
    assert ((blue > 1.5 * red) & (blue > 1.2 * green)).mean() > 0.01, "blue cart"


def test_snapshot_ignores_runs_and_existing_files(tool_here, tmp_path):
    (tmp_path / "runs" / "Pendulum").mkdir(parents=True)  # a run without a checkpoint
    assert tool_here("snapshot", "Pendulum", *SMALL, cwd=tmp_path).stdout == "Pendulum.png\n"
    assert tool_here("snapshot", "Pendulum", *SMALL, cwd=tmp_path).stdout == "Pendulum-2.png\n", "existing file is kept"
    assert tool_here("snapshot", "Pendulum", *SMALL, "--overwrite", cwd=tmp_path).stdout == "Pendulum.png\n"


def test_snapshot_depends_only_on_options(tool_here, tmp_path):
    variants = {"start": (), "again": (), "fallen": ("--steps", "40"), "small": ("--fill", "0.4")}
    variants["pushed"] = ("--steps", "40", "--policy", "random")
    for name, arguments in variants.items():
        tool_here("snapshot", "Cartpole", *SMALL, *arguments, "--out", tmp_path / f"{name}.png")
    start, again, *others = [(tmp_path / f"{name}.png").read_bytes() for name in variants]
    assert start == again and len({start, *others}) == 4


@pytest.mark.slow
def test_trained_snapshot_of_several_envs_without_opengl(tool, tmp_path):
    without = {"MUJOCO_GL": "glfw", "DISPLAY": "", "WAYLAND_DISPLAY": ""}
    arguments = ("--policy", "trained", "--steps", "3", "--num-envs", "2", "--out", tmp_path / "two.png")
    done = tool("snapshot", "Cartpole", *SMALL, *arguments, env=without)
    assert done.stderr.count("\n") == 1 and "ray caster" in done.stderr and "libegl1" in done.stderr
    picture = matplotlib.image.imread(tmp_path / "two.png")
    left, right = picture[:, :78], picture[:, 82:]
    assert left.std() > 0.05 and right.std() > 0.05
    assert not (left == right).all()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("Cartpol",), "Did you mean 'Cartpole'?"),
        (("Cartpole", "--out", "new/x.png"), "--out new/x.png: "),
        (("Cartpole", "--out", "x.jpg"), "got 'x.jpg'"),
        (("Cartpole", "--num-envs", "400"), "160x120 pixels"),
        (("Cartpole", "--renderer", "gl"), "OpenGL does not"),
        (("Pendulum", "--policy", "trained"), "no checkpoint 'Pendulum'"),
        (("Cartpole", "--steps", "-3"), "--steps: expected at least 0, got -3"),
        (("Cartpole", "--fill", "1.5"), "--fill: expected 0.01 to 1, got 1.5"),
    ],
)
def test_bad_input_is_rejected_in_one_line(tool_here, arguments, line):
    without = {"MUJOCO_GL": "glfw", "DISPLAY": "", "WAYLAND_DISPLAY": ""}
    done = tool_here("snapshot", *SMALL, *arguments, env=without)
    assert done.refuses(line), done.stderr


def test_too_large_picture_is_rejected(monkeypatch):
    def refuse(*_):
        raise mujoco.FatalError("Offscreen framebuffer is not complete, error 0x8cd6")

    monkeypatch.setattr(snapshot, "make_renderer", refuse)
    scene = table_scene()
    with pytest.raises(ConfigError, match="18000x720 pixels"):
        snapshot.draw(scene, scene.model.qpos0[None], 9000, 360)


def test_task_derived_in_yaml_opens(monkeypatch, tmp_path):
    (tmp_path / "task").mkdir()
    yaml = "# @package _global_\ndefaults: [Pendulum]\ntask: {control_hz: 20}\n"
    (tmp_path / "task" / "Slow.yaml").write_text(yaml)
    monkeypatch.setattr(discover, "plugin_cfg_dirs", lambda: [("mine", tmp_path)])
    monkeypatch.setattr(composing, "plugin_cfg_dirs", lambda: [("mine", tmp_path)])
    player = Player.open("Slow", act="zero", from_yaml=True)
    assert (player.env.name, player.env.cfg.control_hz) == ("Pendulum", 20)
    assert tasks()["Slow"].target == tasks()["Pendulum"].target
    player.close()


@pytest.mark.parametrize(("aspect", "fill"), [(0.5, 0.86), (4 / 3, 0.86), (3.0, 0.4)])
def test_robot_and_near_objects_fill_the_picture(aspect, fill):
    scene = table_scene()
    camera = snapshot.FramingCamera(scene, scene.model.qpos0[None], aspect, fill)
    signs = np.array(np.meshgrid([-1, 1], [-1, 1], [-1, 1])).T.reshape(-1, 3)
    table = [0, 0, 0.3] + signs * [0.2, 0.6, 0.05]
    near = [0.3, 0, 0.5] + signs * 0.05
    places = seen(camera, np.concatenate([table, near]), aspect)
    assert abs(places).max() == pytest.approx(fill, abs=0.01)  # invisible geoms are ignored
    assert abs(places.min(axis=0) + places.max(axis=0)).max() < 0.03, "off-centre"
    assert abs(seen(camera, np.array([[30.0, 0, 0.5]]), aspect)).max() > 1


def test_low_robots_are_seen_from_above_and_ahead():
    scene = table_scene()
    camera = snapshot.FramingCamera(scene, scene.model.qpos0[None], 1.0)
    assert (camera.azimuth_deg, camera.elevation_deg) == (150.0, -30.0)
    scene = task_scene("Cartpole")
    upright = snapshot.FramingCamera(scene, scene.model.qpos0[None], 1.0)
    assert (upright.azimuth_deg, upright.elevation_deg) == (120.0, -18.0)


def test_camera_frames_the_cart_and_not_the_rail():
    scene = task_scene("Cartpole")
    qpos = np.array([[0.0, 0.0], [2.5, 0.3]])
    camera = snapshot.FramingCamera(scene, qpos, 1.0)
    data = mujoco.MjData(scene.model)
    for tile, positions in enumerate(qpos):
        data.qpos[:] = positions
        mujoco.mj_kinematics(scene.model, data)
        middle = data.body("cartpole/pole").xpos[None]
        assert abs(seen(camera, middle, 1.0, tile)).max() < 1
    assert camera.distance < 4, "the 8 m rail is not framed"


def test_unwritable_file_is_reported(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot write"):
        snapshot.write_png(tmp_path / "file" / "x.png", np.zeros((4, 4, 3), dtype=np.uint8))


GALLERY = ROOT / "docs" / "tasks.md"


def test_gallery_lists_exactly_the_registered_tasks():
    assert sorted(re.findall(r"^\|\[(\w+)\]\(\.\./tasks/", GALLERY.read_text(), re.MULTILINE)) == sorted(tasks())


@pytest.mark.parametrize("name", tasks())
def test_gallery_row_matches_its_task(name):
    entry = tasks()[name]
    settings = composing.compose([f"task={name}"])["task"]
    docstring = inspect.getdoc(load_task_or_environment(entry.target)) or ""
    sizes: list[int] = []  # of observation groups
    for line in docstring.splitlines():
        if re.match(r"\| *num *\|", line):
            sizes.append(0)
        elif row := re.match(r"\| *(?:\d+-)?(\d+) *\|", line):
            sizes[-1] = int(row.group(1)) + 1
    actions = int(re.search(r"Action space: (\d+)", docstring).group(1))  # type: ignore[union-attr]
    seconds = settings["episode_length"] / settings["control_hz"]
    critic = f" ({sizes[1]})" if sizes[1:] and "critic" in docstring else ""
    module = entry.target.split(".")[-2]
    files = f"|[{name}](../tasks/{module}.py), [yaml](../cfg/task/{name}.yaml)|"
    [row] = [line for line in GALLERY.read_text().splitlines() if line.startswith(files)]
    assert f"|{sizes[0]}{critic}|{actions}|{settings['control_hz']:g}|{seconds:.1f}|" in row
    assert f"![{name}](images/{name}.png)" in GALLERY.read_text()
    picture = matplotlib.image.imread(ROOT / "docs" / "images" / f"{name}.png")
    assert picture.shape == (360, 480, 3) and picture.std() > 0.05
    assert (ROOT / "docs" / "images" / f"{name}.png").stat().st_size < 61_440


@pytest.mark.parametrize(("size", "shown"), [((36, 96), (72, 192)), ((40, 40), (120, 120)), ((900, 900), (129, 129))])
def test_camera_images_are_inset_in_the_corner(size, shown):
    picture, image = np.zeros((360, 480, 3), np.uint8), np.full((*size, 3), 90, np.uint8)
    image[0, 0] = 200
    drawn = snapshot.add_seen(picture, [image])
    height, width = (int((drawn >= 90).any(axis=axes).sum()) for axes in ((1, 2), (0, 2)))
    assert (height, width) == (shown[0] + 4, shown[1] + 4), "frame of 2 pixels"
    assert drawn[2, 480 - 2 - shown[1], 0] == 200 and drawn[0, -1, 0] == 255 and not drawn[200:].any()
    assert not picture.any()
    two = snapshot.add_seen(picture, [image, image])
    assert two[1, 237, 0] == two[1, 479, 0] == 255, "one per tile"


@pytest.mark.slow
def test_snapshot_of_camera_task_shows_its_image(tool, tmp_path):
    tool("snapshot", "CartpoleCamera", "--width", "480", "--height", "360", "--out", tmp_path / "seen.png")
    picture = matplotlib.image.imread(tmp_path / "seen.png")
    assert (picture[0, -100:] == 1.0).all(), "white frame"
