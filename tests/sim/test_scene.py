"""Tests of `Scene`: names, errors, options of several files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import pytest
import torch

from gpusim_rl.errors import TaskError
from gpusim_rl.sim import Scene
from helpers.raised import raises
from helpers.scenes import ANT, ARM, FEET, ant_scene, make, scene_with


def test_names_are_prefixed_and_masses_match_isaacgymenvs():
    model = ant_scene().model
    assert model.opt.timestep == pytest.approx(1 / 120)
    assert model.body("ant/torso").id > 0 and model.joint("ant/hip_1").id > 0
    assert model.nu == 8 and (model.actuator_gear[:, 0] == 15).all()
    assert model.dof_armature.tolist() == pytest.approx([0.0] * 6 + [0.01] * 8)  # none on the free joint
    assert model.dof_damping[6:] == pytest.approx(0.1)
    # density 5: a sphere of radius 0.25 and four capsules of radius 0.08 and length sqrt(0.08)
    sphere = 4 / 3 * 3.14159265 * 0.25**3
    capsule = 3.14159265 * 0.08**2 * (0.08**0.5 + 4 / 3 * 0.08)
    assert model.body("ant/torso").mass[0] == pytest.approx(5 * (sphere + 4 * capsule), rel=1e-6)


def test_contact_sensors_are_added_only_once():
    scene = ant_scene()
    size = scene.model.nsensordata
    scene.add_contact_sensor("ant", FEET)
    assert scene.model.nsensordata == size
    scene.add_contact_sensor("ant", ["torso"])
    assert scene.model.nsensordata == size + size // len(FEET)
    assert set(scene.contact_sensors) == {f"ant/{name}" for name in (*FEET, "torso")}


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda scene: scene.add("ant", ANT), "already in use"),
        (lambda scene: scene.add("dog", Path("/nowhere/dog.xml")), "cannot load /nowhere/dog.xml"),
        (lambda scene: scene.add_contact_sensor("ant", ["tail"]), "no body 'ant/tail'.*ant/torso"),
        (lambda scene: scene.add_contact_sensor("cat", ["torso"]), "no body 'cat/torso'"),
    ],
)
def test_invalid_scene_calls_are_rejected_in_one_line(act, message):
    with pytest.raises(TaskError, match=message) as error:
        act(ant_scene())
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
    ("element", "missing"),
    [
        ('<actuator><motor name="elbow" joint="elbo"/></actuator>', "'elbo'"),
        ('<sensor><jointpos joint="elbo"/></sensor>', "'elbo'"),
        ('<tendon><fixed><joint joint="elbo" coef="1"/></fixed></tendon>', "'elbo'"),
        ('<equality><joint joint1="elbo"/></equality>', "'elbo'"),
        ('<contact><exclude body1="arm" body2="hand"/></contact>', "'hand'"),
        ('<contact><pair geom1="arm" geom2="hand"/></contact>', "'hand'"),
    ],
)
def test_misspelt_reference_is_rejected_in_one_line(tmp_path: Path, element: str, missing: str):
    (tmp_path / "arm.xml").write_text(FOREARM.format(element))
    spec = mujoco.MjSpec.from_string(FOREARM.format(element))
    for mjcf, words in ((tmp_path / "arm.xml", missing), (spec, r"^Scene.add\('arm'\): .* missing elements")):
        scene = scene_with(100, ball=FOREARM.format('<actuator><motor joint="elbow"/></actuator>'))
        with pytest.raises(TaskError, match=words) as error:
            scene.add("arm", mjcf)
        assert "\n" not in str(error.value)


def test_world_body_can_be_referenced():
    exclude = '<contact><exclude body1="world" body2="arm"/></contact>'
    assert scene_with(100, arm=FOREARM.format(exclude)).model.nexclude == 1


def test_uncompilable_scene_is_rejected_in_one_line():
    scene = scene_with(100, massless='<mujoco><worldbody><body name="b"><freejoint/></body></worldbody></mujoco>')
    with pytest.raises(TaskError, match="cannot compile") as error:
        _ = scene.model
    assert "\n" not in str(error.value)


def spin_energy_gain(robot: str, speed: float, **settings: Any) -> float:
    """Return the largest gain of a spinning robot's kinetic energy after half a second over three axes."""
    scene = Scene(120, gravity=0.0, **settings)
    scene.add(robot, ANT.with_name(f"{robot}.xml"), pos=(0, 0, 50))
    model, worst = scene.model, 0.0
    model.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_AUTORESET.value
    model.opt.enableflags |= mujoco.mjtEnableBit.mjENBL_ENERGY.value
    for seed in range(3):
        random, data = np.random.default_rng(seed), mujoco.MjData(model)
        axis = random.normal(size=3)
        data.qvel[3:6] = speed * axis / np.linalg.norm(axis)
        data.qvel[6:] = random.uniform(-5.0, 5.0, model.nv - 6)  # rad/s
        mujoco.mj_forward(model, data)
        before = data.energy[1]
        for step in range(240):
            mujoco.mj_step(model, data)
            if step % 2:  # a control step
                scene.limit_rotation(torch.from_numpy(data.qvel)[None])
            mujoco.mj_forward(model, data)
            if step > 60:
                worst = max(worst, float(np.nan_to_num(data.energy[1] / before, nan=np.inf)))
    return worst


