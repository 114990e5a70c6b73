"""Tests of per-world parameters against models that are compiled with the same values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mujoco
import numpy as np
import pytest
import torch
from torch import Tensor

from gpusim_rl.errors import TaskError
from gpusim_rl.sim import Scene, Sim
from gpusim_rl.sim.params import FIELDS, Param
from gpusim_rl.testing.sync_counter import SyncCounter
from helpers.scenes import ball_scene, everywhere, make, only
from helpers.states import saved

NUM = 4

# A motor, a position servo with limits, a spring, dry friction, a tendon.
MACHINE = """
<mujoco>
  <default><geom contype="0" conaffinity="0"/></default>
  <worldbody>
    <body name="base" pos="0 0 1">
      <geom type="box" size="0.1 0.1 0.1" mass="1"/>
      <body name="upper" pos="0 0.1 0">
        <joint name="shoulder" axis="0 1 0" range="-60 60" limited="true" armature="0.02" damping="1"/>
        <geom type="capsule" size="0.04" fromto="0 0 0 0.3 0 0" mass="0.5"/>
        <body name="lower" pos="0.3 0 0">
          <joint name="elbow" axis="0 1 0.2" stiffness="0.7" springref="10" frictionloss="0.05" armature="0.01"/>
          <geom type="capsule" size="0.03" fromto="0 0 0 0.2 0.1 0" mass="0.3"/>
          <body name="hand" pos="0.2 0.1 0">
            <joint name="wrist" axis="1 0 0" armature="0.01"/>
            <geom type="box" size="0.02 0.03 0.06" pos="0 0 0.05" mass="0.2"/>
          </body>
        </body>
      </body>
    </body>
  </worldbody>
  <tendon>
    <fixed name="cable" stiffness="0.5" damping="0.2" springlength="0.1">
      <joint joint="elbow" coef="1"/>
      <joint joint="wrist" coef="-0.5"/>
    </fixed>
  </tendon>
  <actuator>
    <motor name="shoulder" joint="shoulder" gear="3" ctrlrange="-1 1"/>
    <position name="elbow" joint="elbow" kp="8" forcerange="-0.5 0.5"/>
    <position name="wrist" joint="wrist" kp="2" kv="0.1"/>
  </actuator>
</mujoco>
"""

CONTROL = torch.tensor([0.8, 0.15, 0.15])

# Parameter, its articulation and its elements; `FACTORS` scale the model's values in the four worlds.
CASES: dict[str, tuple[str | None, list[str] | None]] = {
    "body_mass": ("machine", ["upper", "hand"]),
    "body_inertia": ("machine", ["lower"]),
    "body_ipos": ("machine", ["hand", "upper"]),
    "geom_friction": ("puck", None),
    "dof_damping": ("machine", ["shoulder"]),
    "dof_armature": ("machine", ["wrist"]),
    "dof_frictionloss": ("machine", ["elbow"]),
    "jnt_stiffness": ("machine", ["elbow"]),
    "jnt_range": ("machine", ["shoulder"]),
    "actuator_gainprm": ("machine", ["wrist"]),
    "actuator_biasprm": ("machine", ["wrist"]),
    "actuator_forcerange": ("machine", ["elbow"]),
    "actuator_gear": ("machine", ["shoulder"]),
    "tendon_stiffness": ("machine", ["cable"]),
    "tendon_damping": ("machine", None),
    "gravity": (None, None),
}
FACTORS = torch.tensor([1.0, 0.5, 1.7, 0.8])

PUCK = """
<mujoco>
  <worldbody>
    <body name="puck" pos="0 0 0.05">
      <freejoint/>
      <geom type="sphere" size="0.05" mass="0.4" friction="0.6 0.005 0.0001"/>
    </body>
  </worldbody>
