"""`Scene`: names, errors, and the settings under which the simulators agree."""

from __future__ import annotations

import math
from pathlib import Path

import mujoco
import numpy as np
import pytest
import torch

from gpusim_rl.errors import TaskError
from gpusim_rl.sim import Scene
from gpusim_rl.sim.articulation import ArticulationLayout
from helpers.scenes import ANT, ARM, BALL, FEET, ant_scene


def test_names_are_prefixed_and_masses_are_those_of_isaacgymenvs():
    model = ant_scene().model
    assert model.opt.timestep == pytest.approx(1 / 120)
    assert model.body("ant/torso").id > 0
    assert model.joint("ant/hip_1").id > 0
    assert model.nu == 8
    gears = model.actuator_gear[:, 0]
    assert (gears == 15).all()
    hinges = model.dof_armature[6:]
    assert hinges == pytest.approx(0.01)
    assert model.dof_damping[6:] == pytest.approx(0.1)
    assert model.dof_armature[:6] == pytest.approx(0.0)  # none on the free joint
    # density 5: a sphere of radius 0.25 and four capsules of radius 0.08 and length sqrt(0.08)
    sphere = 4 / 3 * 3.14159265 * 0.25**3
    capsule = 3.14159265 * 0.08**2 * (0.08**0.5 + 4 / 3 * 0.08)
    assert model.body("ant/torso").mass[0] == pytest.approx(5 * (sphere + 4 * capsule), rel=1e-6)


def test_cones_are_elliptic_where_capsules_meet_planes():
    elliptic = mujoco.mjtCone.mjCONE_ELLIPTIC
    assert ant_scene().model.opt.cone == elliptic
    scene = Scene(physics_hz=100)
    scene.add("arm", mujoco.MjSpec.from_string(ARM))
    assert scene.model.opt.cone != elliptic  # no plane: what the file says


def test_sensors_are_added_once_and_change_the_model():
    scene = ant_scene()
    size = scene.model.nsensordata
    scene.add_contact_sensor("ant", FEET)
    assert scene.model.nsensordata == size
    scene.add_contact_sensor("ant", ["torso"])
    assert scene.model.nsensordata == size + size // len(FEET)
    assert set(scene.contact_sensors) == {f"ant/{name}" for name in (*FEET, "torso")}


def test_the_model_is_compiled_once():
    scene = ant_scene()
    assert scene.model is scene.model


def test_position_is_that_of_the_frame():
    scene = Scene(physics_hz=100)
    scene.add("ball", mujoco.MjSpec.from_string(BALL), pos=(1.0, 2.0, 3.0))
    assert scene.model.qpos0[:3].tolist() == [1.0, 2.0, 3.5]


def two_roots() -> mujoco.MjSpec:
    body = '<body name="{}"><geom size="0.1"/></body>'
    bodies = body.format("one") + body.format("two")
    return mujoco.MjSpec.from_string(f"<mujoco><worldbody>{bodies}</worldbody></mujoco>")


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda scene: scene.add("ant", ANT), "already has a 'ant'"),
        (lambda scene: scene.add("dog", Path("/nowhere/dog.xml")), "cannot load /nowhere/dog.xml"),
        (lambda scene: scene.add("two", two_roots()), r"expected one body .*\['one', 'two'\]"),
        (lambda scene: scene.add_contact_sensor("ant", ["tail"]), "no body 'ant/tail'.*ant/torso"),
        (lambda scene: scene.add_contact_sensor("cat", ["torso"]), "no body 'cat/torso'"),
    ],
)
def test_mistakes_are_one_line_that_says_what_is_there(act, message):
    with pytest.raises(TaskError, match=message) as error:
        act(ant_scene())
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_valid_is_one_line(tmp_path: Path):
    broken = tmp_path / "broken.xml"
    broken.write_text("<mujoco><worldbody><body><geom type='teapot'/></body></worldbody></mujoco>")
    with pytest.raises(TaskError, match=r"broken\.xml") as error:
        Scene(physics_hz=100).add("broken", broken)
    assert "\n" not in str(error.value)


FOREARM = """
<mujoco>
  <worldbody>
    <body name="arm"><joint name="elbow"/><geom name="arm" size="0.1"/></body>
  </worldbody>
  {}
</mujoco>
"""


