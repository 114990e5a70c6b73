"""Tests of Menagerie robots: import, stance, and errors for missing ones."""

from __future__ import annotations

import sys
import warnings

import mujoco
import numpy as np
import pytest
import torch

from gpusim_rl.api import make_env
from gpusim_rl.errors import ConfigError, TaskError
from gpusim_rl.files.paths import assets_dir, robot_file
from gpusim_rl.sim import Scene, SimChoice, make_sim, menagerie
from helpers.raised import raises
from helpers.scenes import sim_config

# As in Menagerie's files: options, lights and cameras outside and inside of the robot, sensors, a stance.
WALKER = """
<mujoco model="tiny_walker">
  <compiler angle="{angle}" autolimits="true"/>
  <option cone="elliptic" impratio="100" timestep="0.001" integrator="implicitfast"/>
  <default>
    <default class="leg"><joint axis="0 1 0" damping="1"/><position kp="20"/></default>
  </default>
  <worldbody>
    <light name="spotlight" mode="targetbodycom" target="trunk" pos="0 -1 2"/>
    <camera name="side" pos="0 -2 1" resolution="64 64"/>
    <geom name="floor" type="plane" size="0 0 0.05"/>
    <body name="trunk" pos="0 0 0.6" childclass="leg">
      <freejoint/>
      <camera name="tracking" mode="trackcom" pos="0 -1 0.8"/>
      <light pos="0 0 5" mode="trackcom"/>
      <site name="imu"/>
      <geom name="trunk" type="box" size="0.2 0.1 0.05" mass="3"/>
      <body name="thigh" pos="0.1 0.1 0" {turned}>
        <joint name="hip" pos="0.01 0 0.02" range="{hip}"/>
        <geom type="capsule" size="0.02" fromto="0 0 0 0 0 -0.2" mass="0.5"/>
        <frame pos="0 0.01 0">
          <body name="shank" pos="0 0 -0.2" quat="0.9 0.1 0.3 0">
            <joint name="knee" axis="1 2 0" ref="{ref}" range="{knee}"/>
            <geom type="capsule" size="0.02" fromto="0 0 0 0 0 -0.2" mass="0.3"/>
            <body name="foot" pos="0 0 -0.2">
              <joint name="spring" type="slide" axis="0 0.6 0.8" stiffness="100"/>
              <geom type="sphere" size="0.03" mass="0.1"/>
            </body>
          </body>
        </frame>
      </body>
    </body>
  </worldbody>
  <actuator><position name="hip" joint="hip" class="leg"/><position name="knee" joint="knee" class="leg"/></actuator>
  <sensor><gyro name="gyro" site="imu"/><camprojection name="gone" site="imu" camera="side"/></sensor>
  <keyframe>
    <key name="crouched" qpos="0 0 0.1 1 0 0 0 1 1 0"/>
    <key name="home" qpos="0 0 0.45 0.8 0 0 0.6 0.7 -1.3 0.01" ctrl="0.7 -1.3"/>
  </keyframe>
</mujoco>
"""
RADIAN = WALKER.format(angle="radian", turned='euler="0.1 0.2 0.3"', hip="-0.5 1.5", knee="-2.5 -0.5", ref="-0.2")
RANGES = {"hip": "-28.64788976 85.94366927", "knee": "-143.2394488 -28.64788976", "ref": "-11.459155903"}
DEGREE = WALKER.format(angle="degree", turned='euler="5.729577951 11.459155903 17.188733854"', **RANGES)
STANCE = [0.7, -1.3, 0.01]

GRIPPER = """
<mujoco>
  <worldbody>
    <body name="hand">
      <body name="wrist"><joint name="wrist"/><geom size="0.01" mass="1"/>
        <body name="left" pos="0 0.1 0"><joint name="left" type="slide"/><geom size="0.01" mass="1"/></body>
        <body name="right" pos="0 -0.1 0"><joint name="right" type="slide"/><geom size="0.01" mass="1"/></body>
      </body>
    </body>
  </worldbody>
  <equality>{}</equality>
  <keyframe><key name="home" qpos="0.5 0.04 0.04"/></keyframe>
</mujoco>
"""

