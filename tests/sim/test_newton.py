"""Tests of `sim=newton`: Newton's import and physics of the same MJCF."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mujoco
import numpy as np
import pytest
import torch

from gpusim_rl.errors import ConfigError
from gpusim_rl.sim import Scene
from helpers.raised import raises
from helpers.scenes import ANT, ARM, BALL, advance, ant_scene, arm_scene, everywhere, make, only, scene_with

pytestmark = pytest.mark.skipif(importlib.util.find_spec("newton") is None, reason="pip install newton")

# A free body with a hinge, whose centre of mass is not its origin.
LOPSIDED = """
<mujoco>
  <worldbody>
    <body name="body" pos="0 0 2">
      <freejoint/>
      <geom type="box" size="0.2 0.1 0.05" pos="0.3 0.1 -0.05" mass="2"/>
      <body name="tail" pos="-0.1 0 0">
        <joint name="wag" axis="0 0 1" damping="0.01"/>
        <geom type="capsule" size="0.02" fromto="0 0 0 -0.3 0 0.1" mass="0.2"/>
      </body>
    </body>
  </worldbody>
</mujoco>
"""

CARTPOLE = Path(ANT).with_name("cartpole.xml")


def both(
    num_envs: int, *robots: str | Path, hz: float = 200, ground: bool = False, z: float = 0.0, **newton: int
) -> list[Any]:
    """Make the same scene on MuJoCo and on Newton."""
    sims = []
    for name in ("mujoco", "newton"):
        scene = Scene(physics_hz=hz)
        if ground:
            scene.add_ground()
        for i, robot in enumerate(robots):
            spec = robot if isinstance(robot, Path) else mujoco.MjSpec.from_string(robot)
            scene.add(f"r{i}", spec, pos=(0.0, 3.0 * i, z))
        sims.append(make(name, scene, num_envs, **(newton if name == "newton" else {})))
    return sims


def test_newton_model_equals_mujocos():

    scene = ant_scene()
    scene.add("cartpole", CARTPOLE, pos=(0.0, 5.0, 0.0))
    scene.add("arm", mujoco.MjSpec.from_string(ARM), pos=(0.0, 10.0, 0.0))
    scene.add("body", mujoco.MjSpec.from_string(LOPSIDED), pos=(0.0, 15.0, 0.0))
    sim = make("newton", scene, 2)
    ours, theirs = scene.model, sim._solver.mj_model  # `check_import` has compared most arrays
    for field in ("body_inertia", "body_iquat", "body_invweight0", "dof_invweight0"):
        actual = getattr(sim._solver.mjw_model, field).numpy()
        np.testing.assert_allclose(actual[0], getattr(ours, field), atol=1e-9, rtol=1e-6, err_msg=field)
    option = ("integrator", "cone", "solver", "gravity", "impratio", "tolerance", "ls_tolerance")
    for field in (*option, "disableflags", "enableflags"):
        np.testing.assert_allclose(getattr(theirs.opt, field), getattr(ours.opt, field), rtol=1e-6, err_msg=field)


SHORT = """
<mujoco>
  <worldbody>
    <geom name="floor" type="plane" size="0 0 1" solref="0.01" friction="0.7"/>
    <body name="box" pos="0 0 0.2">
      <freejoint/>
      <geom name="box" type="box" size="0.1 0.1 0.1" solref="0.03" solimp="0.8 0.9" friction="0.6" solmix="3"/>
      <body name="lid">
        <joint name="lid" range="-1 1" limited="true" solreflimit="0.01" solimplimit="0.7" frictionloss="0.1"
          solreffriction="0.04" solimpfriction="0.6 0.7"/>
        <geom type="sphere" size="0.05" priority="1" condim="4" margin="0.01"/>
      </body>
    </body>
  </worldbody>