</mujoco>
"""

# Derived from parameters.
CONSTANTS = ("body_subtreemass", "body_invweight0", "dof_invweight0", "tendon_invweight0")


def machine_scene() -> Scene:
    scene = Scene(physics_hz=200)
    scene.add_ground(friction=(0.1, 0.005, 0.0001))
    scene.add("machine", mujoco.MjSpec.from_string(MACHINE))
    scene.add("puck", mujoco.MjSpec.from_string(PUCK), pos=(2.0, 0.0, 0.0))
    return scene


def by_factors(param: Param) -> Tensor:
    return FACTORS.view(-1, *[1] * param.default.ndim) * param.default


def move(sim: Sim) -> None:
    """Write a state in which every parameter matters to all worlds: beyond a limit, sliding, saturated."""
    machine, puck = sim.articulation("machine"), sim.articulation("puck")
    pos, vel = torch.tensor([1.2, 0.4, -0.3]), torch.tensor([1.5, -2.0, 3.0])
    machine.set_state(everywhere(sim), joint_pos=pos.expand(NUM, 3), joint_vel=vel.expand(NUM, 3))
    low, slide = torch.tensor([2.0, 0.0, 0.0495]), torch.tensor([2.0, 1.0, 0.0])
    puck.set_state(everywhere(sim), root_pos=low.expand(NUM, 3), root_lin_vel=slide.expand(NUM, 3))
    machine.actuate(CONTROL.expand(NUM, 3))


def velocity(sim: Sim) -> Tensor:
    machine, puck = sim.articulation("machine"), sim.articulation("puck")
    return torch.cat([machine.joint_vel, puck.root_lin_vel, puck.root_ang_vel_local], dim=1).clone()


def compiled(scene: Scene, name: str, param: Param, values: Any) -> mujoco.MjModel:
    """Return the scene's model, compiled with other values of a parameter."""
    spec = scene.spec.copy()
    values = np.asarray(values, dtype=np.float64)
    field = name.split("_")[-1]
    if name == "gravity":
        spec.option.gravity = values
        return spec.compile()
    of = FIELDS[name].of
    articulation = CASES[name][0]
    for element, value in zip(param.elements, values, strict=True):
        full = f"{articulation}/{element}"
        if of == "body":
            body, row = spec.body(full), scene.model.body(full)
            body.explicitinertial = True
            body.mass, body.inertia = float(row.mass[0]), row.inertia.copy()
            body.ipos, body.iquat = row.ipos.copy(), row.iquat.copy()
            setattr(body, field, float(value) if field == "mass" else value)
        elif of in ("joint", "dof", "tendon"):
            found = spec.tendon(full) if of == "tendon" else spec.joint(full)
            old = np.asarray(getattr(found, field), dtype=np.float64)
            # stiffness and damping are polynomials; the parameter is their linear part
            new = value if old.size <= value.size else [float(value), *old.ravel()[1:]]
            new = np.rad2deg(new) if name == "jnt_range" else new  # the MJCF's unit
            setattr(found, field, float(value) if old.ndim == 0 else new)
        elif of == "geom":
            for geom in spec.body(full).geoms:
                geom.friction = value
        else:
            setattr(spec.actuator(full), field, value)
    return spec.compile()


def stepped(model: mujoco.MjModel, sim: Sim, substeps: int) -> np.ndarray:
    """Return velocities after steps of plain MuJoCo from the state that `move` writes."""
    model.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_AUTORESET.value
    data = mujoco.MjData(model)
    data.qpos[:] = sim.qpos[0].numpy()
    data.qvel[:] = velocity(sim)[0].numpy()
    data.ctrl[:] = CONTROL.numpy()
    for _ in range(substeps):
        mujoco.mj_step(model, data)
    return data.qvel.copy()


def world_constants(sim: Any, world: int) -> dict[str, np.ndarray]:
    if sim.name == "mujoco":
        model = sim._batch.get_model(world)
        return {name: getattr(model, name) for name in CONSTANTS}
    model = sim._model if sim.name == "mjwarp" else sim._solver.mjw_model
    arrays = {name: getattr(model, name).numpy() for name in CONSTANTS}
    return {name: array[world % len(array)] for name, array in arrays.items()}


@pytest.fixture(
    scope="module",
    params=["mujoco", "mjwarp", *(pytest.param(sim, marks=pytest.mark.slow) for sim in ("mujoco-shared", "newton"))],
)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def declared(backend: str) -> Sim:
    """Simulator with all parameters of `CASES`."""
    sim = make(backend, machine_scene(), NUM)
    for name, case in CASES.items():
        sim.param(name, *case)
    return sim


@pytest.fixture
def machine(declared: Sim) -> Iterator[Sim]:
    params = [declared.param(name, owner) for name, (owner, _) in CASES.items()]
    declared.reset(everywhere(declared))
    yield declared
    for param in params:
        param.set(param.default.expand_as(param.value), everywhere(declared))


def test_every_parameter_has_a_case():
    physical = {name for name, field in FIELDS.items() if not field.pictures}  # test_camera.py has the others
    assert {*CASES, "actuator_delay"} == physical  # delays need changing controls: see test_actuators.py


