"""Tests of legged robots: inferred feet, pose and motors."""

from __future__ import annotations

import math
import re

import mujoco
import pytest

from gpusim_rl.errors import TaskError
from gpusim_rl.files.paths import assets_dir
from gpusim_rl.sim import Scene
from gpusim_rl.sim.legged import ARMATURE, SAG, LeggedRobot, read_legged

LEG = """
<body name="{n}_thigh" pos="0.1 {y} 0">
  <joint name="{n}_hip" axis="0 1 0" range="-2 2" armature="0.02"/>
  <geom type="capsule" size="0.03" fromto="0 0 0 0 0 -0.3" mass="1"/>
  <body name="{n}_shin" pos="0 0 -0.3">
    <joint name="{n}_knee" axis="0 1 0" range="0.1 2.5" actuatorfrcrange="-60 60"/>
    <geom type="capsule" size="0.02" fromto="0 0 0 0 0 -0.25" mass="0.5"/>
    <geom name="{n}_tip" size="0.03" pos="0 0 -0.3" mass="0.1"/>
  </body>
</body>
"""
BIPED = f"""
<mujoco><compiler angle="radian"/><worldbody><body name="hips" pos="0 0 1"><freejoint/><site name="imu_link"/>
<geom type="box" size="0.1 0.1 0.1" mass="5"/>
<body name="chest" pos="0 0 0.2"><joint name="waist" axis="0 0 1"/><geom size="0.1" mass="3"/>
<body name="left_arm" pos="0 0.2 0"><joint name="left_arm" axis="0 1 0"/><geom fromto="0 0 0 0 0 -0.3" type="capsule"
size="0.02" mass="0.5"/></body></body>
{LEG.format(n="left", y=0.1)}{LEG.format(n="right", y=-0.1)}</body></worldbody>
<actuator><motor joint="left_hip" gear="2" ctrlrange="-20 20"/>
<position joint="right_hip" forcerange="-40 40"/></actuator>
</mujoco>
"""


def read(robot: object, *feet: str, **options: object) -> LeggedRobot:
    scene = Scene(200)
    scene.add("robot", robot, **options)  # type: ignore[arg-type]
    return read_legged(scene, "robot", feet)


@pytest.mark.parametrize(
    ("name", "feet", "height", "pose"),
    [
        ("go2", "body:{}_foot", 0.28, {"FR_hip_joint": 0.0, "FL_thigh_joint": 0.9, "RL_calf_joint": -1.8}),
        ("go1", "geom:{}_foot_collision", 0.278, {"FR_hip_joint": 0.0, "RR_thigh_joint": 0.9, "RR_calf_joint": -1.8}),
        ("g1", None, 0.76, {"left_hip_pitch_joint": -0.312, "left_knee_joint": 0.669, "left_elbow_joint": 0.0}),
    ],
)
def test_known_robots_get_their_published_stance(name, feet, height, pose):
    found = read(assets_dir() / name / f"{name}.xml")
    if feet is None:
        assert [foot.item for foot in found.feet] == ["body:left_ankle_roll_link", "body:right_ankle_roll_link"]
        assert (found.root, found.torso, found.imu) == ("pelvis", "torso_link", "imu_in_pelvis")
    else:
        assert {foot.item for foot in found.feet} == {feet.format(leg) for leg in ("FL", "FR", "RL", "RR")}
    assert found.height == pytest.approx(height, abs=0.03)
    assert {joint: found.pose[joint] for joint in pose} == pytest.approx(pose, abs=0.1)


def test_guessed_armature_supports_the_robots_weight():
    light = read(mujoco.MjSpec.from_string(BIPED))
    heavy = read(mujoco.MjSpec.from_string(BIPED.replace('0.1 0.1 0.1" mass="5"', '0.1 0.1 0.1" mass="95"')))
    assert heavy.motors["left_hip"] == light.motors["left_hip"]  # given by the file
    armature, effort = heavy.motors["left_knee"]
    thigh = 0.3 * abs(math.sin(heavy.pose["left_hip"]))
    torque = 0.5 * 9.81 * (95 + 3 + 0.5 + 2 * 1) * thigh  # of the mass above a knee, ahead of it
    assert armature * (2 * math.pi * 10) ** 2 * SAG == pytest.approx(torque, rel=0.1)
    assert armature > light.motors["left_knee"][0] and effort == 60.0
    assert heavy.scales.keys() >= {"left_knee"} and "left_hip" not in heavy.scales and not light.scales


def test_missing_motor_data_is_guessed_with_a_note():
    found = read(mujoco.MjSpec.from_string(BIPED))
    feet = [("geom:left_tip", "left_shin"), ("geom:right_tip", "right_shin")]
    assert [(foot.item, foot.body) for foot in found.feet] == feet
    assert (found.torso, found.imu, found.knees) == ("chest", "imu_link", ["left_knee", "right_knee"])
    assert found.motors["left_hip"] == (0.02, 40.0) == found.motors["right_hip"]
    assert found.motors["left_knee"] == (pytest.approx(60.0 * ARMATURE), 60.0)
    assert 1.0 < found.motors["left_arm"][1] < 60.0
    assert [note[:2] for note in found.notes] == ["2 ", "4 "]  # waist and arm; these and the knees
    assert 0.1 <= found.pose["left_knee"] == found.pose["right_knee"] and -1.0 < found.pose["left_hip"] < 0.0
    assert found.pose["left_hip"] == pytest.approx(-0.5 * found.pose["left_knee"], abs=0.06)  # foot below hip


def test_explicit_feet_override_the_guess():
    feet = read(mujoco.MjSpec.from_string(BIPED), "right_tip", "left_shin").feet
    assert [foot.item for foot in feet] == ["geom:right_tip", "body:left_shin"]


@pytest.mark.parametrize(
    ("change", "feet", "line"),
    [
        (("<freejoint/>", ""), (), "no floating base"),
        ((" ", " "), ("left_shn",), "--feet: .*mean 'left_shin'"),
        (("<geom ", '<geom contype="0" conaffinity="0" '), (), "cannot identify the feet"),
        (
            ("<actuator>", '<equality><joint joint1="left_hip" joint2="right_hip"/></equality><actuator>'),
            (),
            "'left_hip' is coupled",
        ),
    ],
)
def test_robots_that_cannot_walk_are_rejected(change, feet, line):
    with pytest.raises(TaskError, match=line):
        read(mujoco.MjSpec.from_string(BIPED.replace(*change)), *feet)


def test_trot_swings_diagonal_feet_together():
    for robot in ("go1", "go2"):
        found = read(assets_dir() / robot / f"{robot}.xml")
        legs = [re.search("F[LR]|R[LR]", foot.item)[0] for foot in found.feet]  # type: ignore[index]
        together = dict(zip(legs, found.trot, strict=True))
        assert together["FL"] == together["RR"] == -together["FR"] == -together["RL"]
    assert sum(read(mujoco.MjSpec.from_string(BIPED)).trot) == 0
