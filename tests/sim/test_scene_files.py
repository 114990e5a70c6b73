"""Tests of users' robot files: they load unchanged and move as in plain MuJoCo."""

from __future__ import annotations

import itertools
import logging
import os
import resource
import struct
import sys
from importlib.util import find_spec
from pathlib import Path
from threading import Event, Thread
from typing import Any

import mujoco
import numpy as np
import pytest
import torch
from PIL import Image

from gpusim_rl.errors import TaskError
from gpusim_rl.files import budgets
from gpusim_rl.sim import Scene
from gpusim_rl.sim import scene as scene_module
from gpusim_rl.sim.params import find_elements
from helpers.raised import raises
from helpers.scenes import ARM, BALL, advance, everywhere, make, only, scene_with

ROBOTS = Path(__file__).parents[1] / "helpers" / "robots"
GYMNASIUM = Path((find_spec("gymnasium") or sys).origin or "").parent / "envs" / "mujoco" / "assets"  # type: ignore[union-attr]
FILES = (
    *("ant", "half_cheetah", "hopper", "humanoid", "humanoidstandup", "inverted_double_pendulum"),
    *("inverted_pendulum", "point", "pusher_v5", "reacher", "swimmer", "walker2d_v5"),
)

# An arm, a free cup, a drawer behind it, and a chain on a ball joint: several bodies of every kind.
KITCHEN = """
<mujoco>
  <worldbody>
    <light pos="0 0 3"/>
    <camera name="front" pos="0 -2 1"/>
    <geom name="floor" type="plane" size="0 0 1"/>
    <geom name="table" type="box" size="0.3 0.3 0.1" pos="1 0 0.1"/>
    <site name="mark"/>
    <body name="arm" pos="0 0 1">
      <joint name="shoulder" axis="0 1 0" damping="0.1"/><geom name="arm" size="0.05" mass="1" pos="0.2 0 0"/>
    <body name="hand" pos="0.3 0 0"><joint name="elbow" axis="0 1 0"/><geom size="0.05" mass="1" pos="0.1 0 0"/></body>
    </body>
    <body name="cup" pos="1 0 0.25"><freejoint/><geom name="cup" size="0.05" mass="0.2"/>
      <body name="lid" pos="0 0 0.06"><joint name="lid" axis="1 0 0"/><geom size="0.02" mass="0.05"/></body>
    </body>
    <body name="drawer" pos="0 2 0.5">
      <joint name="drawer" type="slide" axis="1 0 0"/><geom type="box" size="0.1 0.1 0.1" mass="1"/>
    </body>
    <body name="chain" pos="0 3 2"><joint name="ball" type="ball"/><geom size="0.05" pos="0 0 -0.3" mass="0.5"/>
    <body name="end" pos="0 0 -0.3"><joint name="end" axis="1 0 0"/><geom size="0.05" pos="0 0 -0.3" mass="0.5"/></body>
    </body>
    <body name="post" pos="0 4 0"><geom type="box" size="0.1 0.1 1"/></body>
  </worldbody>
  <actuator>
    <motor name="lid" joint="lid"/><motor name="elbow" joint="elbow"/><motor name="end" joint="end"/>
  </actuator>
  <equality><joint joint1="elbow" joint2="shoulder" polycoef="0.1 0.5 0 0 0"/></equality>
</mujoco>
"""


@pytest.fixture(params=["mujoco", pytest.param("mjwarp", marks=pytest.mark.slow)])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


def kitchen() -> Scene:
    scene = scene_with(200, kitchen=KITCHEN)
    scene.add("other", mujoco.MjSpec.from_string(BALL), pos=(3.0, 0.0, 0.0))
    return scene


@pytest.mark.filterwarnings("ignore:compiler attribute 'settotalmass':UserWarning")
@pytest.mark.parametrize("name", FILES)
def test_gymnasium_files_move_as_in_plain_mujoco(name):
    file = GYMNASIUM / f"{name}.xml"
    if not file.is_file():
        pytest.skip("needs gymnasium")
    alone = mujoco.MjModel.from_xml_path(str(file))
    scene = Scene(1.0 / alone.opt.timestep)
    scene.add("robot", file)
    alone.opt.timestep = scene.model.opt.timestep
    sim, data = make("mujoco", scene, 1), mujoco.MjData(alone)
    robot = sim.articulation("robot")
    assert scene.articulation_names == ["robot"] and robot.actuator_names
    data.qpos[:] = sim.qpos[0]  # float32
    random = torch.Generator().manual_seed(0)
    for _ in range(200):
        control = 0.6 * torch.rand(1, alone.nu, generator=random) - 0.3
        robot.actuate(control)
        data.ctrl[:] = control[0]
        sim.step(1)
        mujoco.mj_step(alone, data)
    moved = torch.tensor(np.concatenate([data.qpos, data.qvel]), dtype=torch.float32)
    assert moved.isfinite().all() and moved.abs().max() > 1e-3
    state = sim.state_dict()["mirror"][0, 1:]
    torch.testing.assert_close(state, moved, rtol=1e-6, atol=1e-6)
    sim.close()


def test_unsupported_solver_is_replaced_with_a_warning(caplog):
    scene = scene_with(100, arm=ARM)
    scene.option.solver = mujoco.mjtSolver.mjSOL_PGS
    with caplog.at_level(logging.WARNING, "gpusim_rl"):
        sim: Any = make("mjwarp", scene, 2)
    [line] = [record.message for record in caplog.records if "PGS" in record.message]
    assert line.startswith("sim=mjwarp")
    assert sim._model.opt.solver == mujoco.mjtSolver.mjSOL_NEWTON
    assert scene.model.opt.solver == mujoco.mjtSolver.mjSOL_PGS


def test_additional_free_bodies_are_separate_articulations(backend):
    scene = kitchen()
    assert scene.articulation_names == ["kitchen", "kitchen/cup", "other"]
    sim = make(backend, scene, 3)
    kitchen_, cup, other = (sim.articulation(name) for name in scene.articulation_names)
    assert kitchen_.body_names == ["arm", "hand", "drawer", "chain", "end", "post"]
    assert kitchen_.joint_names == ["shoulder", "elbow", "drawer", "end"]  # ball joints are not listed
    assert (cup.body_names, cup.joint_names, cup.actuator_names) == (["cup", "lid"], ["lid"], ["lid"])
    assert kitchen_.actuator_names == ["elbow", "end"]
    assert cup.default_root_pos.tolist() == [1.0, 0.0, 0.25]
    assert other.default_root_pos.tolist() == [3.0, 0.0, 0.5]
    assert find_elements(scene, "body_mass", "kitchen/cup", None)[1] == ["cup", "lid"]
    assert "cup" not in find_elements(scene, "body_mass", "kitchen", None)[1]
    assert find_elements(scene, "geom_friction", "ground", None)[1] == ["ground", "ground"]  # floor and table
    with pytest.raises(TaskError, match="fixed base"):
        kitchen_.set_state(everywhere(sim), root_pos=torch.zeros(3, 3))


