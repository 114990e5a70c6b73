"""Tests of Jacobians and mass matrices against MuJoCo's."""

from __future__ import annotations

import mujoco
import numpy as np
import pytest
import torch

from gpusim_rl.errors import TaskError
from gpusim_rl.sim import Articulation, Scene, Sim
from helpers.scenes import ant_scene, arm_scene, ball_scene, everywhere, franka_scene, make, randomize_ants

SIMS = ["mujoco", "mujoco-shared", "mjwarp", pytest.param("newton", marks=pytest.mark.slow)]

# A slide that carries a hinge, and a separate branch, whose columns must be zero. The base is heavy and fixed.
CRANE = """
<mujoco>
  <compiler angle="radian"/>
  <worldbody>
    <body name="base" pos="0.3 0 1" euler="0.4 0.2 0">
      <geom type="sphere" size="0.1" mass="50"/>
      <body name="trolley" pos="0 0.2 0" euler="0 0.5 0">
        <joint name="rail" type="slide" axis="1 0.5 0" armature="0.3"/>
        <geom type="box" size="0.1 0.05 0.02" pos="0.05 0 0" euler="0 0 0.7" mass="2"/>
        <body name="jib" pos="0.1 0 -0.1">
          <joint name="pivot" axis="0 0.6 0.8" pos="0.02 0.03 0"/>
          <geom type="capsule" size="0.03" fromto="0 0 0 0.3 0.2 0.1" mass="0.7"/>
          <body name="hook" pos="0.3 0.2 0.1"/>
        </body>
      </body>
      <body name="bell" pos="0 -0.2 0">
        <joint name="swing" axis="1 0 0"/>
        <geom type="sphere" size="0.05" pos="0 0 -0.2" mass="1"/>
      </body>
    </body>
  </worldbody>
</mujoco>
"""


def crane_scene() -> Scene:
    scene = ball_scene()  # the crane's joints are not the first of the scene
    scene.add("crane", mujoco.MjSpec.from_string(CRANE), pos=(2.0, 1.0, 0.0))
    return scene


ROBOTS = [
    (franka_scene, "franka", "grip"),
    (franka_scene, "franka", "link4"),
    (crane_scene, "crane", "hook"),
    (crane_scene, "crane", "base"),
    (ant_scene, "ant", "back_left_foot"),
]


def randomize(sim: Sim, robot: Articulation, seed: int = 0) -> None:
    if sim.scene.articulation_names == ["ant"]:
        randomize_ants([robot], seed)
    else:
        random = torch.Generator().manual_seed(seed)
        low, high = (limit.nan_to_num(posinf=1.5, neginf=-1.5) for limit in robot.joint_limits.unbind(dim=1))
        joint_pos = low + (high - low) * torch.rand(sim.num_envs, len(low), generator=random)
        robot.set_state(everywhere(sim), joint_pos=joint_pos)
    sim.refresh()


def mujoco_dynamics(sim: Sim, name: str, body: str) -> tuple[np.ndarray, np.ndarray]:
    """Return Jacobians and mass matrices of every world, computed by MuJoCo in float64."""
    model, data = sim.scene.model, mujoco.MjData(sim.scene.model)
    joints = [j for j in range(model.njnt) if model.joint(j).name.startswith(f"{name}/")]
    dofs = [model.jnt_dofadr[j] for j in joints if model.jnt_type[j] != mujoco.mjtJoint.mjJNT_FREE]
    jacobians, masses = [], []
    for qpos in sim.qpos.double().numpy():
        data.qpos[:] = qpos
        mujoco.mj_forward(model, data)
        jacobian, mass = np.zeros((6, model.nv)), np.zeros((model.nv, model.nv))
        mujoco.mj_jacBody(model, data, jacobian[:3], jacobian[3:], model.body(f"{name}/{body}").id)
        for column in range(model.nv):
            unit = np.zeros(model.nv)
            unit[column] = 1.0
            mujoco.mj_mulM(model, data, mass[column], unit)
        jacobians.append(jacobian[:, dofs])
        masses.append(mass[np.ix_(dofs, dofs)])
    return np.stack(jacobians), np.stack(masses)


@pytest.mark.parametrize("backend", SIMS)
@pytest.mark.parametrize(("scene", "name", "body"), ROBOTS)
def test_jacobian_and_mass_matrix_equal_mujocos(backend, scene, name, body):
    sim = make(backend, scene(), 16)
    robot = sim.articulation(name)
    dynamics = robot.dynamics(body)
    for seed in range(2):  # they follow the state
        randomize(sim, robot, seed)
        jacobian, mass = mujoco_dynamics(sim, name, body)
        assert (body == "base") == (np.abs(jacobian).max() == 0.0)
        torch.testing.assert_close(dynamics.jacobian, torch.from_numpy(jacobian).float(), atol=1e-5, rtol=0.0)
        torch.testing.assert_close(dynamics.mass_matrix, torch.from_numpy(mass).float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", SIMS)
def test_jacobian_maps_joint_to_body_velocity(backend):
    sim = make(backend, franka_scene(), 8)
    robot = sim.articulation("franka")
    hand, dynamics = robot.bodies(["grip"]), robot.dynamics("grip")
    randomize(sim, robot)
    random = torch.Generator().manual_seed(1)
    robot.set_state(everywhere(sim), joint_vel=torch.randn(8, 9, generator=random))
    sim.refresh()
    velocity = (dynamics.jacobian @ robot.joint_vel[..., None])[..., 0]
    torch.testing.assert_close(velocity[:, :3], hand.lin_vel[:, 0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(velocity[:, 3:], hand.ang_vel[:, 0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", SIMS)
def test_step_updates_jacobian_and_mass_matrix(backend):
    sim = make(backend, arm_scene(), 4)
    arm = sim.articulation("arm")
    dynamics = arm.dynamics("lower")
    arm.set_state(everywhere(sim), joint_vel=torch.tensor([5.0, -3.0]).expand(4, 2))
    sim.refresh()
    before = dynamics.mass_matrix.clone()
    sim.step(10)
    jacobian, mass = mujoco_dynamics(sim, "arm", "lower")
    assert (dynamics.mass_matrix - before).abs().max() > 1e-3
    torch.testing.assert_close(dynamics.jacobian, torch.from_numpy(jacobian).float(), atol=1e-5, rtol=0.0)
    torch.testing.assert_close(dynamics.mass_matrix, torch.from_numpy(mass).float(), atol=1e-5, rtol=1e-5)


def test_missing_body_or_joints_are_reported():
    sim = make("mujoco", crane_scene(), 1)
    with pytest.raises(TaskError, match=r"'crane' .* 'hand'.*hook"):
        sim.articulation("crane").dynamics("hand")
    with pytest.raises(TaskError, match="no joints"):
        sim.articulation("ball").dynamics("ball")
