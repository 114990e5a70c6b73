"""Tests of operational-space control against simulated physics and its definition."""

from __future__ import annotations

import pytest
import torch

from gpusim_rl.env.math import operational_space_torque, solve_positive_definite
from helpers.scenes import everywhere, franka_scene, make


@pytest.mark.parametrize(
    "backend", ["mujoco", *(pytest.param(sim, marks=pytest.mark.slow) for sim in ("mujoco-shared", "mjwarp", "newton"))]
)
def test_torques_accelerate_the_hand_as_commanded(backend):
    # One step from rest, before damping and velocity matter. Gravity is compensated.
    sim = make(backend, franka_scene(physics_hz=1e4), 32)
    robot = sim.articulation("franka")
    hand, dynamics = robot.bodies(["grip"]), robot.dynamics("grip")
    start = torch.tensor([0.0, 0.2, 0.0, -2.6, 0.0, 2.9, 0.8, 0.02, 0.02])
    random = torch.Generator().manual_seed(0)
    spread = torch.cat([0.15 * torch.randn(32, 7, generator=random), torch.zeros(32, 2)], dim=1)
    robot.set_state(everywhere(sim), joint_pos=start + spread, joint_vel=torch.zeros(32, 9))
    sim.refresh()
    wanted, posture = torch.randn(32, 6, generator=random), 2.0 * torch.randn(32, 7, generator=random)
    jacobian, mass = dynamics.jacobian[..., :7], dynamics.mass_matrix[:, :7, :7]
    torque = operational_space_torque(jacobian, mass, wanted, posture)
    robot.actuate(torch.cat([torque, start[7:].expand(32, 2)], dim=1))
    sim.step(1)
    got = torch.cat([hand.lin_vel[:, 0], hand.ang_vel[:, 0]], dim=1) / sim.dt
    torch.testing.assert_close(got, wanted, atol=0.02, rtol=0.02)
    joints = robot.joint_vel[:, :7] / sim.dt
    free = torch.eye(7) - torch.linalg.pinv(jacobian) @ jacobian  # projector onto the null space of the hand
    assert (free @ joints[..., None]).norm() > 1.0


def test_posture_is_tracked_in_the_null_space():
    # q minimises |q - p| in the metric M subject to J q = a, so M (q - p) is in the row space of J.
    random = torch.Generator().manual_seed(0)
    root = torch.randn(64, 7, 7, generator=random, dtype=torch.float64)
    mass = root @ root.mT + 0.5 * torch.eye(7, dtype=torch.float64)
    jacobian = torch.randn(64, 6, 7, generator=random, dtype=torch.float64)
    acceleration = torch.randn(64, 6, generator=random, dtype=torch.float64)
    posture = torch.randn(64, 7, generator=random, dtype=torch.float64)
    torque = operational_space_torque(jacobian, mass, acceleration, posture)
    joints = torch.linalg.solve(mass, torque[..., None])
    free = torch.linalg.svd(jacobian).Vh[:, 6:]  # null space of the hand
    push = free @ mass @ (joints - posture[..., None])
    assert push.abs().max() < 1e-9
    # zero hand and posture accelerations give zero torque
    still = operational_space_torque(jacobian, mass, torch.zeros_like(acceleration), torch.zeros_like(posture))
    assert still.abs().max() == 0.0


def test_singular_arm_gets_finite_torques():
    jacobian = torch.randn(1, 6, 7)
    jacobian[:, 2] = jacobian[:, 1]  # rank-deficient
    torque = operational_space_torque(jacobian, torch.eye(7)[None], torch.ones(1, 6), torch.zeros(1, 7))
    assert torque.isfinite().all()
    assert torque.abs().max() < 1e5


@pytest.mark.parametrize("size", [1, 2, 6, 7])
def test_positive_definite_solver_matches_torch(size):
    random = torch.Generator().manual_seed(size)
    root = torch.randn(5, 3, size, size, generator=random)
    matrix = root @ root.mT + 0.1 * torch.eye(size)
    right = torch.randn(5, 3, size, 4, generator=random)
    kept = matrix.clone(), right.clone()
    expected = torch.linalg.solve(matrix.double(), right.double()).float()
    torch.testing.assert_close(solve_positive_definite(matrix, right), expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(matrix, kept[0]) and torch.equal(right, kept[1])