def test_state_of_non_contiguous_joints_is_written_and_read(backend):
    sim = make(backend, kitchen(), 3)
    room, cup = sim.articulation("kitchen"), sim.articulation("kitchen/cup")
    ends, poses = room.bodies(["end", "hand"]), cup.bodies(["lid"])
    sim.reset(everywhere(sim))
    before, place = sim.qpos.clone(), torch.tensor([[2.0, 1.0, 0.8]]).expand(3, 3)
    pos = torch.tensor([[0.3, 0.25, 0.1, 0.4]]).expand(3, 4)
    room.set_state(only(sim, 1), joint_pos=pos, joint_vel=2.0 * pos)
    cup.set_state(only(sim, 1), root_pos=place, joint_pos=torch.full((3, 1), 0.2))
    sim.refresh()
    torch.testing.assert_close(room.joint_pos[1], pos[1])
    torch.testing.assert_close(room.joint_vel[1], 2.0 * pos[1])
    data, model = mujoco.MjData(sim.scene.model), sim.scene.model
    data.qpos[:] = sim.qpos[1]
    data.qvel[model.joint("kitchen/end").dofadr] = 0.8
    for name, value in zip(room.joint_names, pos[1], strict=True):
        assert data.joint(f"kitchen/{name}").qpos[0] == pytest.approx(float(value))
        data.joint(f"kitchen/{name}").qvel[0] = 2.0 * float(value)
    mujoco.mj_forward(model, data)
    for view, names in ((ends, ("end", "hand")), (poses, ("lid",))):
        for column, name in enumerate(names):
            body = data.body(f"kitchen/{name}")
            np.testing.assert_allclose(view.pos[1, column], body.xpos, atol=1e-5)
            velocity = np.zeros(6)
            mujoco.mj_objectVelocity(model, data, mujoco.mjtObj.mjOBJ_XBODY, body.id, velocity, 0)
            np.testing.assert_allclose(view.lin_vel[1, column], velocity[3:], atol=1e-5)
    assert torch.equal(sim.qpos[[0, 2]], before[[0, 2]])
    room.actuate(torch.tensor([[0.0, 0.7]]).expand(3, 2))
    room.set_joint_effort(torch.tensor([[0.0, 0.0, 2.0, 0.0]]).expand(3, 4))
    assert sim.ctrl[0].tolist() == pytest.approx([0.0, 0.0, 0.7])  # type: ignore[attr-defined]
    sim.step(1)
    assert float(room.joint_vel[0, 2]) == pytest.approx(2.0 / 200)  # 2 N on 1 kg for a step
    assert not sim.diverged.any()


def test_fixtures_and_robots_stand_at_their_pose():
    scene = Scene(physics_hz=100)
    table = '<mujoco><worldbody><geom name="top" type="box" size="1 1 0.1" pos="0 0 1"/></worldbody></mujoco>'
    scene.add("table", mujoco.MjSpec.from_string(table), pos=(0.0, 0.0, -1.0))
    rock = '<mujoco><worldbody><body name="rock"><geom size="0.3"/></body></worldbody></mujoco>'
    scene.add("rock", mujoco.MjSpec.from_string(rock), pos=(1.0, 0.0, 0.5))
    for side in (-1.0, 1.0):
        scene.add(f"arm{side:+.0f}", mujoco.MjSpec.from_string(ARM), pos=(0.0, side, 0.0), quat=(0.0, 0.0, 0.0, 1.0))
    assert scene.articulation_names == ["rock", "arm-1", "arm+1"]  # world geoms are not an articulation
    sim = make("mujoco", scene, 2)
    rock_, arm = sim.articulation("rock"), sim.articulation("arm+1")
    assert rock_.joint_names == [] and rock_.root_pos[0].tolist() == [1.0, 0.0, 0.5]
    assert rock_.bodies(["rock"]).pos[1, 0].tolist() == [1.0, 0.0, 0.5]
    assert arm.root_pos[0].tolist() == [0.0, 1.0, 1.0] and (arm.root_lin_vel == 0.0).all()
    arm.actuate(torch.ones(2, 1))
    sim.step(1)
    assert float(arm.joint_vel[0, 0]) != float(sim.articulation("arm-1").joint_vel[0, 0])
    with pytest.raises(TaskError, match=r"add\('table'\): .* already"):
        scene.add("table", mujoco.MjSpec.from_string(rock))
    still = scene_with(100, rock=rock)
    with pytest.raises(TaskError, match="no joints"):
        make("mujoco", still, 1)


def height(scene: Scene, x: float, y: float) -> float:
    data = mujoco.MjData(scene.model)
    mujoco.mj_forward(scene.model, data)
    point, down, geom = np.array([x, y, 9.0]), np.array([0.0, 0.0, -1.0]), np.zeros(1, dtype=np.int32)
    return 9.0 - mujoco.mj_ray(scene.model, data, point, down, None, 1, -1, geom)


def test_height_field_has_the_arrays_heights():
    heights = np.array([[0.0, 0.1], [0.2, -0.3], [0.4, 0.5]])
    scene = Scene(physics_hz=100)
    scene.add_heightfield(heights, (2.0, 1.0), pos=(1.0, 0.0, 0.2))
    for i, x in enumerate((1e-4, 1.0, 2.0 - 1e-4)):
        for j, y in enumerate((1e-4 - 0.5, 0.5 - 1e-4)):
            assert height(scene, x, y) == pytest.approx(heights[i, j] + 0.2, abs=1e-3)
    scene.add_heightfield(heights, (2.0, 1.0), pos=(5.0, 0.0, 0.0), name="second")
    assert scene.model.nhfield == 2


def test_picture_becomes_a_height_field(tmp_path):
    Image.fromarray(np.array([[255, 0, 0], [0, 0, 102]], dtype=np.uint8)).save(tmp_path / "hill.png")
    scene = Scene(physics_hz=100)
    scene.add_heightfield(tmp_path / "hill.png", (2.0, 1.0), height=0.5)
    for x, y, expected in ((-1, 0.5, 0.5), (1, 0.5, 0.0), (1, -0.5, 0.2), (-1, -0.5, 0.0)):
        assert height(scene, 0.9999 * x, 0.9999 * y) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(
    ("heights", "size", "more", "word"),
    [
        (np.zeros(3), (1, 1), {}, r"shape \[3\]"),
        (np.full((2, 2), np.nan), (1, 1), {}, "finite"),
        (np.zeros((2, 2)), (1, 0), {}, r"size: .*got \(1, 0\)"),
        (np.zeros((2, 2)), (1, 1), {"height": 1.0}, "images"),
        ("hill.png", (1, 1), {}, "height: .*got None"),
        ("nowhere.png", (1, 1), {"height": 1.0}, "cannot read nowhere.png"),
    ],
)
def test_invalid_height_field_is_rejected_in_one_line(heights, size, more, word):
    with pytest.raises(TaskError, match=f"^Scene.add_heightfield: .*{word}") as error:
        Scene(100).add_heightfield(heights, size, **more)
    assert "\n" not in str(error.value)


