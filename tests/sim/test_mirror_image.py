"""Tests of mirror images of robots: permutations, signs, errors."""

from __future__ import annotations

import pytest

from gpusim_rl.errors import TaskError
from gpusim_rl.sim.mirror_image import MirrorImage, other_side
from gpusim_rl.spaces import SignedPermutation
from helpers.raised import raises
from helpers.scenes import scene_with

LEG = """
<body name="{side}_hip" pos="0.1 {y} 0">
  <inertial pos="0.01 {lean} -0.02" mass="1" diaginertia="0.01 0.012 0.009"/>
  <joint name="{side}_roll" axis="1 0 0"/>
  <body name="{side}_foot" pos="0 0 -0.3">
    <inertial pos="0 {lean} -0.1" mass="0.5" diaginertia="0.004 0.005 0.002"/>
    <joint name="{side}_pitch" axis="0 {pitch} 0"/>
    <joint name="{side}_reach" type="slide" axis="0 {reach} 0.5"/>
    <geom type="sphere" size="0.05"/>
    <site name="{side}_sole" pos="0.02 {lean} -0.1"/>
  </body>
</body>
"""


def biped(right: str = "right", **changes: object) -> str:
    """Return a robot with a neck and two legs whose pitch axes point in opposite directions."""
    legs = LEG.format(side="left", y=0.2, lean=0.01, pitch=1, reach=1)
    legs += LEG.format(**{"side": right, "y": -0.2, "lean": -0.01, "pitch": -1, "reach": -1, **changes})
    return f"""
    <mujoco>
      <worldbody>
        <body name="trunk" pos="0 0 1">
          <freejoint/>
          <inertial pos="0.02 0 0.1" mass="5" diaginertia="0.1 0.2 0.15"/>
          <body name="head" pos="0.1 0 0.4">
            <inertial pos="0 0 0.1" mass="1" diaginertia="0.01 0.01 0.01"/>
            <joint name="neck" axis="0 0 1"/>
          </body>
          {legs}
        </body>
      </worldbody>
      <actuator>
        <position name="neck" joint="neck" kp="10"/>
        <motor name="left_pitch" joint="left_pitch" gear="20"/>
        <motor name="{right}_pitch" joint="{right}_pitch" gear="-20"/>
        <motor name="left_roll" joint="left_roll" gear="20"/>
        <motor name="{right}_roll" joint="{right}_roll" gear="20"/>
      </actuator>
    </mujoco>"""


def mirror_image(xml: str) -> MirrorImage:
    return MirrorImage(scene_with(200.0, robot=xml), "robot")


def test_left_and_right_are_swapped_with_axis_signs():
    image = mirror_image(biped())
    assert image.bodies == {
        "trunk": "trunk",
        "head": "head",
        "left_hip": "right_hip",
        "left_foot": "right_foot",
        "right_hip": "left_hip",
        "right_foot": "left_foot",
    }
    # neck, then roll, pitch, reach: rotations about x or z flip, those about y only where the axes are opposite
    assert image.joints == SignedPermutation([0, 4, 5, 6, 1, 2, 3], [-1.0, -1.0, -1.0, 1.0, -1.0, -1.0, 1.0])
    assert image.actuators == SignedPermutation([0, 2, 1, 4, 3], [-1.0, 1.0, 1.0, -1.0, -1.0])  # gears differ in sign
    assert image.among(["left_foot", "head", "right_foot"]) == [2, 1, 0]
    assert image.among(["right_sole", "left_sole"]) == [1, 0]


def test_counterparts_are_found_by_position():
    assert mirror_image(biped("second")).joints == mirror_image(biped()).joints


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("left_hip", "right_hip"),
        ("RightFoot", "LeftFoot"),
        ("FL_calf_joint", "FR_calf_joint"),
        ("RR_thigh", "RL_thigh"),
        ("LH_KFE", "RH_KFE"),
        ("l_arm_2", "r_arm_2"),
        ("pelvis", "pelvis"),
        ("collar", "collar"),
    ],
)
def test_counterpart_names(one, other):
    assert other_side(one) == other and other_side(other) == one


def test_symmetric_model_has_no_asymmetry():
    assert mirror_image(biped()).measure() < 1e-12


def test_asymmetric_model_has_measurable_asymmetry():
    asymmetry = mirror_image(biped(lean=-0.013)).measure()  # 3 mm
    assert 1e-4 < asymmetry < 0.1


@pytest.mark.parametrize(
    ("kind", "k", "name"), [("joint", 0, "neck"), ("joint", 5, "left_pitch"), ("actuator", 4, "left_roll")]
)
def test_wrong_sign_is_reported(kind, k, name):
    image = mirror_image(biped())
    signs = getattr(image, f"{kind}s").signs
    signs[k] = -signs[k]
    key, right = f"mirror image of 'robot', {kind} {name!r}", f"{-signs[k]:+.0f}"
    with raises(TaskError, key=key, expected=right, got=signs[k]):
        image.measure()


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"y": -0.3}, r"'left_hip' .*\[0.1, -0.2, 0.0\] m"), ({"reach": 0}, "'left_reach' and 'right_reach'")],
)
def test_asymmetric_robot_is_rejected(changes, words):
    with pytest.raises(TaskError, match=f"^'robot' .* x-z plane: .*{words}"):
        mirror_image(biped(**changes))


def test_off_plane_rigid_attachment_maps_to_itself():
    mount = """<body name="trunk" pos="0 0 1"><body name="camera" pos="0.3 -0.1 0.2">
        <inertial pos="0 0 0" mass="0.01" diaginertia="1e-5 1e-5 1e-5"/><body name="lens" pos="0 0.02 0"/></body>
        <body name="one" pos="0.1 -0.11 0"/><body name="two" pos="0.1 0.09 0"/><body name="three" pos="0.1 -0.09 0"/>"""
    image = mirror_image(biped().replace('<body name="trunk" pos="0 0 1">', mount))
    assert (image.bodies["camera"], image.bodies["lens"]) == ("camera", "lens")
    assert image.bodies["left_foot"] == "right_foot"
    assert 0.0 < image.measure() < 0.05


def test_missing_counterpart_is_reported():
    image = mirror_image(biped())
    with pytest.raises(TaskError, match=r"'right_foot', .* 'left_foot'"):
        image.among(["left_foot", "head"])
    with pytest.raises(TaskError, match="'tail'"):
        image.among(["tail"])