</mujoco>
"""


def test_omitted_xml_values_get_mujoco_defaults():
    make("newton", scene_with(200, short=SHORT), 2)  # raises ConfigError if any value differs


def test_body_velocities_are_at_the_origin():
    reference, sim = both(4, LOPSIDED)
    random = torch.Generator().manual_seed(0)
    quat = torch.nn.functional.normalize(torch.randn(4, 4, generator=random), dim=1)
    velocity, spin = torch.randn(4, 3, generator=random), 3.0 * torch.randn(4, 3, generator=random)
    robots = [one.articulation("r0") for one in (reference, sim)]
    bodies = [robot.bodies(["body", "tail"]) for robot in robots]
    for one, robot in zip((reference, sim), robots, strict=True):
        where = everywhere(one)
        robot.set_state(where, root_lin_vel=velocity, root_ang_vel=spin)
        robot.set_state(where, root_quat=quat)  # keeps the origin's velocity
        robot.set_state(where, joint_vel=torch.ones(4, 1))
        one.refresh()
        torch.testing.assert_close(robot.root_lin_vel, velocity, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(robot.root_ang_vel, spin, atol=1e-5, rtol=1e-5)
    for _ in range(3):
        for name in ("root_pos", "root_quat", "root_lin_vel", "root_ang_vel", "root_ang_vel_local"):
            left, right = (getattr(robot, name) for robot in robots)
            torch.testing.assert_close(right, left, atol=1e-4, rtol=1e-4, msg=name)
        for name in ("pos", "quat", "lin_vel", "ang_vel"):
            left, right = (getattr(body, name) for body in bodies)
            torch.testing.assert_close(right, left, atol=2e-4, rtol=2e-4, msg=name)
        torch.testing.assert_close(sim.qpos, reference.qpos, atol=1e-5, rtol=1e-5)
        for one in (reference, sim):
            one.step(5)


# An arm with reference angles, whose bodies are in rotated and shifted frames.
FRAMES = """
<mujoco>
  <compiler angle="radian"/>
  <default><geom contype="0" conaffinity="0"/><default class="thin"><geom size="0.02"/></default></default>
  <worldbody>
    <body name="base" pos="0 0 1">
      <geom size="0.1"/>
      <frame pos="0.1 0 0" quat="0.9 0.1 0.3 0" childclass="thin">
        <body name="first">
          <joint name="a" axis="0 1 0" ref="0.5" range="-0.2 1.5"/>
          <geom type="capsule" fromto="0 0 0 0.3 0 0"/>
        </body>
      </frame>
      <body name="second" pos="0 0.1 0">
        <joint name="b" axis="1 0 0" ref="-0.3"/><geom type="capsule" size="0.03 0.1"/>
      </body>
      <frame pos="0 0 0.2"><frame quat="0.7 0 0 0.7"><body name="third">
        <joint name="c" type="slide" axis="0 0 1" ref="0.1" damping="1"/><geom size="0.05" pos="0.1 0 0"/>
      </body></frame></frame>
    </body>
  </worldbody>
  <actuator><position name="a" joint="a" kp="20" kv="1"/><motor name="c" joint="c"/></actuator>
</mujoco>
"""


def test_frames_and_reference_angles_match_mujoco():
    sims = []
    for name in ("mujoco", "newton"):
        scene = Scene(physics_hz=200)
        scene.add("arm", mujoco.MjSpec.from_string(FRAMES), pos=(0.5, 0.0, 0.0), quat=(0.7, 0.0, 0.7, 0.0))
        scene.add("ball", mujoco.MjSpec.from_string(LOPSIDED), pos=(0.0, 3.0, 0.0))
        scene.add_effort_sensors("arm")
        sim = make(name, scene, 2)
        arm = sim.articulation("arm")
        assert arm.joint_names == ["a", "b", "c"]
        torch.testing.assert_close(arm.joint_pos[0], torch.tensor([0.5, -0.3, 0.1]))
        arm.set_state(only(sim, 1), joint_pos=torch.tensor([[1.0, 0.2, 0.15]]).expand(2, 3))
        arm.actuate(torch.tensor([[0.8, 0.5]]).expand(2, 2))
        ball = sim.articulation("ball")
        ball.set_state(everywhere(sim), root_ang_vel=torch.tensor([[0.3, 0.5, 1.0]]).expand(2, 3))
        sim.refresh()
        sims.append(sim)
    for _ in range(20):
        for sim in sims:
            sim.step(1)
        ours, theirs = (sim.articulation("arm") for sim in sims)
        torch.testing.assert_close(theirs.joint_pos, ours.joint_pos, atol=2e-4, rtol=0)
        torch.testing.assert_close(theirs.joint_effort, ours.joint_effort, atol=5e-3, rtol=1e-3)
        torch.testing.assert_close(sims[1].qpos, sims[0].qpos, atol=5e-4, rtol=0)
    assert (sims[0].articulation("arm").joint_effort[:, 0].abs() > 0.1).all()
    sims[1].reset(only(sims[1], 0))
    assert torch.equal(theirs.joint_pos[0], torch.tensor([0.5, -0.3, 0.1])) and (theirs.joint_effort[0] == 0).all()


def test_missing_newton_is_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "newton", None)
    for module in ("newton", "newton_model"):
        monkeypatch.delitem(sys.modules, f"gpusim_rl.sim.{module}", raising=False)
    with raises(ConfigError, key="sim=newton", hint="Try pip install 'gpusim-rl[newton]'"):
        importlib.import_module("gpusim_rl.sim.newton")


TABLE = """
<mujoco>
  <worldbody>
    <body name="table">
      <geom type="box" size="0.1 0.1 0.1"/>
      <geom name="top" type="plane" pos="0 0 0.1" size="1 1 0.1"/>
      <body name="lever"><joint axis="0 0 1"/><geom size="0.1" contype="2" conaffinity="0"/></body>
    </body>
  </worldbody>