# Everything that a keyframe can move: a free body after another one, several joints on one body, joints with a `ref`,
# off-centre axes and frames, a ball joint, and ties between joints and between tendons.
POSES = """
<mujoco>
  <compiler angle="radian"/>
  <worldbody>
    <body name="planar" pos="0 0 1" euler="0.1 0.2 0.3">
      <joint name="x" type="slide" axis="1 0 0.2" pos="0 0 0.1"/>
      <joint name="tilt" axis="0.1 1 0" pos="0.1 0 0.2" ref="0.3"/>
      <joint name="z" type="slide" axis="0 0.3 1"/>
      <joint name="turn" axis="0 0.2 1" pos="0 0.3 0"/>
      <geom size="0.1" pos="0.2 0 0"/>
      <frame pos="0.1 0.2 0.3" euler="0.4 0 0"><body name="leaf" pos="0.3 0 0">
        <joint name="leaf" pos="0.05 0 0" ref="-0.1"/><geom size="0.1" pos="0.2 0 0"/>
      </body></frame>
    </body>
    <frame pos="1 2 0" euler="0 0 0.7"><body name="box" pos="1 0 1"><freejoint/><geom size="0.1"/></body></frame>
    <body name="swing" pos="0 3 2"><joint name="ball" type="ball" pos="0 0 0.2"/><geom size="0.1" pos="0.1 0 0"/></body>
  </worldbody>
  <tendon>
    <fixed name="one"><joint joint="x" coef="1"/></fixed>
    <fixed name="two"><joint joint="leaf" coef="2"/></fixed>
  </tendon>
  <equality>
    <joint name="tie" joint1="leaf" joint2="tilt" polycoef="0.1 0.5 0.2 -0.1 0.3"/>
    <tendon name="ropes" tendon1="one" tendon2="two" polycoef="0 0.7 0.1 0 0"/>
  </equality>
<keyframe><key name="zero"/><key name="home" qpos="0.1 0.5 -0.2 0.4 0.6 1.5 2 0.7 0.6 0 0.8 0 0.8 0 0.6 0"/></keyframe>
</mujoco>
"""


def test_keyframe_becomes_the_reference_pose():
    alone = mujoco.MjModel.from_xml_string(POSES)
    scene = Scene(physics_hz=100)
    scene.add("poses", mujoco.MjSpec.from_string(POSES), keyframe="home")
    model, key = scene.model, alone.key("home").qpos
    np.testing.assert_allclose(model.qpos0[:12], key[:12], atol=1e-12)
    np.testing.assert_allclose(model.qpos0[12:], [1, 0, 0, 0])  # ball rotations are relative to the keyframe
    random = np.random.default_rng(0)
    for trial in range(5):
        theirs, ours = mujoco.MjData(alone), mujoco.MjData(model)
        theirs.qpos[:] = key
        theirs.qpos[:5] += (trial > 0) * random.normal(size=5)
        ours.qpos[:12], ours.qpos[12] = theirs.qpos[:12], 1.0
        for one, data in ((alone, theirs), (model, ours)):
            mujoco.mj_forward(one, data)
        np.testing.assert_allclose(ours.xpos[1:], theirs.xpos[1:], atol=1e-9)
        np.testing.assert_allclose(ours.xmat[1:], theirs.xmat[1:], atol=1e-9)
        rows = ours.efc_type == mujoco.mjtConstraint.mjCNSTR_EQUALITY.value
        np.testing.assert_allclose(ours.efc_pos[rows], theirs.efc_pos[rows], atol=1e-9)
        np.testing.assert_allclose(
            ours.efc_J.reshape(ours.nefc, -1)[rows], theirs.efc_J.reshape(theirs.nefc, -1)[rows], atol=1e-9
        )


def test_worlds_start_in_the_keyframe(backend):
    scene = Scene(physics_hz=100)
    key = '<keyframe><key name="bent" qpos="0.4 -0.7"/></keyframe>'
    scene.add("arm", mujoco.MjSpec.from_string(ARM.replace("</mujoco>", f"{key}</mujoco>")), keyframe="bent")
    sim = make(backend, scene, 2)
    sim.reset(everywhere(sim))
    assert sim.articulation("arm").joint_pos[1].tolist() == pytest.approx([0.4, -0.7])
    assert scene.model.nkey == 0


TIED = """
<mujoco>
  <worldbody>
    <body name="a"><joint name="a"/><geom size="0.1"/></body>
    <body name="b" pos="1 0 0"><joint name="b"/><geom size="0.1"/></body>
  </worldbody>
  <equality><weld body1="a" body2="b"/></equality>
  <keyframe><key name="home" qpos="0.1 0.2"/></keyframe>
</mujoco>
"""


@pytest.mark.parametrize(
    ("xml", "keyframe", "problem", "hint"),
    [
        (POSES, "hom", "no keyframe 'hom'", "Did you mean 'home'? Available: zero, home"),
        (ARM, "home", "no keyframe 'home'", "Available: none"),
        (TIED, "home", "keyframe 'home' violates the equality constraint between 'a' and 'b'", ""),
    ],
)
def test_unsuitable_keyframe_is_rejected(xml, keyframe, problem, hint):
    with raises(TaskError, key="Scene.add('it')", problem=problem, hint=hint):
        Scene(100).add("it", mujoco.MjSpec.from_string(xml), keyframe=keyframe)


def test_urdf_arm_has_the_files_joints_and_limits():
    scene = scene_with(200, arm=ROBOTS / "arm.urdf")
    model = scene.model
    arm = make("mujoco", scene, 1).articulation("arm")
    assert arm.body_names == ["base", "upper", "lower", "hand", "left", "right"]  # fixed joints are kept
    assert arm.joint_names == ["shoulder", "elbow", "left_finger", "right_finger"]
    assert arm.joint_limits[1].tolist() == pytest.approx([-2.5, 2.5]) and arm.joint_limits[0].isinf().all()
    elbow = model.joint("arm/elbow")
    assert (elbow.damping[0], elbow.frictionloss[0]) == (0.05, 0.02)
    assert model.jnt_actfrcrange[elbow.id].tolist() == [-10, 10]
    assert scene.velocity_limits("arm") == {"shoulder": 6, "elbow": 8, "left_finger": 0.2, "right_finger": 0.2}
    lower = model.body("arm/lower")
    assert lower.mass[0] == 0.6 and sorted(lower.inertia) == pytest.approx([0.001, 0.006, 0.006])
    with raises(TaskError, key="Scene.velocity_limits", hint="Available: arm"):
        scene.velocity_limits("leg")


