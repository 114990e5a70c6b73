"""Tests of tools that read robot files: mesh packages, home keyframe, pictures."""

from __future__ import annotations

from pathlib import Path

import mujoco
import numpy as np
import pytest

from gpusim_rl.errors import TaskError
from gpusim_rl.files import paths
from gpusim_rl.sim.keyframe import usable
from gpusim_rl.view.renderer import Camera, picture_model
from helpers.commands import load_file
from helpers.scenes import scene_with

pytest_plugins = ["helpers.tool_runs"]

TETRAHEDRON = "v 0 0 0\nv .2 0 0\nv 0 .2 0\nv 0 0 .2\nf 1 3 2\nf 1 2 4\nf 1 4 3\nf 2 3 4\n"
LINK = """<link name="{name}">
<inertial><mass value="1"/><inertia ixx=".01" ixy="0" ixz="0" iyy=".01" iyz="0" izz=".01"/></inertial>
<collision><geometry><mesh filename="package://elsewhere/{name}.obj"/></geometry></collision></link>"""
ARM = f"""<robot name="arm">{LINK.format(name="base")}{LINK.format(name="hand")}
<joint name="elbow" type="revolute"><parent link="base"/><child link="hand"/><axis xyz="0 1 0"/>
<limit lower="-1" upper="1" effort="5" velocity="2"/></joint></robot>"""
TIED = """<mujoco><worldbody>
<body name="a"><joint name="a" range="-90 90"/><geom size="0.1"/></body>
<body name="b" pos="1 0 0"><joint name="b" range="-90 90"/><geom size="0.1"/></body>
</worldbody><equality><weld body1="a" body2="b"/></equality>
<keyframe><key name="home" qpos="0.1 0.2"/></keyframe></mujoco>"""


@pytest.fixture(autouse=True)
def no_packages(monkeypatch):
    monkeypatch.setattr(paths, "ROS_PACKAGES", {})
    monkeypatch.setattr("gpusim_rl.sim.urdf.ROS_PACKAGES", paths.ROS_PACKAGES)


@pytest.fixture
def arm(tmp_path: Path) -> Path:
    (tmp_path / "there").mkdir()
    (tmp_path / "robot").mkdir()
    for name in ("base", "hand"):
        (tmp_path / "there" / f"{name}.obj").write_text(TETRAHEDRON)
    (tmp_path / "robot" / "arm.urdf").write_text(ARM)
    return tmp_path / "robot" / "arm.urdf"


def test_new_task_stores_the_folder_of_meshes(load_tool, arm, monkeypatch):
    new_task, root = load_tool("new_task"), arm.parents[1]
    words = ["Reach", "--urdf", str(arm), "--out", str(root)]
    with pytest.raises(TaskError, match=r"arm\.urdf: link 'base': .*--packages elsewhere=FOLDER"):
        new_task.new_task(new_task.parse(words))
    new_task.new_task(new_task.parse([*words, "--packages", f"elsewhere={root / 'there'}"]))
    paths.ROS_PACKAGES.clear()
    monkeypatch.syspath_prepend(str(root))
    loaded = load_file(root / "my_tasks" / "reach.py", "reach")
    cfg = type("Cfg", (), {"physics_hz": 200, "stiffness": {"elbow": 1.0}, "damping": {"elbow": 0.1}})
    assert loaded.Reach.scene(cfg).model.nmesh == 2


def test_packages_are_found_in_ros_package_path(arm, monkeypatch):
    (arm.parents[1] / "ws").mkdir()
    (arm.parents[1] / "there").rename(arm.parents[1] / "ws" / "elsewhere")
    monkeypatch.setenv("ROS_PACKAGE_PATH", f"/nowhere:{arm.parents[1] / 'ws'}")
    assert scene_with(100, arm=arm).model.nmesh == 2


@pytest.mark.parametrize("text", ["elsewhere", "=x", "a=", "a=/nowhere/at/all"])
def test_invalid_packages_argument_is_rejected(load_tool, text, capsys):
    with pytest.raises(SystemExit) as ending:
        load_tool("new_task").parse(["Reach", "--urdf", "a.urdf", "--packages", text])
    assert ending.value.code == 2 and "expected NAME=FOLDER" in capsys.readouterr().err


def test_clip_accepts_packages(load_tool, tmp_path):
    args = load_tool("clip").parse(["check", "a.npz", "arm.urdf", "--packages", f"elsewhere={tmp_path}"])
    assert args.packages == [("elsewhere", tmp_path)] and {"elsewhere": tmp_path} == paths.ROS_PACKAGES


def test_unusable_home_keyframe_is_ignored(load_tool, tmp_path, caplog):
    new_task = load_tool("new_task")
    (tmp_path / "tied.xml").write_text(TIED)
    spec = mujoco.MjSpec.from_string(TIED)
    assert not usable(spec, "home") and "violates the equality" in caplog.text and not usable(spec, "other")
    assert usable(mujoco.MjSpec.from_string(TIED.replace("0.1 0.2", "0 0")), "home")
    new_task.new_task(new_task.parse(["Reach", "--mjcf", str(tmp_path / "tied.xml"), "--out", str(tmp_path)]))
    assert "keyframe" not in (tmp_path / "my_tasks" / "reach.py").read_text()


def test_pictures_keep_the_geom_groups_of_the_scene():
    box = '<geom type="box" size="1 1 1" {}/>'
    look = box.format('group="2" contype="0" conaffinity="0"')
    xml = f'<mujoco><worldbody><body name="b"><freejoint/>{box.format("")}{look}</body></worldbody></mujoco>'
    scene = scene_with(100, r=xml)
    picture = picture_model(scene, Camera(scene, np.array([scene.model.qpos0])))
    assert picture.geom_group.tolist() == scene.model.geom_group.tolist() == [3, 2]