</mujoco>
"""


def test_planes_on_fixed_bodies_collide():
    heights = []
    for name in ("mujoco", "newton"):
        scene = Scene(physics_hz=200)
        scene.add("table", mujoco.MjSpec.from_string(TABLE), pos=(0.0, 0.0, 0.4))
        scene.add("ball", mujoco.MjSpec.from_string(BALL), pos=(0.5, 0.0, 0.1))
        sim = make(name, scene, 1)
        advance(sim, 200)
        heights.append(sim.articulation("ball").root_pos[0, 2].item())
    np.testing.assert_array_equal(sim._solver.mj_model.geom_type, sim.scene.model.geom_type)
    assert heights == pytest.approx([0.6, 0.6], abs=2e-3)


@pytest.mark.parametrize(
    ("drive", "word"),
    [(None, "ball joints"), ({"delay": 0.01}, "delays"), ({"effort_limit": 1.0, "velocity_limit": 1.0}, "DC motors")],
)
def test_unsupported_joints_and_drives_are_rejected(drive, word):
    scene = Scene(physics_hz=100)
    body = f'<body name="arm"><joint name="shoulder" type="{"hinge" if drive else "ball"}"/><geom size="0.1"/></body>'
    scene.add("arm", mujoco.MjSpec.from_string(f"<mujoco><worldbody>{body}</worldbody></mujoco>"))
    if drive is not None:
        scene.add_actuators("arm", "shoulder", kind="torque", **drive)
    with raises(ConfigError, key="sim=newton", hint="Try sim=mjwarp") as error:
        make("newton", scene, 1)
    assert word in error.value.problem


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("solver", mujoco.mjtSolver.mjSOL_PGS.value),
        ("disableflags", mujoco.mjtDisableBit.mjDSBL_GRAVITY.value),
        ("disableactuator", 1),
    ],
)
def test_unsupported_option_is_rejected(option, value):
    scene = arm_scene()
    setattr(scene.option, option, value)
    with raises(ConfigError, hint="Try another value, or sim=mujoco") as error:
        make("newton", scene, 1)
    assert f"sim=newton does not support scene.option.{option} =" in error.value.problem


def test_supported_options_are_applied():
    scene = arm_scene()
    values = {"disableflags": mujoco.mjtDisableBit.mjDSBL_CONTACT.value, "solver": mujoco.mjtSolver.mjSOL_CG.value}
    values |= {"wind": [1.0, 2.0, 3.0], "sdf_iterations": 7}
    for option, value in values.items():
        setattr(scene.option, option, value)
    sim = make("newton", scene, 1)
    for option, value in values.items():
        np.testing.assert_allclose(getattr(sim._solver.mj_model.opt, option), value)


# A leg like those of dm_control's quadruped: two hinges of one body, which Newton merges into one joint, and tendons
# over hinges of one body, of several, and of both.
LEG = """
<mujoco>
  <worldbody>
    <body name="hip" pos="0 0 1">
      <joint name="yaw" axis="0 0 1" damping="0.05"/><joint name="pitch" axis="0 1 0" damping="0.05"/>
      <geom size="0.05" pos="0.1 0 0"/>
      <body name="knee" pos="0.3 0 0"><joint name="knee" axis="0 1 0" damping="0.05"/><geom size="0.05" pos="0.1 0 0"/>
        <body name="ankle" pos="0.3 0 0">
          <joint name="ankle" axis="0 1 0" damping="0.05"/><geom size="0.05" pos="0.1 0 0"/>
        </body>
      </body>
    </body>
  </worldbody>
  <tendon>
    <fixed name="lift"><joint joint="pitch" coef="1"/><joint joint="knee" coef="-0.5"/></fixed>
    <fixed name="extend">
      <joint joint="pitch" coef="0.25"/><joint joint="knee" coef="-0.5"/><joint joint="ankle" coef="0.25"/>
    </fixed>
    <fixed name="couple" {couple}>
      <joint joint="ankle" coef="0.3"/><joint joint="knee" coef="0.4"/><joint joint="pitch" coef="0.5"/>
    </fixed>
    <fixed name="turn" {turn}><joint joint="yaw" coef="1"/><joint joint="pitch" coef="-2"/></fixed>
  </tendon>
  <equality>{equality}</equality>
  <actuator>
    <motor name="lift" tendon="lift"/><position name="turn" tendon="turn" kp="5"/><motor name="yaw" joint="yaw"/>
  </actuator>