# Interface of the package (version 2026.10) with test files.
PACKAGE = """
from pathlib import Path
from urllib.error import URLError

HERE = Path(__file__).parent

class MenagerieError(Exception):
    pass

class DownloadError(MenagerieError):
    pass

class Robot:
    entry_names = ("walker", "walker_degrees", "broken", "lost")
    default_model = "walker"

    def xml(self, entry):
        if entry == "lost":
            cause = URLError("no such host")
            raise DownloadError(f"https://example.org/tiny_walker.tar.xz: {cause}") from cause
        return HERE / f"{entry}.xml"

class Gripper:
    entry_names = ("joint", "connect")
    default_model = "joint"

    def xml(self, entry):
        return HERE / f"{entry}.xml"

ROBOTS = {"tiny_walker": Robot(), "tiny_gripper": Gripper()}

def names():
    return sorted(ROBOTS)

def get(name):
    return ROBOTS[name]
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Stand-in for `mujoco_menagerie` with two robots."""
    folder = tmp_path / "mujoco_menagerie"
    folder.mkdir()
    for name, text in {
        "__init__.py": PACKAGE,
        "walker.xml": RADIAN,
        "walker_degrees.xml": DEGREE,
        "broken.xml": "<mujoco><worldbody><body/></mujoco>",
        "joint.xml": GRIPPER.format("<joint joint1='left' joint2='right'/>"),
        "connect.xml": GRIPPER.format("<connect body1='left' body2='right' anchor='0 0 0'/>"),
    }.items():
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mujoco_menagerie", raising=False)
    yield folder
    sys.modules.pop("mujoco_menagerie", None)


def robot_scene(source: str, **settings: object) -> Scene:
    scene = Scene(physics_hz=200, **settings)  # type: ignore[arg-type]
    scene.add_ground()
    scene.add("robot", source)
    return scene


def poses(model: mujoco.MjModel, qpos: np.ndarray, prefix: str = "") -> dict[str, np.ndarray]:
    """Return positions and rotation matrices of the walker's bodies."""
    data = mujoco.MjData(model)
    data.qpos[:] = qpos
    mujoco.mj_kinematics(model, data)
    bodies = {name: data.body(prefix + name) for name in ("trunk", "thigh", "shank", "foot")}
    return {name: np.append(body.xpos, body.xmat) for name, body in bodies.items()}


def test_scenery_and_options_are_dropped(package):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as a warning of options that differ from the scene's
        model = robot_scene("menagerie:tiny_walker").model
    assert [model.geom(i).name for i in range(model.ngeom) if "floor" in model.geom(i).name] == []
    assert (model.nlight, model.ncam, model.nsensor, model.nkey, model.nsite) == (1, 0, 1, 0, 1)
    assert (model.opt.timestep, model.opt.impratio) == (0.005, 1.0)
    assert model.opt.integrator == mujoco.mjtIntegrator.mjINT_EULER
    assert model.nu == 2 and model.actuator_gainprm[:, 0].tolist() == [20, 20]
    assert model.jnt_range[1:3].ravel().tolist() == pytest.approx([-0.5, 1.5, -2.5, -0.5])


@pytest.mark.parametrize("source", ["menagerie:tiny_walker", "menagerie:tiny_walker/walker_degrees"])
def test_stance_becomes_the_reference_pose(package, source):
    original = mujoco.MjModel.from_xml_string(RADIAN)
    model = robot_scene(source).model
    key = original.key("home").qpos
    np.testing.assert_allclose(model.qpos0, key, atol=1e-9)
    random = np.random.default_rng(0)
    for _ in range(5):
        qpos = key + np.append(random.normal(size=3), np.zeros(7))
        qpos[3:7] = random.normal(size=4)
        qpos[3:7] /= np.linalg.norm(qpos[3:7])
        qpos[7:] = random.normal(size=3)
        expected, found = poses(original, qpos), poses(model, qpos, "robot/")
        for name, pose in expected.items():
            np.testing.assert_allclose(found[name], pose, atol=1e-8, err_msg=name)


def test_worlds_start_in_the_stance(package):
    scene = robot_scene("menagerie:tiny_walker")
    sim = make_sim(scene, SimChoice("mujoco", torch.device("cpu"), "test"), 2, sim_config())
    robot = sim.articulation("robot")
    assert robot.joint_names == ["hip", "knee", "spring"] and robot.actuator_names == ["hip", "knee"]
    assert robot.default_joint_pos.tolist() == pytest.approx(STANCE)
    assert robot.default_root_pos.tolist() == pytest.approx([0, 0, 0.45])
    assert robot.default_root_quat.tolist() == pytest.approx([0.8, 0, 0, 0.6])
    assert robot.joint_pos[1].tolist() == pytest.approx(STANCE)
    robot.actuate(torch.tensor(STANCE[:2]).expand(2, 2))
    sim.step(20)
    assert not sim.diverged.any()
    sim.close()