@pytest.mark.parametrize("robot", ["ant", pytest.param("humanoid", marks=pytest.mark.slow)])
def test_spinning_robot_gains_no_energy(robot: str) -> None:
    # With Euler the torso's spin feeds itself until the world diverges; a policy learned to exploit this.
    assert spin_energy_gain(robot, 64.0) > 100.0
    assert spin_energy_gain(robot, 64.0, integrator="implicit") < 1.01
    for speed in (5.0, 10.0, 20.0, 64.0):
        assert spin_energy_gain(robot, speed, max_angular_velocity=15.0) < 1.1, speed  # as tasks/ant.py


def test_negative_angular_velocity_limit_is_rejected() -> None:
    with raises(TaskError, key="Scene.max_angular_velocity", got=-1.0):
        Scene(100, max_angular_velocity=-1.0)


def test_unnamed_elements_get_generated_names():
    xml = ARM.replace('name="lower"', "").replace('name="elbow"', "").replace('name="shoulder" joint', "joint")
    scene = scene_with(100, arm=xml)
    arm = make("mujoco", scene, 1).articulation("arm")
    assert arm.body_names == ["base", "upper", "body3"]
    assert arm.joint_names == ["shoulder", "joint1"]
    assert arm.actuator_names == ["actuator0"]


def test_missing_limits_are_infinite():
    for xml, controls in ((ARM, [-1.0, 1.0]), (ARM.replace('ctrlrange="-1 1"', ""), [-math.inf, math.inf])):
        scene = scene_with(100, arm=xml)
        arm = make("mujoco", scene, 1).articulation("arm")
        assert arm.control_limits.tolist() == [controls]
        assert arm.joint_limits.tolist() == [pytest.approx([-math.pi / 3, math.pi / 2]), [-math.inf, math.inf]]


def test_integrator_and_cone_arguments_are_applied():
    option = Scene(physics_hz=100, integrator="rk4", cone="elliptic").model.opt
    assert option.integrator == mujoco.mjtIntegrator.mjINT_RK4 and option.cone == mujoco.mjtCone.mjCONE_ELLIPTIC


def test_gravity_defaults_to_earth():
    assert Scene(100, gravity=(1.0, 0.0, -3.0)).model.opt.gravity.tolist() == [1.0, 0.0, -3.0]
    with raises(TaskError, key="Scene.gravity", got=(1, 2)):
        Scene(100, gravity=(1, 2))
    assert Scene(physics_hz=100).model.opt.gravity.tolist() == [0.0, 0.0, -9.81]
    assert Scene(physics_hz=100, gravity=3.721).model.opt.gravity.tolist() == [0.0, 0.0, -3.721]