@pytest.mark.parametrize("name", CASES)
def test_worlds_move_as_compiled_models(machine, name):
    sim, scene = machine, machine.scene
    param = sim.param(name, *CASES[name])
    values = by_factors(param)
    param.set(values, everywhere(sim))
    move(sim)
    sim.refresh()
    models = [compiled(scene, name, param, value) for value in values]
    for world, model in enumerate(models):
        for constant, found in world_constants(sim, world).items():
            expected = getattr(model, constant)
            np.testing.assert_allclose(found, expected, rtol=2e-4, atol=1e-6, err_msg=f"{constant} of world {world}")
    expected = np.stack([stepped(model, sim, 3) for model in models])
    sim.step(3)
    np.testing.assert_allclose(velocity(sim).numpy(), expected, rtol=2e-4, atol=3e-4)
    # the parameter has an effect, or the test would pass if it were ignored
    assert np.abs(expected - expected[0]).max(axis=1)[1:].min() > 2e-3


@pytest.mark.parametrize("name", ["dof_damping", "dof_armature", "jnt_stiffness", "dof_frictionloss"])
def test_zero_values_of_the_model_can_be_set_per_world(machine, name):
    # Simulators may skip terms that are zero everywhere at the start.
    joint, sim = {"dof_damping": "elbow", "dof_armature": "wrist"}.get(name, "shoulder"), machine
    param = sim.param(name, "machine", [joint])
    extra = torch.tensor([[0.0], [0.3], [0.0], [0.6]])
    param.set(param.default + extra, everywhere(sim))
    move(sim)
    sim.refresh()
    expected = [stepped(compiled(sim.scene, name, param, values), sim, 2) for values in param.default + extra]
    sim.step(2)
    np.testing.assert_allclose(velocity(sim).numpy(), np.stack(expected), rtol=2e-4, atol=3e-4)
    assert (velocity(sim)[1] - velocity(sim)[0]).abs().max() > 1e-3


def test_mask_selects_the_worlds(backend):
    sim, untouched = make(backend, machine_scene(), NUM), make(backend, machine_scene(), NUM)
    params, _ = ({name: one.param(name, *CASES[name]) for name in CASES} for one in (sim, untouched))
    where = only(sim, 1, 3)
    for one in (sim, untouched):
        move(one)
        one.refresh()
        one.step(2)
    for name, param in params.items():
        before = param.value
        assert torch.equal(before, param.default.expand_as(before)), name
        param.set(1.3 * before, where)
        assert torch.equal(param.value, torch.where(where.view(-1, *[1] * (before.ndim - 1)), 1.3 * before, before))
    for one in (sim, untouched):
        one.step(5)
    assert torch.equal(velocity(sim)[[0, 2]], velocity(untouched)[[0, 2]]), "worlds outside the mask changed"
    changed = (velocity(sim) - velocity(untouched)).abs().amax(dim=1)
    assert (changed[[1, 3]] > 1e-2).all()


@pytest.mark.parametrize("name", ["body_mass", "gravity"])
def test_changed_parameters_act_at_once(backend, name):
    # A persistent MjData would otherwise reuse quantities of the old parameters.
    changed, fresh = make(backend, machine_scene(), NUM), make(backend, machine_scene(), NUM)
    for sim in (changed, fresh):
        sim.articulation("machine").bodies(["hand"])  # computes velocity-stage quantities after each step
    param, other = (sim.param(name, *CASES[name]) for sim in (changed, fresh))
    move(changed)
    changed.refresh()
    changed.step(3)
    root = ("root_pos", "root_quat", "root_lin_vel", "root_ang_vel")
    state = {
        key: {field: getattr(changed.articulation(key), field).clone() for field in fields}
        for key, fields in {"machine": ("joint_pos", "joint_vel"), "puck": root}.items()
    }
    param.set(by_factors(param), everywhere(changed))
    other.set(by_factors(other), everywhere(fresh))
    for key, values in state.items():
        fresh.articulation(key).set_state(everywhere(fresh), **values)
    fresh.articulation("machine").actuate(CONTROL.expand(NUM, 3))
    changed.step(1)
    fresh.step(1)
    torch.testing.assert_close(velocity(changed), velocity(fresh), rtol=1e-5, atol=2e-5)
    assert (velocity(changed)[1] - velocity(changed)[0]).abs().max() > 2e-3


def test_state_dict_restores_parameters(backend):
    def made() -> tuple[Sim, list[Param]]:
        sim = make(backend, machine_scene(), NUM)
        return sim, [sim.param(name, *CASES[name]) for name in CASES]

    (sim, params), (other, others) = made(), made()
    for param in params:
        param.set(by_factors(param), only(sim, 1, 2, 3))
    for param in others:
        param.set(0.9 * by_factors(param), everywhere(other))
    for one in (sim, other):
        move(one)
        one.refresh()
        one.step(4)
    state = saved(sim.state_dict())
    sim.step(4)
    other.load_state_dict(state)
    for param, restored in zip(params, others, strict=True):
        assert torch.equal(param.value, restored.value), param.name
    for world in range(NUM):
        for constant, value in world_constants(sim, world).items():
            np.testing.assert_array_equal(value, world_constants(other, world)[constant], err_msg=constant)
    other.step(4)
    assert torch.equal(velocity(sim), velocity(other))