</mujoco>
"""


TWO_TENDONS = '<tendon tendon1="turn" tendon2="extend" polycoef="0.1 0.5 0 0 0"/>'


@pytest.mark.parametrize(
    "parts",
    [
        {"turn": 'stiffness="3" springlength="0.2" damping="0.1" frictionloss="0.02"'},
        {"couple": 'range="-0.1 0.1" limited="true"', "equality": TWO_TENDONS},
    ],
    ids=["springs", "limits-and-equality"],
)
def test_fixed_tendons_over_hinges_of_one_body_match_mujoco(parts):
    xml = LEG.format(**{"couple": "", "turn": "", "equality": "", **parts})
    sims = both(2, xml)
    for sim in sims:
        sim.articulation("r0").actuate(torch.tensor([[0.1, 0.3, 0.02], [-0.1, 0.0, -0.02]]))
        advance(sim, 60)
    reference, sim = sims
    assert (reference.qpos.abs().amax(dim=0) > 0.01).all()
    torch.testing.assert_close(sim.qpos, reference.qpos, atol=2e-4, rtol=1e-3)
    assert sim._solver.mj_model.nwrap == reference.scene.model.nwrap == 10


def hinge(joints, rest="", body="", geom=""):
    inside = f'<body name="b" pos="0 0 1" {body}>{joints}<geom size="0.05" pos="0.1 0 0" {geom}/></body>'
    return f"<mujoco><worldbody>{inside}</worldbody>{rest}</mujoco>"


HINGE = '<joint name="h" axis="0 1 0"/>'
PATH = '<spatial name="t" stiffness="1"><site site="w"/><site site="e"/></spatial>'


@pytest.mark.parametrize(
    ("xml", "where"),
    [
        (
            hinge(
                HINGE + '<site name="e"/>',
                f'<tendon>{PATH}<fixed name="f"><joint joint="h" coef="1"/></fixed></tendon>',
            ).replace("<worldbody>", '<worldbody><site name="w" pos="0 0 1.3"/>'),
            "tendon 'a/t' with tendon_",
        ),
        (hinge(HINGE + '<joint name="s" type="slide" axis="1 0 0"/>'), "'a/h' with jnt_axis = 1 0 0, expected 0 1 0"),
        (hinge('<joint name="h" actuatorfrcrange="-1 5"/>'), "'a/h' with jnt_actfrcrange = -5 5, expected -1 5"),
        (hinge(HINGE, geom='name="wing" fluidshape="ellipsoid"'), "geom 'a/wing' with geom_fluid"),
        (hinge(HINGE, geom='fluidshape="ellipsoid" contype="0" conaffinity="0"'), "nfluidshape = 0, expected 1"),
    ],
    ids=["tendon-order", "slide-after-hinge", "force-limits", "fluid", "fluid-of-visual-geom"],
)
def test_element_imported_differently_is_rejected_by_name(xml, where):
    with raises(ConfigError, key="sim=newton", hint="Try sim=mjwarp") as error:
        make("newton", scene_with(200, a=xml), 1)
    assert where in error.value.problem and "\n" not in str(error.value)


class Changed:
    """Model with some counts or arrays replaced."""

    def __init__(self, model, **changes):
        self._model, self._changes = model, changes

    def __getattr__(self, name):
        return self._changes.get(name, getattr(self._model, name))


def test_dropped_tendon_is_reported(monkeypatch):
    """Newton's solver drops tendons that it cannot resolve, with a warning that is easily missed."""
    from gpusim_rl.sim import newton_model

    scene = scene_with(200, leg=LEG.format(couple="", turn="", equality=""))
    monkeypatch.delattr(newton_model._Solver, "_init_tendons")
    with pytest.raises(ConfigError, match="tendon 'leg/turn'"):
        make("newton", scene, 1)


def test_import_check_compares_every_count():
    from gpusim_rl.sim.newton_check import check_import

    scene = ant_scene()
    solver = make("newton", scene, 1)._solver
    solved = solver.mj_model
    counts = [name for name in dir(solved) if name.startswith("n") and isinstance(getattr(solved, name), int)]
    assert {"nwrap", "ntendon", "neq", "nu", "na", "nsite", "npair", "nflex"} < set(counts)
    passed = []
    for name in counts:
        solver.mj_model = Changed(solved, **{name: getattr(solved, name) + 1})
        try:
            check_import(scene, solver, 1)
            passed.append(name)
        except ConfigError as error:
            assert name in str(error)
    prefixes = ("nmesh", "nbvh", "nsensor", "ntex", "nskin", "nuser", "nnumeric", "ntuple", "nname")
    others = {name for name in passed if not name.startswith(prefixes)}
    assert others == {
        *("npolygonmax", "noct", "nC", "ncam", "nlight", "nmat", "nkey", "npaths"),
        *("nbuffer", "narena", "nconmax", "njmax"),
    }


TETRAHEDRON = "v 0 0 0\nv 0.2 0 0\nv 0 0.3 0\nv 0 0 0.25\nf 1 3 2\nf 1 2 4\nf 1 4 3\nf 2 3 4\n"