def test_mimic_finger_follows_its_joint(backend):
    scene = Scene(physics_hz=500, integrator="implicitfast")
    scene.add("arm", ROBOTS / "arm.urdf")
    scene.add_actuators("arm", "left_finger", kind="position", stiffness=200.0, damping=5.0)
    sim = make(backend, scene, 1)
    arm = sim.articulation("arm")
    arm.actuate(torch.full((1, 1), 0.03))
    advance(sim, 400)
    left, right = arm.joint_pos[0, 2:].tolist()
    assert left == pytest.approx(0.03, abs=1e-3) and right == pytest.approx(left, abs=5e-4)


def test_urdf_base_can_be_fixed_or_free():
    for fixed, free in ((None, False), (True, False), (False, True)):
        scene = Scene(physics_hz=200)
        scene.add("dog", ROBOTS / "quadruped.urdf", pos=(0, 0, 0.45), fixed_base=fixed)
        assert scene.model.nq == 12 + 7 * free
    assert scene.model.body("dog/base").mass[0] == pytest.approx(0, abs=1e-5)
    assert scene.model.body_subtreemass[1] == pytest.approx(12.0)
    dog = make("mujoco", scene, 1).articulation("dog")
    assert dog.default_root_pos.tolist() == pytest.approx([0, 0, 0.45]) and len(dog.joint_names) == 12
    bolted = Scene(physics_hz=200)
    bolted.add("ball", mujoco.MjSpec.from_string(BALL), fixed_base=True)
    assert bolted.model.nq == 0


MESHES = """
<robot name="r">
  <link name="base">
    <inertial><mass value="2"/><inertia ixx="0.1" ixy="0" ixz="0" iyy="0.1" iyz="0" izz="0.1"/></inertial>
    <collision><geometry><mesh filename="{stl}"/></geometry></collision>
    <visual><geometry><mesh filename="{obj}" scale="0.5 0.5 0.5"/></geometry></visual>
    <visual><geometry><mesh filename="{obj}" scale="2 2 2"/></geometry></visual>
  </link>
  <joint name="j" type="continuous"><parent link="base"/><child link="l"/></joint>
  <link name="l"><inertial><mass value="1"/><inertia ixx="1" ixy="0" ixz="0" iyy="1" iyz="0" izz="1"/></inertial></link>
</robot>
"""
CORNERS = np.array([[0, 0, 0], [0.2, 0, 0], [0, 0.2, 0], [0, 0, 0.2]])
FACES = ((0, 2, 1), (0, 1, 3), (0, 3, 2), (1, 2, 3))


@pytest.fixture
def package(tmp_path) -> Path:
    """ROS package with a tetrahedron as STL and as OBJ under the same name."""
    root = tmp_path / "ws" / "my_robot"
    for folder in ("visual", "collision", "urdf"):
        (root / folder).mkdir(parents=True)
    vertices = "".join("v {} {} {}\n".format(*corner) for corner in CORNERS)
    faces = "".join("f {} {} {}\n".format(*(index + 1 for index in face)) for face in FACES)
    (root / "visual" / "base.obj").write_text(vertices + faces)
    triangles = b"".join(struct.pack("<12fH", 0, 0, 0, *CORNERS[list(face)].ravel(), 0) for face in FACES)
    (root / "collision" / "base.stl").write_bytes(bytes(80) + struct.pack("<I", len(FACES)) + triangles)
    return root


def sizes(scene: Scene) -> list[float]:
    """Return the length of the short edges of the scene's tetrahedra [m]; compiled meshes are rotated."""
    model = scene.model
    spans = zip(model.mesh_vertadr, model.mesh_vertnum, strict=True)
    vertices = (model.mesh_vert[first : first + number] for first, number in spans)
    return [float(max(np.linalg.norm(a - b) for a in v for b in v)) / 2**0.5 for v in vertices]


@pytest.mark.parametrize("names", ["meshdir", "named"])
def test_meshes_are_found_by_meshdir_and_package(package, names):
    prefix = "package://other_name/" if names == "named" else ""
    text = MESHES.format(stl=f"{prefix}collision/base.stl", obj=f"{prefix}visual/base.obj")
    if names == "meshdir":
        text = text.replace('name="r">', 'name="r"><mujoco><compiler meshdir=".."/></mujoco>')
    (package / "urdf" / "r.urdf").write_text(text)
    scene = Scene(100)
    packages = {"other_name": package} if names == "named" else None
    scene.add("robot", package / "urdf" / "r.urdf", packages=packages)
    assert sizes(scene) == pytest.approx([0.2, 0.1, 0.4], rel=1e-5)
    assert scene.model.geom_contype.tolist() == [1, 0, 0]


NOTED = ("package://other/", "package://somewhere/else/my_robot/", "file://$(find other)/", "C:\\robots\\", "/home/no/")
QUIET = ("package://my_robot//", "model://my_robot/", "file:{}/", "file://{}/", "$(find my_robot)/", " ../", "..\\")


@pytest.mark.parametrize("prefix", NOTED + QUIET)
def test_meshes_are_found_by_path_suffix(package, caplog, prefix):
    place = prefix.format(package)
    text = MESHES.format(stl=f"{place}collision/base.stl", obj=f"{place}visual/base.obj")
    (package / "urdf" / "r.urdf").write_text(text)
    scene = scene_with(100, robot=package / "urdf" / "r.urdf")
    assert sizes(scene) == pytest.approx([0.2, 0.1, 0.4], rel=1e-5)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == (prefix in NOTED) and all(f"{package}/collision/base.stl" in line for line in lines)