def test_state_dict_without_parameters_keeps_current_ones(backend):
    before = make(backend, machine_scene(), NUM)
    now = make(backend, machine_scene(), NUM)
    param = now.param("body_mass", "machine", ["hand"])
    param.set(by_factors(param), everywhere(now))
    now.load_state_dict(before.state_dict())
    assert torch.equal(param.value, by_factors(param))


def test_parameter_can_be_declared_after_the_first_steps(backend):
    early, late = make(backend, machine_scene(), NUM), make(backend, machine_scene(), NUM)
    first = early.param("body_mass", "machine", ["hand"])
    for sim in (early, late):
        move(sim)
        sim.refresh()
        sim.step(2)
    second = late.param("body_mass", "machine", ["hand"])
    for param in (first, second):
        param.set(by_factors(param), everywhere(early))
    for sim in (early, late):
        sim.step(2)
    torch.testing.assert_close(velocity(early), velocity(late), rtol=1e-5, atol=1e-6)
    assert (velocity(late)[1] - velocity(late)[0]).abs().max() > 1e-2


def test_elements_have_the_names_of_their_file():
    sim = make("mujoco", machine_scene(), NUM)
    assert sim.param("body_mass", "machine").elements == ["base", "upper", "lower", "hand"]
    damping = sim.param("dof_damping", "machine", ["wrist", "shoulder"])
    assert damping.elements == ["wrist", "shoulder"]
    torch.testing.assert_close(damping.default, torch.tensor([0.0, 1.0]))
    damping.set(torch.tensor([[0.2, 0.3]]).expand(NUM, 2), everywhere(sim))
    reversed_order = sim.param("dof_damping", "machine").value
    torch.testing.assert_close(reversed_order, torch.tensor([[0.3, 0.0, 0.2]]).expand(NUM, 3))
    assert sim.param("jnt_range", "machine").elements == ["shoulder"], "only joints with limits"
    assert sim.param("actuator_forcerange", "machine").elements == ["elbow"]
    assert sim.param("geom_friction", "puck").elements == ["puck"], "geoms by their body"
    ground = sim.param("geom_friction", "ground")
    torch.testing.assert_close(ground.default, torch.tensor([[0.1, 0.005, 0.0001]]))
    assert sim.param("gravity").value.shape == (NUM, 3)


def test_single_column_can_be_set(backend):
    sim = make(backend, machine_scene(), NUM)
    for elements in (["wrist"], ["wrist", "shoulder"]):  # contiguous in the model, and not
        gains = sim.param("actuator_gainprm", "machine", elements)
        gains.set(torch.full((NUM, len(elements)), 7.0), only(sim, 2), column=1)
        expected = gains.default.expand_as(gains.value).clone()
        expected[2, :, 1] = 7.0
        assert torch.equal(gains.value, expected)


@pytest.fixture(scope="module")
def mujoco_machine() -> Sim:
    return make("mujoco", machine_scene(), 1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("body_mas", "machine"), "mean 'body_mass'"),
        (("body_mass", "machin"), "mean 'machine'"),
        (("body_mass", "machine", ["hands"]), "mean 'hand'"),
        (("dof_damping", "machine", ["wist"]), "mean 'wrist'"),
        (("tendon_damping", "puck"), "no tendons"),
        (("geom_friction", "machine"), "no geoms"),
        (("jnt_range", "machine", ["elbow"]), "no limits. Try"),
        (("body_mass", "ground"), "no articulation 'ground'"),
        (("gravity", "machine"), "whole world"),
        (("body_mass",), "requires an articulation"),
    ],
)
def test_invalid_parameters_are_rejected_in_one_line(mujoco_machine, arguments, words):
    with pytest.raises(TaskError) as info:
        mujoco_machine.param(*arguments)
    assert words in str(info.value) and "\n" not in str(info.value)


def test_setting_parameters_does_not_synchronise():
    sim: Any = make("mjwarp", ball_scene(), NUM)
    sim._written_on_host = None  # a shortcut of the CPU only
    mass, gravity = sim.param("body_mass", "ball"), sim.param("gravity")
    heavy, light = 2.0 * mass.value, 0.5 * gravity.value
    where = only(sim, 1)
    sim.refresh()
    sim.step(1)
    with SyncCounter() as syncs:
        mass.set(heavy, where)
        gravity.set(light, where)
        sim.refresh()
        sim.step(1)
    assert syncs.total == 0, syncs.locations
    assert mass.value[:, 0].tolist() == [2.0, 4.0, 2.0, 2.0]