@pytest.mark.parametrize(
    ("element", "message"),
    [
        ('<actuator><motor name="elbow" joint="elbo"/></actuator>', "unknown transmission target 'elbo'"),
        ('<sensor><jointpos joint="elbo"/></sensor>', "unrecognized name 'elbo'"),
        ('<tendon><fixed><joint joint="elbo" coef="1"/></fixed></tendon>', "joint 'elbo' not found"),
        ('<equality><joint joint1="elbo"/></equality>', "unknown element 'elbo'"),
        ('<contact><exclude body1="arm" body2="hand"/></contact>', "body 'hand' not found"),
        ('<contact><pair geom1="arm" geom2="hand"/></contact>', "geom 'hand' not found"),
    ],
)
def test_a_misspelt_reference_is_one_line_and_drops_nothing_silently(tmp_path: Path, element: str, message: str):
    (tmp_path / "arm.xml").write_text(FOREARM.format(element))
    spec = mujoco.MjSpec.from_string(FOREARM.format(element))
    for mjcf, words in ((tmp_path / "arm.xml", message), (spec, r"Scene.add\('arm'\): among its \w+ some name what")):
        scene = Scene(physics_hz=100)
        scene.add("ball", mujoco.MjSpec.from_string(FOREARM.format('<actuator><motor joint="elbow"/></actuator>')))
        with pytest.raises(TaskError, match=words) as error:
            scene.add("arm", mjcf)
        assert "\n" not in str(error.value)


def test_the_world_may_be_referred_to():
    scene = Scene(physics_hz=100)
    exclude = '<contact><exclude body1="world" body2="arm"/></contact>'
    scene.add("arm", mujoco.MjSpec.from_string(FOREARM.format(exclude)))
    assert scene.model.nexclude == 1


def test_a_scene_that_does_not_compile_is_one_line():
    scene = Scene(physics_hz=100)
    massless = '<body name="b"><freejoint/></body>'
    spec = mujoco.MjSpec.from_string(f"<mujoco><worldbody>{massless}</worldbody></mujoco>")
    scene.add("massless", spec)
    with pytest.raises(TaskError, match="MuJoCo cannot compile it") as error:
        _ = scene.model
    assert "\n" not in str(error.value)


def test_only_the_implicit_integrator_keeps_a_whirling_robot_from_gaining_energy() -> None:
    # A policy found that whirling pays: with Euler the torso's spin feeds itself until the world diverges.
    fastest = {}
    for integrator in ("euler", "implicit"):
        scene = Scene(120, integrator=integrator)
        scene.add("ant", ANT, pos=(0, 0, 50))
        model = scene.model
        data = mujoco.MjData(model)
        model.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_AUTORESET.value
        data.qvel[3:6] = 70.0, 50.0, 30.0  # rad/s
        speeds = []
        for _ in range(120):
            mujoco.mj_step(model, data)
            speeds.append(np.abs(data.qvel[3:6]).max())
        fastest[integrator] = np.nanmax(speeds)
    assert fastest["euler"] > 1000.0
    assert fastest["implicit"] < 100.0


def test_elements_without_a_name_get_one_and_belong_to_the_articulation():
    named = ('name="lower"', 'name="elbow"', 'name="shoulder" joint')
    xml = ARM.replace(named[0], "").replace(named[1], "").replace(named[2], "joint")
    scene = Scene(physics_hz=100)
    scene.add("arm", mujoco.MjSpec.from_string(xml))
    arm = ArticulationLayout(scene, "arm", torch.device("cpu"))
    assert arm.body_names == ["base", "upper", "body3"]
    assert arm.joint_names == ["shoulder", "joint1"]
    assert arm.actuator_names == ["actuator0"]


def test_limits_are_infinite_where_the_file_has_none():
    for xml, controls in ((ARM, [-1.0, 1.0]), (ARM.replace('ctrlrange="-1 1"', ""), [-math.inf, math.inf])):
        scene = Scene(physics_hz=100)
        scene.add("arm", mujoco.MjSpec.from_string(xml))
        arm = ArticulationLayout(scene, "arm", torch.device("cpu"))
        assert arm.control_limits.tolist() == [controls]
        assert arm.joint_limits.tolist() == [pytest.approx([-math.pi / 3, math.pi / 2]), [-math.inf, math.inf]]


def test_integrator_and_cone_are_as_asked():
    assert Scene(physics_hz=100, integrator="rk4").model.opt.integrator == mujoco.mjtIntegrator.mjINT_RK4
    scene = Scene(physics_hz=100, cone="pyramidal")
    scene.add_ground()
    scene.add("ant", ANT)
    assert scene.model.opt.cone == mujoco.mjtCone.mjCONE_PYRAMIDAL
    assert Scene(physics_hz=100, cone="elliptic").model.opt.cone == mujoco.mjtCone.mjCONE_ELLIPTIC


def test_gravity_points_down_and_is_the_earths_unless_asked():
    assert Scene(physics_hz=100).model.opt.gravity.tolist() == [0.0, 0.0, -9.81]
    assert Scene(physics_hz=100, gravity=3.721).model.opt.gravity.tolist() == [0.0, 0.0, -3.721]
