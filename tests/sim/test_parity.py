"""Agreement of the simulators with `mujoco`, in single physics steps and contacts."""

from __future__ import annotations

import pytest
import torch

from helpers.scenes import FEET, advance, ant_scene, arm_scene, everywhere, make, randomize_ants

NUM = 256


@pytest.fixture(scope="module", params=["mjwarp", "newton"])
def ants(request: pytest.FixtureRequest):
    scene = ant_scene()
    pair = [make(name, scene, NUM) for name in ("mujoco", request.param)]
    return pair, [sim.articulation("ant") for sim in pair]


@pytest.fixture
def same_random_states(ants):
    sims, robots = ants
    for sim in sims:
        sim.reset(everywhere(sim))
    randomize_ants(robots)
    for sim in sims:
        sim.refresh()
    return sims, robots


def max_error(left: torch.Tensor, right: torch.Tensor) -> float:
    return (left - right).abs().max().item()


def test_one_step_from_random_states_agrees(same_random_states):
    (reference, sim), robots = same_random_states
    for one in (reference, sim):
        one.step(1)
    # 6e-5 is typical; with pyramidal cones it would be 0.46 (see Scene)
    for name in ("joint_vel", "root_lin_vel", "root_ang_vel"):
        left, right = (getattr(robot, name) for robot in robots)
        assert max_error(left, right) <= 2e-4, name
    assert max_error(reference.qpos, sim.qpos) <= 5e-6
    assert not sim.overflow.any()
    assert not sim.diverged.any()


@pytest.mark.parametrize("side", ["low", "high"])
def test_joints_at_their_limits_move_alike(ants, side):
    # A limit that differs in the last digit would stop the joint in one simulator only.
    sims, robots = ants
    random = torch.Generator().manual_seed(0)
    velocity = 2.0 * torch.rand(NUM, 8, generator=random) - 1.0
    for sim, robot in zip(sims, robots, strict=True):
        limit = robot.joint_limits[:, 0 if side == "low" else 1].expand(NUM, 8)
        sim.reset(everywhere(sim))
        height = torch.tensor([[0.0, 0.0, 5.0]]).expand(NUM, 3)
        robot.set_state(everywhere(sim), root_pos=height, joint_pos=limit, joint_vel=velocity)
        sim.refresh()
        sim.step(1)
    assert max_error(*(robot.joint_vel for robot in robots)) <= 1e-4


def test_contact_wrenches_agree(same_random_states):
    sims, robots = same_random_states
    feet = [robot.contacts(FEET) for robot in robots]
    for sim in sims:
        sim.step(1)
    assert (feet[0].force.norm(dim=-1) > 1.0).any(dim=1).sum() >= NUM // 2
    for name in ("force", "torque"):
        left, right = (getattr(contacts, name) for contacts in feet)
        assert left.abs().max() > 10.0
        torch.testing.assert_close(right, left, atol=2e-2, rtol=1e-3, msg=name)
    local = [contacts.in_body_frame() for contacts in feet]
    torch.testing.assert_close(local[1], local[0], atol=2e-2, rtol=1e-3)


def test_body_poses_and_velocities_agree(same_random_states):
    (reference, sim), robots = same_random_states
    bodies = [robot.bodies(["torso", *FEET]) for robot in robots]
    for one in (reference, sim):
        one.refresh()
    for _ in range(2):
        for name, tolerance in (("pos", 2e-5), ("quat", 2e-5), ("lin_vel", 1e-3), ("ang_vel", 1e-3)):
            left, right = (getattr(body, name) for body in bodies)
            assert max_error(left, right) <= tolerance, name
        for one in (reference, sim):
            one.step(1)


def test_reading_bodies_does_not_change_the_contact_torque():
    # Body poses follow the state, contact forces are of the last step: the lever must not mix the two.
    scene = ant_scene()
    plain, followed = make("mujoco", scene, 64), make("mujoco", scene, 64)
    robots = [sim.articulation("ant") for sim in (plain, followed)]
    robots[1].bodies(FEET)
    randomize_ants(robots)
    feet = [robot.contacts(FEET) for robot in robots]
    for sim in (plain, followed):
        sim.refresh()
        sim.step(2)
    assert feet[0].torque.abs().max() > 1.0
    assert torch.equal(feet[0].torque, feet[1].torque)
    assert torch.equal(feet[0].in_body_frame(), feet[1].in_body_frame())


@pytest.mark.parametrize("other", ["mjwarp", "newton"])
def test_pendulum_trajectories_agree_for_one_second(other):
    # Without contacts nothing is chaotic: the trajectories stay close, limits included.
    scene = arm_scene()
    sims = [make(name, scene, 8) for name in ("mujoco", other)]
    arms = [sim.articulation("arm") for sim in sims]
    random = torch.Generator().manual_seed(0)
    velocity = 6.0 * torch.rand(8, 2, generator=random) - 3.0
    for sim, arm in zip(sims, arms, strict=True):
        arm.set_state(everywhere(sim), joint_vel=velocity)
        arm.actuate(torch.full((8, 1), 0.3))
        sim.refresh()
        advance(sim, 200)
    assert max_error(arms[0].joint_pos, arms[1].joint_pos) <= 2e-3
    assert max_error(arms[0].joint_vel, arms[1].joint_vel) <= 2e-2