# A file with a total mass, options and flags, like those of dm_control.
CHEETAH = """
<mujoco model="cheetah">
  <compiler {compiler}/>
  <option {option}>{flags}</option>
  <worldbody>
    <body name="torso" pos="0 0 0.7">
      <joint name="slide" type="slide" axis="1 0 0"/>
      <geom name="torso" type="capsule" fromto="-0.5 0 0 0.5 0 0" size="0.046"/>
      <geom name="skin" type="box" pos="0 0 0.1" size="0.2 0.1 0.02" group="2"/>
      <body name="thigh" pos="-0.5 0 0">
        {inertial}
        <joint name="thigh" axis="0 1 0" range="-30 60"/>
        <geom name="thigh" type="capsule" fromto="0 0 0 0.16 0 -0.25" size="0.046" density="500"/>
        <body name="foot" pos="0.16 0 -0.25" euler="0 30 0">
          <geom name="foot" size="0.05" mass="0.001"/>
        </body>
      </body>
    </body>
  </worldbody>
</mujoco>
"""


def cheetah(compiler: str = "", option: str = "", flags: str = "", inertial: str = "") -> str:
    return CHEETAH.format(compiler=compiler, option=option, flags=flags, inertial=inertial)


THIGH = '<inertial pos="0.1 0.02 0" mass="3" fullinertia="0.3 0.2 0.2 0.01 0.02 0.03"/>'


@pytest.mark.filterwarnings("ignore:compiler attribute 'settotalmass':UserWarning")
@pytest.mark.parametrize("inertial", ["", THIGH])
@pytest.mark.parametrize(
    "compiler",
    [
        'settotalmass="14"',
        'settotalmass="14" inertiafromgeom="true" inertiagrouprange="0 1"',
        'boundmass="4" boundinertia="0.5"',
        'inertiafromgeom="true"',
        'balanceinertia="true"',
        'settotalmass="14" fusestatic="false" alignfree="true" balanceinertia="true"',
    ],
)
def test_masses_and_inertias_equal_the_file_alone(tmp_path: Path, compiler: str, inertial: str):
    file = tmp_path / "cheetah.xml"
    file.write_text(cheetah(compiler, inertial=inertial))
    alone = mujoco.MjModel.from_xml_path(str(file))
    scene = Scene(physics_hz=100)
    scene.add_ground()
    scene.add("ant", ANT)  # `settotalmass` must not scale the ant
    scene.add("cheetah", file)
    bodies = [scene.model.body(f"cheetah/{alone.body(i).name}").id for i in range(1, alone.nbody)]
    np.testing.assert_array_equal(scene.model.body_mass[bodies], alone.body_mass[1:])
    for field in ("body_inertia", "body_ipos", "body_iquat"):
        ours, theirs = getattr(scene.model, field)[bodies], getattr(alone, field)[1:]
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-15)
    if "settotalmass" in compiler:
        assert scene.model.body_mass[bodies].sum() == pytest.approx(14.0)
    [ant] = {float(scene.model.body_subtreemass[scene.model.body("ant/torso").id])}
    assert ant == pytest.approx(0.9108800827)


OPTIONS = {
    **{"integrator": "RK4", "cone": "elliptic", "jacobian": "sparse", "solver": "CG", "iterations": "7"},
    **{"ls_iterations": "8", "noslip_iterations": "3", "ccd_iterations": "9", "sdf_initpoints": "11"},
    **{"sdf_iterations": "12", "impratio": "10", "tolerance": "1e-5", "ls_tolerance": "0.02"},
    **{"noslip_tolerance": "1e-4", "ccd_tolerance": "1e-3", "sleep_tolerance": "0.2", "gravity": "0 1 -3"},
    **{"wind": "1 2 3", "magnetic": "0.1 0.2 0.3", "density": "1.2", "viscosity": "0.1", "o_margin": "0.01"},
    **{"o_solref": "0.03 1.1", "o_solimp": "0.8 0.9 0.002 0.5 2", "o_friction": "0.9 0.8 0.01 0.001 0.002"},
    "actuatorgroupdisable": "1 3",
}


@pytest.mark.parametrize("option", OPTIONS)
def test_file_option_is_kept(option: str):
    xml = cheetah(option=f'timestep="0.5" {option}="{OPTIONS[option]}"')
    scene = scene_with(100, cheetah=xml)
    scene.add("other", mujoco.MjSpec.from_string(xml))  # equal options do not conflict
    alone = mujoco.MjModel.from_xml_string(xml)
    for field in (field for field in dir(alone.opt) if not field.startswith("_") and field != "timestep"):
        np.testing.assert_array_equal(getattr(scene.model.opt, field), getattr(alone.opt, field), err_msg=field)
    assert scene.model.opt.timestep == 0.01