@pytest.mark.parametrize("name", ["my_robot.urdf", "my_robot.xml", "collision/base.stl"])
def test_git_lfs_pointer_is_reported(package, name):
    (package / "my_robot.urdf").write_text(MESHES.format(stl="collision/base.stl", obj="visual/base.obj"))
    (package / "my_robot.xml").write_text(MJCF_MESH.format(file="base.stl"))
    (package / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1000000\n")
    file = package / (name if "robot" in name else "my_robot.urdf")
    with pytest.raises(TaskError, match="git lfs pull"):
        Scene(100).add("robot", file)


MJCF_MESH = """
<mujoco>
  <compiler meshdir="collision"/>
  <asset><mesh name="m" file="{file}"/></asset>
  <worldbody><body name="base"><geom type="mesh" mesh="m"/></body></worldbody>
</mujoco>
"""


def test_strippath_of_mjcf_is_respected(package):
    text = MJCF_MESH.format(file="C:\\cad\\parts/base.stl").replace("<compiler", '<compiler strippath="true"')
    (package / "r.xml").write_text(text)
    scene = scene_with(100, robot=package / "r.xml")
    assert sizes(scene) == pytest.approx([0.2], rel=1e-5)


def test_missing_mjcf_mesh_names_file_body_and_folder(package):
    (package / "r.xml").write_text(MJCF_MESH.format(file="bas.stl"))
    with pytest.raises(TaskError) as error:
        Scene(100).add("robot", package / "r.xml")
    words = (f"{package}/r.xml", "collision/bas.stl", "'base'", f"{package}/collision", "meshdir")
    assert [word for word in words if word not in str(error.value)] == [] and "\n" not in str(error.value)


def test_attached_model_keeps_its_meshdir(package):
    (package / "r.xml").write_text(MJCF_MESH.format(file="base.stl"))
    (package / "urdf" / "all.xml").write_text(
        '<mujoco><asset><model name="r" file="../r.xml"/></asset><worldbody><body name="b"><geom size="1"/>'
        '<attach model="r" body="base" prefix="r_"/></body></worldbody></mujoco>'
    )
    scene = scene_with(100, robot=package / "urdf" / "all.xml")
    assert sizes(scene) == pytest.approx([0.2], rel=1e-5)


def test_collada_without_pycollada_is_reported(package, monkeypatch, caplog):
    pytest.importorskip("trimesh")  # which imports collada
    monkeypatch.setitem(sys.modules, "collada", None)
    (package / "visual" / "base.dae").touch()
    text = MESHES.format(stl="../collision/base.stl", obj="../visual/base.dae")
    (package / "urdf" / "r.urdf").write_text(text)
    scene = Scene(100)
    scene.add("robot", package / "urdf" / "r.urdf")  # only the visual is dropped
    assert scene.model.ngeom == 1 and "link 'base'" in caplog.text and "pip install 'gpusim-rl[robots]'" in caplog.text
    (package / "urdf" / "r.urdf").write_text(text.replace("collision", "visual").replace("base.stl", "base.obj"))
    with pytest.raises(TaskError, match=r"link 'base'.*base\.dae: collada"):
        Scene(100).add("robot", package / "urdf" / "r.urdf")


@pytest.mark.parametrize(
    ("change", "packages", "line"),
    [
        (
            *(("my_robot/collision", "other/nowhere"), None),
            r"r.urdf: link 'base': mesh 'package://other/nowhere/base.stl' .*urdf/other/.*--packages other=FOLDER",
        ),
        (("x", "x"), {"my_robot": "/nowhere"}, r"/nowhere/collision/base.stl\. .*packages=\{'my_robot': "),
        (("base.stl", "bas.stl"), None, r"'package://my_robot/collision/bas.stl' not found; .*/my_robot/coll"),
        (("<joint", "<xacro:joint"), None, "xacro r.urdf > expanded.urdf"),
        (("</robot>", ""), None, r"r\.urdf: XML: "),
    ],
)
def test_unreadable_urdf_is_rejected_in_one_line(package, change, packages, line):
    text = MESHES.format(stl="package://my_robot/collision/base.stl", obj="package://my_robot/visual/base.obj")
    (package / "urdf" / "r.urdf").write_text(text.replace(*change))
    with pytest.raises(TaskError, match=line) as error:
        Scene(100).add("robot", package / "urdf" / "r.urdf", packages=packages)
    assert str(error.value).startswith("Scene.add('robot'): ") and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("xml", "arguments", "words"),
    [
        (BALL, {"packages": {"a": "b"}}, "packages .*URDF"),
        (ARM.replace('<body name="base" pos="0 0 1">', '<body name="base"><joint name="yaw"/>'), {"fixed_base": False},
         r"fixed_base=False: .*'base'.* \['yaw'\]"),
        ("<mujoco/>", {"fixed_base": True}, "fixed_base .*body"),
    ],
)  # fmt: skip
def test_arguments_unsuitable_for_the_file_are_rejected(xml, arguments, words):
    with pytest.raises(TaskError, match=rf"^Scene.add\('it'\): {words}"):
        Scene(100).add("it", mujoco.MjSpec.from_string(xml), **arguments)


GOOD = '<inertial><mass value="1"/><inertia ixx="1" ixy="0" ixz="0" iyy="1" iyz="0" izz="1"/></inertial>'
BOX = '<geometry><box size="0.1 0.1 0.1"/></geometry>'
MESH = '<geometry><mesh filename="{}"/></geometry>'
LOOK = f"<collision>{MESH}</collision>"
LONG_NAMES = ("a" * 300 + ".stl", "a/" * 400 + "b.stl", f"package://a/{'a' * 300}.stl")  # too long for a file
SECOND = '</joint><joint name="k" type="{}"><parent link="{}"/><child link="{}"/>'
COLOURED = BOX + '<material name="m">{}</material>'
COLOURS = ['<color rgba=""/>', '<color rgba="1 0 0"/>', '<color rgba="red"/>', '<color rgb="1 0 0"/>']
ONE_JOINT = (
    '<robot name="r"><link name="base">' + GOOD + '</link><link name="arm">{}</link>'
    '<joint name="j" type="{}"><parent link="base"/><child link="arm"/>{}</joint></robot>'
)


def add_urdf(folder: Path, arm: str, joint: str = "", kind: str = "continuous", **arguments) -> Scene:
    """Return a scene with a robot of one joint, whose second link and joint have these elements."""
    (folder / "r.urdf").write_text(ONE_JOINT.format(arm, kind, joint))
    scene = Scene(100)
    scene.add("r", folder / "r.urdf", **arguments)
    data = mujoco.MjData(scene.model)
    mujoco.mj_step(scene.model, data, 20)
    assert np.isfinite(data.qpos).all()
    return scene


def moments(*diagonal: float, mass: float = 1.0) -> str:
    xx, yy, zz = diagonal
    inertia = f'<inertia ixx="{xx}" ixy="0" ixz="0" iyy="{yy}" iyz="0" izz="{zz}"/>'
    return f'<inertial><mass value="{mass}"/>{inertia}</inertial>'


@pytest.mark.parametrize(
    ("inertial", "mass", "inertia", "word"),
    [
        (moments(1, 1, 3), 1, [5 / 3] * 3, "mean"),
        (moments(1, 1, -0.1), 1, [1e-9, 1, 1], "arm"),
        (moments(0, 0, 0), 1, [0.4 * (3 / 4000 / np.pi) ** (2 / 3)] * 3, "arm"),
        (moments(0, 0, 0, mass=0), 1e-6, [1e-9] * 3, "mass 0 -> 1e-06"),
        (moments(1, 1, 1, mass=-2), 1e-6, [1] * 3, "mass -2 -> 1e-06"),
        ("", 1e-6, [1e-9] * 3, "mass 0 -> 1e-06"),
        ('<visual><geometry><sphere radius="1"/></geometry></visual>', 1e-6, [1e-9] * 3, "arm"),
        ('<inertial><mass value="1"/></inertial>', 1, [0.4 * (3 / 4000 / np.pi) ** (2 / 3)] * 3, "arm"),
        ('<inertial/><collision><geometry><box size="1 1 1"/></geometry></collision>', 1000, [500 / 3] * 3, "water"),
        ('<collision><geometry><box size="1 1 1"/></geometry></collision>', 1000, [500 / 3] * 3, ""),
        (moments(1, 1, 2), 1, [1, 1, 2], ""),
        (moments(1e-8, 1e-8, 1e-8, mass=1e-3), 1e-3, [1e-8] * 3, ""),
    ],
)
def test_unphysical_link_gets_valid_inertia_and_a_warning(tmp_path, caplog, inertial, mass, inertia, word):
    body = add_urdf(tmp_path, inertial).model.body("r/arm")
    assert body.mass[0] == pytest.approx(mass)
    assert sorted(body.inertia) == pytest.approx(inertia, rel=1e-6)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == bool(word) and all(word in line and "r.urdf" in line and "arm" in line for line in lines)