def test_connected_bodies_keep_the_files_pose(package):
    assert robot_scene("menagerie:tiny_gripper").model.qpos0.tolist() == [0.5, 0.04, 0.04]  # a joint equality is fine
    assert robot_scene("menagerie:tiny_gripper/connect").model.qpos0.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("menagerie:tiny_walkr", "no such robot.* mean 'tiny_walker'.*python -m mujoco_menagerie names"),
        ("menagerie:zzz", "no such robot.* all 2"),
        ("menagerie:tiny_walker/wlkr", "'wlkr'.* walker, walker_degrees, broken, lost"),
        ("menagerie:tiny_walker/lost", "https://example.org/tiny_walker.tar.xz: no such host.* MENAGERIE_ROOT"),
        ("menagerie:tiny_walker/broken", "XML"),
    ],
)
def test_unavailable_robot_is_rejected_in_one_line(package, source, words):
    with pytest.raises(TaskError, match=words) as error:
        robot_scene(source)
    assert error.value.key == f"Scene.add('robot'): {source}"
    assert "\n" not in str(error.value) and "urlopen" not in str(error.value)


def test_actuator_of_a_missing_joint_is_rejected(monkeypatch):
    xml = '<mujoco><worldbody><body/></worldbody><actuator><motor name="m" joint="gone"/></actuator></mujoco>'
    monkeypatch.setattr(menagerie, "load", lambda *_: mujoco.MjSpec.from_string(xml))
    with pytest.raises(TaskError, match=r"^Scene\.add\('robot'\): .*actuators"):
        robot_scene("menagerie:tiny_walker")


def test_missing_menagerie_package_is_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "mujoco_menagerie", None)
    with raises(TaskError, hint="Try pip install 'gpusim-rl[robots]'"):
        robot_scene("menagerie:unitree_go1")


def test_installed_menagerie_package_is_supported(tmp_path, monkeypatch):
    """The real package's names, interface and checkout folder; a test model avoids a download."""
    menagerie = pytest.importorskip("mujoco_menagerie")
    assert {"unitree_go1", "anybotics_anymal_c", "franka_emika_panda"} <= set(menagerie.names())
    file = tmp_path / "unitree_go1" / "go1.xml"
    file.parent.mkdir()
    file.write_text(RADIAN)
    monkeypatch.setenv("MENAGERIE_ROOT", str(tmp_path))
    assert robot_scene("menagerie:unitree_go1").model.qpos0[7:].tolist() == pytest.approx(STANCE)
    with pytest.raises(TaskError, match="Did you mean 'unitree_go1'"):
        robot_scene("menagerie:unitree_go_1")
    with pytest.raises(TaskError, match="'anybotics_anymal_c' not found under MENAGERIE_ROOT"):
        robot_scene("menagerie:anybotics_anymal_c")


def test_setting_replaces_a_tasks_robot(package):
    """The stand-in is the task's robot in the form of a Menagerie file, so both worlds move alike."""
    own = (assets_dir() / "anymal.xml").read_text()
    default = make_env("Anymal", num_envs=2, sim="mujoco", device="cpu")
    stance = " ".join(f"{position:.9f}" for position in default.task.stance.tolist())
    key = f'<keyframe><key name="home" qpos="0 0 0.62 1 0 0 0 {stance}"/></keyframe>'
    floor = '<worldbody><light pos="0 0 3"/><geom type="plane" size="0 0 1"/>'
    (package / "walker.xml").write_text(own.replace("<worldbody>", floor).replace("</mujoco>", key + "</mujoco>"))
    other = make_env("Anymal", num_envs=2, sim="mujoco", device="cpu", task={"robot": "menagerie:tiny_walker"})
    assert torch.allclose(default.reset()["policy"], other.reset()["policy"], atol=1e-5)
    for step in range(3):
        action = torch.full((2, 12), 0.2 * step)
        assert torch.allclose(default.step(action).obs["policy"], other.step(action).obs["policy"], atol=1e-3)


def test_robot_setting_accepts_names_files_and_menagerie(tmp_path):
    assert robot_file("ant") == assets_dir() / "ant.xml"
    assert robot_file(f"{tmp_path}/x.urdf") == tmp_path / "x.urdf"
    assert robot_file("menagerie:unitree_go1") == "menagerie:unitree_go1"
    with pytest.raises(ConfigError, match=r"^~nosuch/x\.xml: .* home .*Try"):
        robot_file("~nosuch/x.xml")
    with raises(ConfigError, problem="no robot 'anymall' in tasks/assets"):
        robot_file("anymall")