def test_explicit_default_option_conflicts_too():
    # The bits of `MjSpec.authored` are in the order of MuJoCo's fields.
    default = {"integrator": "Euler", "cone": "pyramidal", "jacobian": "auto", "solver": "Newton"}
    usual = mujoco.MjSpec().option
    for option in OPTIONS.keys() - {"actuatorgroupdisable"}:
        value = default.get(option) or " ".join(str(x) for x in np.atleast_1d(getattr(usual, option)))
        scene = scene_with(100, cheetah=cheetah(option=f'{option}="{value}"'))
        with pytest.raises(TaskError, match=rf"Scene.add\('other'\): conflicting {option}: "):
            scene.add("other", mujoco.MjSpec.from_string(cheetah(option=f'{option}="{OPTIONS[option]}"')))


def test_flags_of_files_are_merged(tmp_path: Path):
    scene = scene_with(100, one=cheetah(flags='<flag gravity="disable" contact="enable"/>'))
    scene.add("two", mujoco.MjSpec.from_string(cheetah(flags='<flag energy="enable" limit="disable"/>')))
    disabled = mujoco.mjtDisableBit.mjDSBL_GRAVITY | mujoco.mjtDisableBit.mjDSBL_LIMIT
    assert scene.model.opt.disableflags == disabled
    assert scene.model.opt.enableflags == mujoco.mjtEnableBit.mjENBL_ENERGY
    problem = "conflicting flag contact: enable in the spec of 'one', disable in the spec of 'three'"
    with raises(TaskError, key="Scene.add('three')", problem=problem) as error:
        scene.add("three", mujoco.MjSpec.from_string(cheetah(flags='<flag contact="disable"/>')))
    assert "option.disableflags" in error.value.hint


def test_conflicting_options_need_a_task_setting(tmp_path: Path):
    one, two = tmp_path / "one.xml", tmp_path / "two.xml"
    one.write_text(cheetah(option='iterations="7" solver="CG"'))
    two.write_text(cheetah(option='iterations="9" solver="PGS"'))
    scene = scene_with(100, one=one)
    problem = f"conflicting solver: mjSOL_CG in {one}, mjSOL_PGS in {two}"
    with raises(TaskError, key="Scene.add('two')", problem=problem):
        scene.add("two", two)
    scene = Scene(physics_hz=100)
    scene.option.iterations = 100  # MuJoCo's default
    scene.option.solver = mujoco.mjtSolver.mjSOL_NEWTON
    scene.add("one", one)
    scene.add("two", two)
    assert scene.model.opt.iterations == 100
    assert scene.model.opt.solver == mujoco.mjtSolver.mjSOL_NEWTON


def test_task_options_override_the_file():
    option = 'integrator="RK4" impratio="10" gravity="0 0 -1" cone="elliptic"'
    xml = cheetah(option=option, flags='<flag gravity="disable"/>')
    scene = Scene(physics_hz=100, integrator="euler", impratio=1.0, gravity=9.81, cone="pyramidal")
    scene.option.disableflags = 0
    scene.add_ground()
    scene.add("cheetah", mujoco.MjSpec.from_string(xml))
    option = scene.model.opt
    assert (option.integrator, option.cone, option.impratio, option.disableflags) == (0, 0, 1.0, 0)
    assert option.gravity.tolist() == [0.0, 0.0, -9.81]
    scene.option.iterations = 3  # after the model was compiled
    assert scene.model.opt.iterations == 3


def test_invalid_options_are_rejected():
    scene = Scene(physics_hz=100)
    with pytest.raises(TaskError, match=r"^scene\.option .* mean 'iterations'"):
        scene.option.iteration = 3
    with pytest.raises(TaskError, match=r"task\.physics_hz"):
        scene.option.timestep = 0.01
    with pytest.raises(ValueError, match="read-only"):
        scene.option.gravity[2] = 0.0