@pytest.mark.parametrize(
    ("folder", "compiler", "mesh"),
    [
        ("meshes", '<compiler meshdir="meshes"/>', ""),
        (".", '<default><mesh scale="0.5 0.6 0.7"/></default>', 'inertia="shell"'),
        (".", "", 'refpos="0.1 0.05 0" refquat="0.9 0.1 0.3 0" scale="2 1 1"'),
    ],
    ids=["meshdir", "class", "frame"],
)
def test_mesh_files_match_mujoco(tmp_path, folder, compiler, mesh):
    (tmp_path / folder).mkdir(exist_ok=True)
    (tmp_path / folder / "tet.obj").write_text(TETRAHEDRON)
    robot = tmp_path / "robot.xml"
    robot.write_text(
        f'<mujoco>{compiler}<asset><mesh file="tet.obj" {mesh}/></asset><worldbody><body name="b" pos="0 0 0.5">'
        '<freejoint/><geom type="mesh" mesh="tet" pos="0.1 0 0" euler="30 0 0"/></body></worldbody></mujoco>'
    )
    reference, sim = both(2, robot, ground=True)
    for each in (reference, sim):
        advance(each, 60)
    assert 0.02 < reference.qpos[0, 2] < 0.1  # on the ground by now
    torch.testing.assert_close(sim.qpos, reference.qpos, atol=2e-4, rtol=1e-3)


def test_mesh_without_scipy_is_rejected(tmp_path, monkeypatch):
    for name in ("scipy", "scipy.spatial"):
        monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "tet.obj").write_text(TETRAHEDRON)
    robot, mesh = tmp_path / "robot.xml", '<asset><mesh file="tet.obj" inertia="convex"/></asset>'
    body = '<body name="b"><freejoint/><geom type="mesh" mesh="tet"/></body>'
    robot.write_text(f"<mujoco>{mesh}<worldbody>{body}</worldbody></mujoco>")
    with raises(ConfigError, key="sim=newton", hint="Try sim=mjwarp") as error:
        make("newton", scene_with(200, b=robot), 1)
    assert "scipy" in error.value.problem


def test_height_field_file_matches_mujoco(tmp_path):
    """The file is in MuJoCo's binary format: a slope along x, steeper along y."""
    x, y = np.meshgrid(np.arange(6), np.arange(5))
    shape = np.array([5, 6], dtype=np.int32)
    (tmp_path / "slope.hf").write_bytes(shape.tobytes() + (x + 3.0 * y).astype(np.float32).tobytes())
    robot = tmp_path / "robot.xml"
    robot.write_text(
        '<mujoco><asset><hfield name="slope" file="slope.hf" size="1 1 0.2 0.1"/></asset><worldbody>'
        '<geom type="hfield" hfield="slope"/><body name="b" pos="0.3 0.2 0.5"><freejoint/><geom size="0.1"/></body>'
        "</worldbody></mujoco>"
    )
    sims = both(1, robot)
    for sim in sims:
        advance(sim, 80)
    assert sims[0].qpos[0, 2] > 0.1 and sims[0].qvel[0, :2].abs().min() > 0.01  # it rolls down
    torch.testing.assert_close(sims[1].qpos, sims[0].qpos, atol=5e-4, rtol=1e-3)


# Two arms that touch their fixed stand and its plane, free bodies that are tied together, and a mocap body.
RULES = """
<mujoco>
  <default><default class="visual"><geom rgba="1 0 0 1"/></default></default>
  <worldbody>
    <body name="stand" pos="0 0 0.5">
      <geom name="stand" type="capsule" size="0.05 0.2"/>
      <geom name="shelf" type="plane" size="1 1 0.1" pos="0 0 -0.1"/>
      <body name="arm" pos="0.2 0 0">
        <joint name="arm" axis="0 1 0" damping="0.1"/>
        <geom name="arm" type="capsule" size="0.04 0.1" pos="0 0 0.05" class="visual"/>
        <body name="tip" pos="0 0 0.2">
          <joint name="tip" axis="0 1 0" damping="0.1"/>
          <geom name="tip" size="0.05" contype="0" conaffinity="0"/>
          <geom name="thumb" size="0.03" pos="0.1 0 0" contype="2" conaffinity="4" condim="4" priority="1"/>
        </body>
      </body>
    </body>
    <body name="paddle" mocap="true" pos="0 0 0.9"><geom name="paddle" size="0.1" contype="4" conaffinity="3"/></body>
    <body name="ball" pos="0.05 0 1.1"><freejoint/><site name="eye"/><geom name="ball" size="0.08"/></body>
    <body name="bead" pos="0.2 0 1.1"><freejoint/><site name="hole"/><geom name="bead" size="0.08" contype="6"/></body>
    <body name="free" pos="0.3 0.3 0.6"><freejoint/><geom name="free" size="0.05"/></body>
  </worldbody>
  <contact>{contact}</contact>
  <equality>{equality}</equality>
</mujoco>
"""
PAIRS = (
    '<pair geom1="tip" geom2="stand" condim="4" margin="0.01"/><pair geom1="ball" geom2="tip" friction="1 1 0 0 0"/>'
)
RULED = {
    "contacts": {"contact": f'{PAIRS}<exclude body1="stand" body2="free"/><exclude body1="paddle" body2="ball"/>'},
    "sites": {"equality": '<weld body1="free" body2="bead"/><connect site1="eye" site2="hole" solref="0.1 1"/>'},
    "joints": {"equality": '<connect body1="ball" anchor="0 0 0.2"/><joint joint1="arm" joint2="tip"/>'},
}