CUBE = '<collision><geometry><box size="{0} {0} {0}"/></geometry></collision>'


@pytest.mark.parametrize(
    ("root", "fixed", "mass"), [("", GOOD, 1.0), ("", "", 2000.0), (moments(1, 1, 1, mass=3), GOOD, 4.0)]
)
def test_link_without_inertial_is_massless_next_to_a_fixed_mass(tmp_path, root, fixed, mass):
    (tmp_path / "r.urdf").write_text(
        f'<robot name="r"><link name="base">{root}{CUBE.format(1)}</link><link name="base_inertia">{fixed}'
        f'{CUBE.format(1)}</link><joint name="j" type="fixed"><parent link="base"/><child link="base_inertia"/></joint>'
        "</robot>"
    )
    scene = Scene(100)
    scene.add("r", tmp_path / "r.urdf", fixed_base=False)
    assert scene.model.body_subtreemass[1] == pytest.approx(mass, abs=1e-5)


def test_links_overlapping_in_the_reference_pose_do_not_collide(tmp_path, caplog):
    links = [("a", 0.0, 0.2), ("b", 0.1, 0.02), ("c", 0.05, 0.2), ("d", 0.3, 0.2)]
    text = "".join(f'<link name="{name}">{GOOD}{CUBE.format(size)}</link>' for name, _, size in links)
    for (parent, *_), (child, x, _) in itertools.pairwise(links):
        ends = f'<parent link="{parent}"/><child link="{child}"/><origin xyz="{x} 0 0"/><axis xyz="0 0 1"/>'
        text += f'<joint name="to_{child}" type="continuous">{ends}</joint>'
    (tmp_path / "r.urdf").write_text(f'<robot name="r">{text}</robot>')
    scene = Scene(100)
    scene.add("r", tmp_path / "r.urdf", fixed_base=False)
    excluded = {frozenset((pair.bodyname1, pair.bodyname2)) for pair in scene.spec.excludes}
    assert frozenset(("r/a", "r/c")) in excluded and not any("r/d" in pair for pair in excluded)
    assert "a and c" in caplog.text
    data = mujoco.MjData(scene.model)
    mujoco.mj_forward(scene.model, data)
    assert data.ncon == 0
    data.qpos[-2] = np.pi  # rotate d onto a
    mujoco.mj_forward(scene.model, data)
    pairs = {frozenset(scene.model.geom_bodyid[contact.geom].tolist()) for contact in data.contact}
    assert pairs == {frozenset((1, 4))}


@pytest.mark.parametrize(
    ("arm", "joint"),
    [
        (GOOD + "<!-- <xacro:macro/> -->", ""),
        (GOOD, '<limit lower="-1.57." upper="1,0"/>'),
        *((GOOD, f"<axis {xyz}/>") for xyz in ('xyz="1 0 0"/><axis xyz="0 0 1"', "", 'xyz=""', 'xyz="0 1e-16 0"')),
        (GOOD, '<origin xyz="" rpy=""/>'),
        (GOOD, "<mimic/>"),
        (GOOD, '<mimic joint="j"/>'),
        *((f"{GOOD}<visual>{COLOURED.format(color)}</visual>", "") for color in COLOURS),
        (f"{GOOD}<visual>{COLOURED.format('')}<xacro:grey/></visual>", ""),
        (f'{GOOD}<visual>{BOX}<material name="a"/><material name="b"/></visual>', ""),
        (GOOD, '<origin xyz="$(optenv WHERE 1 2 3)" rpy="0 0 0 0"/>'),
        (GOOD, '<limit effort="inf" velocity="INF"/>'),
        (GOOD + '<visual><geometry><sphere radius="0.0"/></geometry></visual>', ""),
        (GOOD + "<collision><geometry/></collision><visual/>", ""),
        (GOOD + '<collision><geometry><plane normal="0 0 1"/></geometry></collision>', ""),
        (GOOD, "<sensor:ray/><gazebo><mesh/></gazebo>"),
    ],
)
def test_sloppy_urdf_is_read(tmp_path, arm, joint):
    model = add_urdf(tmp_path, arm, joint).model
    assert model.njnt == 1 and model.body_mass[2] == 1
    if "WHERE" in joint:
        assert model.body_pos[2].tolist() == [1, 2, 3]
    if "1.57" in joint:
        assert model.jnt_actfrclimited[0] == 0
    if "axis" in joint:
        assert model.jnt_axis[0].tolist() == [1, 0, 0]


@pytest.mark.parametrize(
    ("declared", "encoding", "name"),
    [(name, name, "Schlüssel") for name in ("utf-8", "utf-16", "iso-8859-1")]
    + [("utf-8", "utf-8-sig", "Schlüssel"), ("gbk", "latin-1", "Schlüssel"), ("klingon", "utf-8", "肩")]
    + [("punycode", "gbk", "肩"), ("shift_jis", "gbk", "肩")],
)
def test_wrongly_declared_encoding_is_read(tmp_path, declared, name, encoding):
    text = f'<?xml version="1.0" encoding="{declared}"?><!-- first -->' + ONE_JOINT.format(GOOD, "continuous", "")
    (tmp_path / "r.urdf").write_bytes((text.replace('"arm"', f'"{name}"') + "\n").encode(encoding))
    scene = scene_with(100, r=tmp_path / "r.urdf")
    bodies = scene.elements_of("r", "body")
    assert len(bodies) == 2
    if encoding.startswith(declared) or declared == "klingon":
        assert name in bodies


@pytest.mark.parametrize(
    ("arm", "joint", "line"),
    [
        (GOOD, '<origin xyz="1 2"/>', "joint 'j': xyz .*got '1 2'"),
        (GOOD, '<origin xyz="a b c"/>', "expected 3 numbers"),
        (GOOD, '<origin xyz="1e999 0 0"/>', "expected 3 numbers"),
        (moments(1, 1, 1).replace('ixx="1"', 'ixx="nan"'), "", "link 'arm': ixx"),
        ("<a>" * 5000 + "</a>" * 5000, "", "nested more than 200 deep"),
        (GOOD + "</link><link name='c'>", SECOND.format("screw", "arm", "c"), "joint 'k'"),
        (GOOD, SECOND.format("fixed", "arm", "no"), "joint 'k'"),
        (GOOD, SECOND.format("fixed", "arm", "base"), "cycle"),
        (GOOD, SECOND.format("fixed", "base", "arm"), "joint 'k'"),
        (GOOD + "</link><link name='arm'>", "", "repeated.*'arm'"),
        (
            GOOD + "</link><link name='b'>" + GOOD + "</link><joint name='k' type='floating'><parent link='arm'/>"
            "<child link='b'/></joint><link name='c'>",
            "",
            r"r\.urdf.*free joint.*'b'",
        ),
        (f"{GOOD}<collision>{MESH.format('a.stl')}</collision>", "", "link 'arm': .*'a.stl'"),
        (f"{GOOD}<visual>{MESH.format('a.stl')}</visual>", "", "link 'arm': .*'a.stl'"),
        *((LOOK.format(name), "", "not found") for name in LONG_NAMES),
    ],
)
def test_invalid_urdf_is_rejected_in_one_line(tmp_path, arm, joint, line):
    with pytest.raises(TaskError, match=line) as error:
        add_urdf(tmp_path, arm, joint)
    assert "\n" not in str(error.value) and "r.urdf" in str(error.value)


