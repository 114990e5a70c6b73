"""Tests of mass-dependent constants per world against MuJoCo's `mj_setConst`."""

from __future__ import annotations

from typing import Any

import mujoco
import numpy as np
import pytest
import torch

from gpusim_rl.sim import Scene
from gpusim_rl.sim.constants import constants_of
from gpusim_rl.sim.mjwarp import MjwarpSim
from gpusim_rl.sim.warp import WarpGraphs
from helpers.scenes import ANT, ant_scene, make, only, scene_with

# Every kind of joint, branches, a tendon with armature, a muscle on a joint and one on the tendon, a static body.
POST = """
<mujoco>
  <default><geom contype="0" conaffinity="0"/></default>
  <worldbody>
    <body name="post" pos="0.3 -0.2 0.1">
      <geom type="box" size="0.1 0.1 0.1" mass="1"/>
      <body name="hanging" pos="0 0 0.3">
        <joint name="ball" type="ball" armature="0.01"/>
        <geom type="capsule" size="0.03" fromto="0 0 0 0.1 0.2 0" mass="0.4"/>
      </body>
    </body>
  </worldbody>
</mujoco>
"""
CREATURE = """
<mujoco>
  <compiler autolimits="true"/>
  <default><geom contype="0" conaffinity="0"/></default>
  <worldbody>
    <body name="trunk" pos="3 -2 1" euler="20 30 40">
      <freejoint/>
      <geom type="ellipsoid" size="0.2 0.1 0.05" pos="0.02 0.01 0" mass="2"/>
      <body name="leg" pos="0.2 0 0" euler="0 50 0">
        <joint name="hip" axis="0 1 0" armature="0.02"/>
        <joint name="slide" type="slide" axis="0 0 1" ref="0.1"/>
        <geom type="capsule" size="0.04" fromto="0 0 0 0.3 0 0" mass="0.5"/>
        <body name="shin" pos="0.3 0 0">
          <joint name="knee" axis="0 1 0.2" ref="10"/>
          <geom type="capsule" size="0.03" fromto="0 0 0 0.2 0.1 0" mass="0.3"/>
        </body>
      </body>
      <body name="tail" pos="-0.2 0 0">
        <joint name="tail" axis="0 0 1"/>
        <geom type="box" size="0.1 0.02 0.03" pos="-0.1 0 0.01" mass="0.2"/>
      </body>
    </body>
  </worldbody>
  <tendon>
    <fixed name="cable" armature="0.03"><joint joint="hip" coef="1"/><joint joint="knee" coef="-0.5"/></fixed>
  </tendon>
  <actuator>
    <motor joint="hip" gear="3" armature="0.05"/>
    <muscle name="calf" joint="knee" gear="0.5" lengthrange="0.1 1"/>
    <muscle name="cable" tendon="cable" gear="-2" lengthrange="0.1 1"/>
    <motor name="winch" tendon="cable" gear="2" armature="0.01"/>
  </actuator>
</mujoco>
"""
FIELDS = ("body_mass", "body_inertia", "body_ipos", "dof_armature", "actuator_gear")
NUM = 5


def creature_scene() -> Scene:
    return scene_with(200, post=POST, creature=CREATURE)


def draw(sim: Any, articulation: str, fields: tuple[str, ...], where: torch.Tensor) -> None:
    random = torch.Generator().manual_seed(0)
    for field in fields:
        param = sim.param(field, articulation)
        factors = 0.5 + torch.rand(param.value.shape, generator=random)
        param.set(param.default * factors, where)


def expected(sim: MjwarpSim, world: int) -> mujoco.MjModel:
    """Return the scene's model with one world's parameters and MuJoCo's constants for them."""
    model = sim.scene.spec.copy().compile()
    for field, values in sim._params.values.items():
        getattr(model, field)[:] = values[world].numpy().reshape(getattr(model, field).shape)
    mujoco.mj_setConst(model, mujoco.MjData(model))
    return model


def check(sim: MjwarpSim, worlds: range) -> None:
    for world in worlds:
        model = expected(sim, world)
        for name, values in sim._constants.items():
            wanted = getattr(model, name)
            found = values[world].numpy().reshape(wanted.shape)
            np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=1e-7, err_msg=f"{name} of world {world}")


ALONE = [(creature_scene, "creature", (field,)) for field in FIELDS]


@pytest.mark.parametrize(
    ("scene", "name", "fields"), [*ALONE, (creature_scene, "creature", FIELDS), (ant_scene, "ant", FIELDS[:4])]
)
def test_constants_equal_mj_setconst(scene, name, fields):
    sim: Any = make("mjwarp", scene(), NUM)
    draw(sim, name, fields, only(sim, *range(NUM)))
    sim.refresh()
    assert list(sim._constants) == constants_of(sim.scene.model) and (name == "ant" or len(sim._constants) == 5)
    check(sim, range(NUM))


def test_gear_affects_constants_of_actuators_with_armature():
    spec = mujoco.MjSpec.from_string(CREATURE)
    for actuator in spec.actuators:
        if actuator.name in ("calf", "cable"):
            spec.delete(actuator)
    sim: Any = make("mjwarp", scene_with(200, creature=spec), NUM)
    draw(sim, "creature", ("actuator_gear",), only(sim, *range(NUM)))
    sim.refresh()
    assert "actuator_acc0" not in sim._constants
    check(sim, range(NUM))


def test_only_changed_worlds_are_recomputed():
    sim: Any = make("mjwarp", creature_scene(), NUM)
    draw(sim, "creature", FIELDS, only(sim))
    for values in sim._constants.values():
        values.fill_(-1.0)
    draw(sim, "creature", FIELDS, only(sim, 1, 3))
    sim.refresh()
    for name, values in sim._constants.items():
        changed = (values != -1.0).flatten(1).any(dim=1)
        assert changed.tolist() == [False, True, False, True, False], name
    for values in sim._constants.values():
        values.fill_(-1.0)
    draw(sim, "creature", FIELDS, only(sim, 4))
    sim.refresh()
    assert (sim._constants["dof_invweight0"] != -1.0).any(dim=1).tolist() == [False] * 4 + [True]


def test_unchanged_parameters_launch_no_kernel(monkeypatch):
    sim = make("mjwarp", ant_scene(), NUM)
    mass = sim.param("body_mass", "ant")
    launched: list[Any] = []
    run = WarpGraphs.run
    monkeypatch.setattr(WarpGraphs, "run", lambda self, key, body: (launched.append(key), run(self, key, body)))
    sim.step(1)
    mass.set(mass.value, only(sim))
    sim.step(1)
    assert "constants" not in launched
    mass.set(mass.value, only(sim, 2))
    sim.step(1)
    sim.step(1)
    assert launched.count("constants") == 1


def test_unchanged_world_moves_as_without_parameters():
    scene = scene_with(120, ground=True, ant=ANT)
    sim, plain = make("mjwarp", scene, 2), make("mjwarp", scene, 2)
    draw(sim, "ant", FIELDS[:4], only(sim, 1))
    for one in (sim, plain):
        one.articulation("ant").actuate(torch.full((2, 8), 0.5))
        for _ in range(40):
            one.step(1)
    assert torch.equal(sim.qpos[0], plain.qpos[0])
    assert not torch.equal(sim.qpos[1], plain.qpos[1])