@pytest.mark.parametrize("kind", RULED)
def test_contact_rules_match_mujoco(kind):
    rules = RULES.format(**{"contact": "", "equality": "", **RULED[kind]})
    reference, sim = both(2, rules, rules, hz=500)
    for each in (reference, sim):
        each.step(60)
    torch.testing.assert_close(sim.qpos, reference.qpos, atol=5e-4, rtol=1e-3)
    assert (reference.qpos[0] - torch.as_tensor(sim.scene.model.qpos0)).abs().max() > 0.05


def test_missing_contact_pair_is_rejected_by_geom_names():
    from gpusim_rl.sim.newton_check import check_import

    scene = ant_scene()
    solver = make("newton", scene, 1)._solver
    pairs = solver.mjw_model.nxn_geom_pair_filtered.numpy()
    first, second = (scene.model.geom(int(i)).name for i in pairs[3])
    fewer = SimpleNamespace(numpy=lambda: np.delete(pairs, 3, axis=0))
    solver.mjw_model = Changed(solver.mjw_model, nxn_geom_pair_filtered=fewer)
    with pytest.raises(ConfigError) as error:
        check_import(scene, solver, 1)
    assert repr(first) in str(error.value) and repr(second) in str(error.value)


def egg(mesh: str = "") -> Scene:
    """Return a scene of a convex mesh, a tendon around a cylinder, and a height field."""
    points = np.random.default_rng(0).normal(size=(100, 3))
    points *= np.array([0.2, 0.1, 0.07]) / np.linalg.norm(points, axis=1, keepdims=True)
    vertices = " ".join(f"{number:.5f}" for number in (points + 0.03).ravel())
    return scene_with(
        500,
        egg=f'''<mujoco><asset><mesh name="egg" vertex="{vertices}" {mesh}/>
            <hfield name="hills" nrow="3" ncol="4" size="1 1 0.1 0.1" elevation="0 1 2 3 1 5 2 4 4 3 2 0"/></asset>
            <worldbody><geom name="hills" type="hfield" hfield="hills" pos="0 0 -0.3" euler="0 0 20"/>
            <site name="top" pos="0.3 0 1"/><body name="ball" pos="2 0 1"><freejoint/><geom size="0.1"/></body>
            <body name="egg" pos="0 0 0.3"><freejoint/>
            <inertial pos="0.1 0 0" mass="1" diaginertia="0.01 0.01 0.01"/>
            <geom name="pulley" type="cylinder" size="0.02 0.05" pos="0.2 0 0.2" contype="0" conaffinity="0"/>
            <geom name="egg" type="mesh" mesh="egg" pos="0.1 0 0" euler="30 20 0"/><site name="eye" pos="0.3 0 0.2"/>
            </body></worldbody><tendon><spatial name="rope" stiffness="3"><site site="top"/><geom geom="pulley"/>
            <site site="eye"/></spatial></tendon></mujoco>''',
    )


@pytest.mark.parametrize("mesh", ['inertia="shell"', 'inertia="convex" maxhullvert="90"'])
def test_convex_hulls_match_mujoco(mesh):
    scene = egg(mesh)
    solved, ours = make("newton", scene, 2)._solver.mjw_model, scene.model
    assert ours.mesh_graph[0] == (90 if "90" in mesh else 100)
    for name in ("hfield_size", "hfield_data", "mesh_graph", "mesh_vert", "mesh_polyvert", "mesh_polynormal"):
        np.testing.assert_allclose(getattr(solved, name).numpy(), getattr(ours, name), rtol=1e-6, err_msg=name)
    for name in ("geom_type", "geom_dataid", "geom_pos", "geom_quat", "geom_aabb", "geom_size", "geom_rbound"):
        found = getattr(solved, name).numpy().reshape(-1, *getattr(ours, name).shape)
        np.testing.assert_allclose(found[-1], getattr(ours, name), atol=2e-6, rtol=1e-5, err_msg=name)