TILE = "v 0 0 0\nv 1 0 0\nv 1 1 0\nv 0 1 0\nf 1 2 3\nf 1 3 4\n"


@pytest.mark.parametrize("kind", ["visual", "collision"])
@pytest.mark.parametrize(
    ("name", "content", "kept"),
    [
        ("flat.obj", TILE, "visual collision"),
        ("tiny.obj", TILE.replace("1 1 0", "1e-5 1e-5 1e-5").replace("v 1", "v 1e-5"), "visual"),
        ("triangle.obj", "v 0 0 0\nv 1 0 0\nv 1 1 0\nf 1 2 3\n", "collision"),
        ("text.stl", "solid a\nfacet\nouter loop\n" + "vertex 0 0 0\n" * 3 + "endloop\nendfacet\nendsolid\n", ""),
        ("broken.stl", "not a mesh", ""),
        ("empty.obj", "", ""),
        ("empty.ply", "", ""),
        ("noise.glb", "glTF" + "x" * 30, ""),
        ("broken.dae", "<COLLADA", ""),
    ],
)  # fmt: skip
def test_degenerate_mesh_is_kept_or_reported(tmp_path, kind, name, content, kept):
    (tmp_path / name).write_text(content)
    mesh = f"<{kind}>{MESH.format(name)}</{kind}>"
    arm = GOOD + mesh + (f"<collision>{BOX}</collision>" if kind == "visual" else "")
    try:
        scene = add_urdf(tmp_path, arm)
    except TaskError as error:
        assert kind == "collision" and kind not in kept and "\n" not in str(error)
        assert "link 'arm'" in str(error) and name in str(error)
    else:
        assert kind == "visual" or scene.model.ngeom == 1


def test_shared_mesh_nodes_take_bounded_memory(tmp_path):
    """A small glTF file may instance one mesh ten thousand times."""
    trimesh = pytest.importorskip("trimesh")
    scene, ball = trimesh.Scene(), trimesh.creation.icosphere(5)
    scene.add_geometry(ball, geom_name="one")
    for i in range(500):
        scene.graph.update(f"n{i}", geometry="one")
    (tmp_path / "many.glb").write_bytes(scene.export(file_type="glb"))
    with pytest.raises(TaskError, match=r"many\.glb: .*at most"):
        add_urdf(tmp_path, f"{GOOD}<collision>{MESH.format('many.glb')}</collision>")


@pytest.mark.parametrize("end", ["ply", "glb", "gltf", "dae", "stl"])
def test_trimesh_reads_other_mesh_formats(tmp_path, end):
    trimesh = pytest.importorskip("trimesh")
    mesh = trimesh.creation.box((0.2, 0.4, 0.6))
    if end == "gltf":
        for name, content in trimesh.exchange.gltf.export_gltf(trimesh.Scene(mesh)).items():
            (tmp_path / name.replace("model", "m")).write_bytes(content)
    elif end == "stl":
        (tmp_path / "m.stl").write_text(mesh.export(file_type="stl_ascii"))
    elif end == "dae":
        pytest.importorskip("collada")
        content = mesh.apply_scale(1000.0).export(file_type="dae")
        (tmp_path / "m.dae").write_bytes(content.replace(b"<up_axis>", b'<unit meter="0.001"/><up_axis>'))
    else:
        mesh.export(tmp_path / f"m.{end}")
    mesh = MESH.format(f"m.{end}")
    model = add_urdf(tmp_path, f"{GOOD}<collision>{mesh}</collision><visual>{mesh}</visual>").model
    for geom in range(model.ngeom):
        assert sorted(2 * model.geom_aabb[geom, 3:]) == pytest.approx([0.2, 0.4, 0.6], rel=1e-5)


def test_missing_visual_mesh_is_dropped_with_a_warning(tmp_path, caplog):
    mesh = f"<visual>{MESH.format('package://looks/a.stl')}</visual>"
    model = add_urdf(tmp_path, f"{GOOD}{mesh}<collision>{BOX}</collision>").model
    assert model.ngeom == 1
    [line] = [record.getMessage() for record in caplog.records]
    assert all(word in line for word in ("r.urdf", "arm", "package://looks/a.stl", "looks/a.stl", "--packages looks="))


@pytest.mark.parametrize("group", [1, 2])
def test_collision_shapes_with_visuals_are_hidden(tmp_path, group):
    model = add_urdf(tmp_path, f"{GOOD}<visual>{BOX}</visual><collision>{BOX}</collision>").model
    assert model.geom_group.tolist() == [1, 3] and model.geom_contype.tolist() == [0, 1]
    assert add_urdf(tmp_path, f"{GOOD}<collision>{BOX}</collision>").model.geom_group.tolist() == [0]
    look = f'<geom type="box" size="{{}} 1 1" contype="0" conaffinity="0" group="{group}"/>'
    xml = '<geom type="plane" size="1 1 1"/>{}<body name="b">{}<geom type="box" size="1 1 1"/></body>'
    xml = f"<mujoco><worldbody>{xml}</worldbody></mujoco>"
    scene = scene_with(100, r=xml.format(look.format(1), look.format(1)))
    assert scene.model.geom_group.tolist() == [0, group, group, 3]
    scene = Scene(100)
    eye = f'<geom size="0.1" contype="0" conaffinity="0" group="{group}"/>'
    scene.add("r", mujoco.MjSpec.from_string(xml.format("", eye)))
    assert scene.model.geom_group.tolist() == [0, group, 0]  # a small visual hides no collision shape