def test_meshes_of_fixed_and_moving_bodies_match_mujoco():
    scene = egg()
    still = '<body><geom name="egg" type="mesh" mesh="egg" euler="30 20 0"/></body>'
    vertex = " ".join(map(str, scene.model.mesh_vert[:20].ravel()))
    xml = f'<mujoco><asset><mesh name="egg" vertex="{vertex}"/></asset><worldbody>{still}</worldbody></mujoco>'
    scene.add("still", mujoco.MjSpec.from_string(xml), pos=(0.0, 3.0, 0.0))
    sim = make("newton", scene, 2)
    sim.step(1)
    data = mujoco.MjData(scene.model)
    mujoco.mj_step(scene.model, data)
    for geom in (scene.model.geom(f"{name}/egg").id for name in ("egg", "still")):
        row = sim._geoms.tolist().index(geom)
        for name in ("geom_xpos", "geom_xmat"):
            found = getattr(sim._solver.mjw_data, name).numpy()[:, row].reshape(2, -1)
            np.testing.assert_allclose(found, [getattr(data, name)[geom]] * 2, atol=1e-5)


BLOCKS = """
<mujoco>
  <asset>
    <mesh name="rock" vertex="0 0 0 0.3 0 0.02 0 0.25 0.01 0.3 0.3 0 0.1 0.1 0.3 0.25 0.1 0.2"/>
    <hfield name="hills" nrow="3" ncol="4" size="1 1 0.1 0.1" elevation="0 1 2 3 1 5 2 4 4 3 2 0"/>
  </asset>
  <worldbody>
    <geom name="hills" type="hfield" hfield="hills" euler="0 0 20"/><geom name="floor" type="plane" size="9 9 1"/>
    <body pos="-0.3 0 0.09"><freejoint/><geom name="stone" type="mesh" mesh="rock" euler="30 20 0"/></body>
    <body pos="0.3 0.2 0.12"><freejoint/><geom name="ball" size="0.08"/></body>
    <body pos="3 0 0.09"><freejoint/><geom name="box" type="box" size="0.2 0.2 0.1"/></body>
    <body pos="3 0 0.235" euler="0 88 10"><freejoint/><geom name="bar" type="capsule" size="0.05 0.3"/></body>
    <body pos="6 0 -0.01"><freejoint/><geom name="pebble" type="mesh" mesh="rock" euler="10 0 50"/></body>
  </worldbody>
</mujoco>
"""


def test_contacts_equal_mujoco_warps():
    found = []
    for name in ("mjwarp", "newton"):
        scene = scene_with(500, a=BLOCKS)
        sim = make(name, scene, 1)
        sim.step(1)
        data = sim._data if name == "mjwarp" else sim._solver.mjw_data
        count, contact = int(data.nacon.numpy()[0]), data.contact
        geoms = contact.geom.numpy()[:count]
        geoms = geoms if name == "mjwarp" else sim._geoms.numpy()[geoms]
        places = [contact.pos.numpy()[:count], contact.dist.numpy()[:count, None], contact.frame.numpy()[:count, 0]]
        rows = np.concatenate([geoms, *places], axis=1)
        found.append(rows[np.lexsort(rows[:, :5].round(3).T[::-1])])
    pairs = {"-".join(scene.model.geom(int(i)).name[2:] for i in row[:2]) for row in found[0]}
    assert pairs == {"hills-stone", "hills-ball", "floor-box", "bar-box", "floor-pebble"}
    np.testing.assert_allclose(*found, atol=1e-5)


MACHINE = """
<mujoco>
  <worldbody>
    <geom name="floor" type="plane" size="1 1 1"/><site name="base" pos="0 0 2"/>
    <body name="slider" pos="0 0 1">
      <joint name="slider" type="slide" axis="1 0 0" range="-1 1" actuatorfrcrange="-9 9"/>
      <geom name="slider" type="box" size="0.1 0.1 0.1" pos="0.01 0 0"/><site name="eye" pos="0.1 0 0"/>
      <body name="arm" pos="0.3 0 0"><joint name="arm" axis="0 1 0" damping="0.1" armature="0.1" frictionloss="0.1"/>
        <geom name="arm" type="capsule" size="0.04 0.1" gap="0.01" margin="0.02"/></body></body>
    <body name="free" pos="1 0 1"><freejoint/><geom name="free" size="0.1"/></body>
    <body name="hand" mocap="true" pos="1 1 1"><geom name="hand" size="0.05"/></body>
  </worldbody>
  <contact><pair geom1="free" geom2="arm"/><exclude body1="free" body2="slider"/></contact>
  <equality><weld body1="hand" body2="free"/><joint joint1="arm" joint2="slider" active="false"/></equality>
  <tendon>
    <fixed name="cord" actuatorfrcrange="-9 9"><joint joint="arm" coef="1"/><joint joint="slider" coef="2"/></fixed>
    <spatial name="rope" limited="true" range="0 3"><site site="base"/><site site="eye"/></spatial></tendon>
  <actuator><position name="arm" joint="arm" kp="3" ctrlrange="-1 1" forcerange="-5 5"/>
    <general name="cord" tendon="cord" dyntype="filter" dynprm="0.1" gainprm="2" actrange="-1 2"/></actuator>
</mujoco>
"""


def test_import_check_compares_every_solver_array():
    from gpusim_rl.sim.newton_check import check_import

    scene = scene_with(500, machine=MACHINE)
    solver = make("newton", scene, 1)._solver
    ours, solved = scene.model, solver.mjw_model
    check_import(scene, solver, 1)
    kinds = ["body", "jnt", "dof", "qpos", "geom", "site", "tendon", "wrap", "eq", "pair", "exclude", "actuator"]
    passed = set()
    for name in dir(ours):
        array = getattr(solved, name, None)
        if name.split("_")[0].removesuffix("0") not in kinds or not hasattr(array, "numpy") or not array.size:
            continue
        values = array.numpy() + 1
        solver.mjw_model = Changed(solved, **{name: SimpleNamespace(numpy=lambda values=values: values)})
        try:
            check_import(scene, solver, 1)
            passed.add(name)
        except ConfigError as error:
            assert name in str(error)
            if name.startswith(("dof", "qpos", "wrap")):  # named by their joint or tendon
                assert any(owner in str(error) for owner in ("joint 'machine/slider'", "tendon 'machine/cord'"))
        solver.mjw_model = solved
    weights = "body_invweight0 dof_invweight0 tendon_invweight0 geom_size"  # `_Solver` copies the scene's
    numbering = "body_geomadr body_geomnum geom_dataid dof_Madr body_simple tendon_adr"
    others = "site_type site_size actuator_ctrlspec jnt_actfrclimited tendon_actfrclimited"  # see `_OTHER_ARRAYS`
    follow = "body_subtreemass tendon_length0 geom_rbound actuator_acc0 dof_length actuator_lengthrange"
    pictures = "geom_group geom_matid geom_rgba"
    assert passed - set(f"{weights} {numbering} {others} {follow} {pictures}".split()) == set()


def random_robot(seed: int) -> str:
    """Return trees on fixed, free, hinged and mocap bodies with random masks, pairs, excludes, connects and welds."""
    draw = random.Random(seed)
    bodies, geoms = [], []

    def body(depth: int) -> str:
        name = f"b{len(bodies)}"
        bodies.append(name)
        joint = f'<joint axis="{draw.choice(["1 0 0", "0 1 0", "0 0 1"])}" damping="0.3"/>'
        joint = draw.choice([joint, joint, "", *([] if depth else ["<freejoint/>", "<freejoint/>"])])
        mocap = 'mocap="true"' if not depth and not joint and draw.random() < 0.5 else ""
        inside = joint + '<inertial pos="0 0 0" mass="0.5" diaginertia="0.004 0.005 0.004"/>'
        for _ in range(draw.randint(1, 2)):
            geoms.append(f"g{len(geoms)}")
            size = draw.choice(['size="0.06"', 'type="capsule" size="0.04 0.08"'])
            masks = f'contype="{draw.choice([0, 1, 1, 2, 5])}" conaffinity="{draw.choice([0, 1, 1, 3, 4])}"'
            other = draw.choice(["", 'class="visual"', 'condim="4"', 'priority="1"', 'margin="0.005"'])
            inside += f'<geom name="{geoms[-1]}" {size} pos="0 {draw.uniform(-0.1, 0.1):.3f} 0" {masks} {other}/>'
        inside += "".join(body(depth + 1) for _ in range(draw.randint(0, 2 if depth < 2 else 0)))
        place = " ".join(f"{draw.uniform(-0.2, 0.2) * (1 if depth else 3) + 0.0:.3f}" for _ in range(3))
        return f'<body name="{name}" pos="{place}" {mocap}>{inside}</body>'

    tree = "".join(body(0) for _ in range(3))
    pairs = {tuple(sorted(draw.sample(geoms, 2))) for _ in range(2)}
    rules = "".join(f'<pair geom1="{one}" geom2="{two}"/>' for one, two in sorted(pairs))
    rules += '<exclude body1="{}" body2="{}"/>'.format(*draw.sample(bodies, 2))
    ties = ""
    for kind in draw.choices(["weld", 'connect anchor="0 0 0.1"'], k=draw.randint(0, 2)):
        ties += '<{} body1="{}" body2="{}"/>'.format(kind, *draw.sample(bodies, 2))
    default = '<default><default class="visual"/></default>'
    return (
        f"<mujoco>{default}<worldbody>{tree}</worldbody><contact>{rules}</contact><equality>{ties}</equality></mujoco>"
    )


@pytest.mark.parametrize("seed", [0, 1])  # seeds for which MuJoCo Warp agrees with MuJoCo
def test_random_scenes_move_as_in_mujoco(seed):
    robots = [random_robot(seed + 100 * number) for number in range(1 + seed % 2)]
    sims = reference, sim = both(1, *robots, hz=1000, ground=True, z=1.0, njmax=500, nconmax=100)
    for _ in range(10):
        for each in sims:
            each.step(5)
        torch.testing.assert_close(sim.qpos, reference.qpos, atol=2e-3, rtol=1e-2)