def test_mujoco_warning_is_logged_once(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("gpusim_rl.sim.robot_file._logged", set())
    for _ in range(2):
        add_urdf(tmp_path, GOOD, '<mimic joint="nobody_knows"/>')
    [line] = [record.getMessage() for record in caplog.records]
    assert "mimic" in line and "'j'" in line


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("xml", "word"),
    [
        ('<mujoco><include file="pipe"/></mujoco>', "pipe"),
        ('<mujoco><include file="sub/a.xml"/></mujoco>', "pipe"),
        ('<mujoco><include file="m.xml"/></mujoco>', "m.xml"),
        ('<mujoco><asset><mesh name="m" file="pipe.stl"/></asset></mujoco>', "pipe.stl"),
        ('<mujoco><asset><texture name="t" type="2d" file="pipe.png"/></asset></mujoco>', "pipe.png"),
        ('<mujoco><asset><texture builtin="flat" width="90000" height="90000"/></asset></mujoco>', "texture"),
        ('<mujoco><size nuser_body="100000000"/></mujoco>', "nuser_body"),
        ('<mujoco><worldbody><replicate count="9999"><replicate count="9999"><geom size="1"/></replicate></replicate>'
         "</worldbody></mujoco>", "replicate"),
        ("<mujoco><worldbody>" + "<body>" * 9999 + "</body>" * 9999 + "</worldbody></mujoco>", "nested"),
        (f'<mujoco><worldbody><replicate count="{"1e300 " * 400_000}"/></worldbody></mujoco>', "replicate"),
        ('<mujoco><worldbody><flexcomp name="f" type="mesh" file="pipe.stl"/></worldbody></mujoco>', "pipe.stl"),
        ('<mujoco><compiler meshdir="sub"/><worldbody><flexcomp name="f" type="mesh" file="pipe"/></worldbody>'
         "</mujoco>", "pipe"),
        ('<!DOCTYPE a [<!ENTITY a "a">]><mujoco model="&a;"/>', "entity"),
        # MuJoCo allocates these sizes without a limit.
        ('<mujoco><asset><mesh name="m" builtin="plate" params="20000 20000"/></asset></mujoco>', "256 MB"),
        ('<mujoco><asset><hfield name="h" size="1 1 1 1" nrow="90000" ncol="90000"/></asset></mujoco>', "hfield"),
    ],
)  # fmt: skip
def test_hostile_mjcf_is_rejected_quickly(tmp_path, monkeypatch, xml, word):
    monkeypatch.setattr(budgets, "ROBOT_BYTES", 256 << 20)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.xml").write_text('<mujoco><include file="pipe"/></mujoco>')
    for name in ("pipe", "pipe.stl", "pipe.png", "sub/pipe"):
        os.mkfifo(tmp_path / name)
    (tmp_path / "m.xml").write_text(xml)
    with pytest.raises(TaskError, match=word) as error:
        Scene(100).add("r", tmp_path / "m.xml")
    assert "\n" not in str(error.value)


TEXTURE = '<texture type="2d" builtin="flat" width="4000" height="4000" name="{}"/>'
ALLOCATED = {
    "cube": '<asset><texture name="t" type="cube" builtin="flat" width="20000"/></asset>',
    "textures": f"<asset>{TEXTURE * 40}</asset>",
    "picture": '<asset><hfield name="h" size="1 1 1 1" file="huge.png"/></asset>',
    "sensor": '<sensor><user dim="200000000"/></sensor>',
    "contacts": '<sensor><contact geom1="g" num="200000000"/></sensor>',
    "actuator": '<actuator><general joint="j" dyntype="user" actdim="200000000"/></actuator>',
}
READ_ALL = """
import resource, sys
from gpusim_rl.errors import TaskError
from gpusim_rl.files import budgets
from gpusim_rl.sim import Scene
budgets.ROBOT_BYTES = 256 << 20
before = resource.getrlimit(resource.RLIMIT_DATA)
for name in sys.argv[1:]:
    scene = Scene(100)
    try:
        scene.add("r", name)
        scene.model
    except TaskError as error:
        print(error)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
"""


def test_mujoco_allocations_for_hostile_mjcf_are_bounded(tmp_path, command):
    """A subprocess is needed: this process may have freed gigabytes that it can reuse without asking the system."""
    body = '<worldbody><body><joint name="j"/><geom name="g" size="0.1"/></body></worldbody>'
    for name, xml in ALLOCATED.items():
        (tmp_path / f"{name}.xml").write_text(f"<mujoco>{xml.format(*range(40))}{body}</mujoco>")
    Image.new("1", (40000, 40000)).save(tmp_path / "huge.png")
    lines = command(sys.executable, "-c", READ_ALL, *(f"{name}.xml" for name in ALLOCATED)).stdout.splitlines()
    assert len(lines) == len(ALLOCATED)
    assert all("256 MB" in line or "huge.png" in line for line in lines), lines


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("inner", "word"),
    [
        ("<!--" * 200_000, "XML"),
        (f'<link name="l"><visual><origin xyz="$(optenv {"a" * 200_000}"/></visual></link>', "200009 characters"),
        ('<link name="l">' + "<visual/>" * 200_000 + "</link>", "elements"),
        (f'<link name="l">{LOOK.format("a/" * 20_000)}</link>', "40000 characters"),
    ],
    ids=["comments", "default", "elements", "name"],
)
def test_hostile_urdf_is_rejected_quickly(tmp_path, inner, word):
    (tmp_path / "r.urdf").write_text(f'<robot name="r">{inner}</robot>')
    with pytest.raises(TaskError, match=word) as error:
        Scene(100).add("r", tmp_path / "r.urdf")
    assert "\n" not in str(error.value) and len(str(error.value)) < 1000


@pytest.mark.parametrize(
    "xml",
    [
        '<include file="{}"/>',
        '<asset><mesh file="{}.stl"/></asset>',
        '<asset><texture type="2d" file="{}.png"/></asset>',
        '<compiler meshdir="{}"/><asset><mesh file="a.stl"/></asset>',
    ],
    ids=["include", "mesh", "texture", "folder"],
)
def test_overlong_file_name_is_rejected(tmp_path, xml):
    (tmp_path / "m.xml").write_text(f"<mujoco>{xml.format('a' * 300)}</mujoco>")
    with pytest.raises(TaskError, match=r"m\.xml"):
        Scene(100).add("r", tmp_path / "m.xml")


def test_concurrent_reads_restore_the_memory_limit(monkeypatch):
    """The second thread starts while the first one reads, and ends after it."""
    before, second, leave = resource.getrlimit(resource.RLIMIT_DATA), Event(), Event()
    ball, read = mujoco.MjSpec.from_string(BALL), scene_module.read_robot

    def slow(spec, *arguments):
        if spec is ball:
            thread.start()
            second.wait(0.5)
        else:
            second.set()
            leave.wait(10.0)
        return read(spec, *arguments)

    monkeypatch.setattr(scene_module, "read_robot", slow)
    thread = Thread(target=lambda: Scene(100).add("arm", mujoco.MjSpec.from_string(ARM)))
    Scene(100).add("ball", ball)
    leave.set()
    thread.join(10.0)
    assert second.is_set() and resource.getrlimit(resource.RLIMIT_DATA) == before


def test_named_pipe_is_rejected(tmp_path):
    os.mkfifo(tmp_path / "r.urdf")
    with pytest.raises(TaskError, match="regular file"):
        Scene(100).add("r", tmp_path / "r.urdf")
