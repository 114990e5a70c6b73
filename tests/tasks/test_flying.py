"""Quadcopter and Ingenuity: thrust, targets, rewards and terminations."""

from __future__ import annotations

import math

import pytest
import torch

from gpusim_rl.env import VecEnv
from gpusim_rl.env.math import quat_from_axis_angle, quat_rotate
from helpers.task_envs import task_env

EVERYWHERE = torch.ones(4, dtype=torch.bool)
INGENUITY_WEIGHT = 1.8 * 3.721  # N
LIGHT = INGENUITY_WEIGHT / (2 * 20.0)  # action at which the rotors carry the weight

both = pytest.mark.parametrize("name", ["Quadcopter", "Ingenuity"])


def set_rotor_tilt(env: VecEnv, angles: torch.Tensor) -> None:
    env.task.robot.set_state(EVERYWHERE, joint_pos=angles)
    env.task.tilt_target.copy_(angles)
    env.sim.refresh()


def test_quadcopter_thrust_and_tilt_are_clamped():
    env = task_env("Quadcopter")
    set_rotor_tilt(env, torch.zeros(4, 8))
    action = torch.tensor([[1.0], [-1.0], [-1.0], [0.0]]).repeat(1, 12)
    action[2, :8] = 0.0  # tilt stays unchanged
    velocities = []
    for _ in range(6):
        env.step(action)
        velocities.append(env.task.robot.root_lin_vel[2, 2].item())
    tilt = math.radians(30.0)
    torch.testing.assert_close(env.task.tilt_target[:2], torch.tensor([[tilt], [-tilt]]).expand(2, 8))
    assert env.task.thrust[:2].tolist() == [[2.0] * 4, [0.0] * 4]
    assert velocities == pytest.approx([-9.81 * 0.01 * step for step in range(1, 7)], rel=1e-3)  # no thrust: free fall


def test_quadcopter_rotors_push_along_their_axes():
    env = task_env("Quadcopter")
    robot = env.task.robot
    # Env 0: no tilt. Env 1: every rotor rolls about its arm, which yaws the craft.
    tilt = torch.zeros(4, 8)
    tilt[1, 1::2] = 0.3
    set_rotor_tilt(env, tilt)
    action = torch.zeros(4, 12)
    action[:, 8:] = 1.0
    for _ in range(5):
        env.step(action)
    lift = 4 * 2.0 / 0.25154 - 9.81  # m/s^2
    assert robot.root_lin_vel[0, 2].item() == pytest.approx(lift * 0.05, rel=0.02)
    assert robot.root_ang_vel[0, 2].abs() < 1e-3
    assert robot.root_lin_vel[1, 2].item() == pytest.approx((4 * 2.0 * math.cos(0.3) / 0.25154 - 9.81) * 0.05, rel=0.02)
    assert robot.root_ang_vel[1, 2] < -2.0
    assert robot.root_lin_vel[:2, :2].abs().max() < 0.01


def test_ingenuity_hovers_in_mars_gravity():
    env = task_env("Ingenuity")
    robot = env.task.robot
    start = robot.root_pos.clone()
    for _ in range(100):
        env.step(torch.tensor([0.0, 0.0, LIGHT] * 2).expand(4, 6))
    assert (robot.root_pos - start).norm(dim=1).max() < 1e-3
    torch.testing.assert_close(robot.joint_vel, torch.tensor([-50.0, 50.0]).expand(4, 2), rtol=1e-3, atol=0.0)


def test_ingenuity_thrust_rotates_with_fuselage():
    env = task_env("Ingenuity")
    axis = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [0.6, 0.0, 0.8]])
    quat = quat_from_axis_angle(axis, torch.tensor([0.5, 1.5, 2.0, 3.0]))
    env.task.robot.set_state(EVERYWHERE, root_quat=quat)
    action = torch.tensor([0.1, -0.05, 0.5, 0.1, -0.05, 0.5]).expand(4, 6)
    env.task.apply_action(action)
    applied = env.sim.xfrc_applied.view(4, -1, 6)
    pushed = applied[:, :, :3].norm(dim=2) > 0
    assert pushed.sum(dim=1).tolist() == [2] * 4
    expected = quat_rotate(quat, 10.0 * torch.tensor([0.1, -0.05, 1.0]).expand(4, 3))
    torch.testing.assert_close(applied[:, :, :3].sum(dim=1), 2 * expected)


def test_ingenuity_lateral_thrust_is_a_fraction_and_tips_it():
    env = task_env("Ingenuity")
    actions = torch.tensor([[0.2, 0.0], [1.0, 0.0], [0.0, 0.2], [0.0, -1.0]])
    actions = torch.cat([actions, torch.full((4, 1), LIGHT)], dim=1).repeat(1, 2)
    for _ in range(10):
        env.step(actions)
    velocity, turn = env.task.robot.root_lin_vel, env.task.robot.root_ang_vel
    torch.testing.assert_close(velocity[0], velocity[1])
    assert velocity[0, 0] > 0.02 and turn[0, 1] > 0.5  # along +x, and nose down about +y
    assert velocity[2, 1] > 0.02 and turn[2, 0] < -0.5
    assert velocity[3, 1] < -0.02 and turn[3, 0] > 0.5
    assert turn[:, 2].abs().max() < 0.05  # rotors produce no yaw torque


def test_ingenuity_target_moves_on_schedule_within_reach():
    env = task_env("Ingenuity", num_envs=64, target_steps=7, lost_distance=8.0)
    task = env.task
    hover = torch.tensor([0.0, 0.0, LIGHT] * 2).expand(64, 6)
    moves = []
    for _ in range(21):
        before = task.target.root_pos.clone()
        env.step(hover)
        moved = (task.target.root_pos - before).norm(dim=1)
        moves.append(bool((moved > 1e-3).all()))
        assert (moved[moved <= 1e-3] < 1e-6).all(), "target drifts"
        way = (task.target.root_pos - task.robot.root_pos).norm(dim=1)
        assert way.max() < 0.91 * 8.0
    assert moves == [step % 7 == 0 for step in range(1, 22)]
    target = task.target.root_pos
    assert target[:, :2].abs().max() <= 5.0 and target[:, :2].abs().max() > 4.0
    assert target[:, 2].min() > 0.8 and target[:, 2].max() < 2.5


def test_final_observation_keeps_old_target():
    env = task_env("Ingenuity", target_steps=5, episode_length=5)
    hover = torch.tensor([0.0, 0.0, LIGHT] * 2).expand(4, 6)
    for _ in range(4):
        env.step(hover)
    way = env.task.target.root_pos - env.task.robot.root_pos
    step = env.step(hover)
    assert step.truncated.all()
    torch.testing.assert_close(3.0 * step.final_obs["policy"][:, :3], way, atol=1e-3, rtol=0)
    assert not torch.isclose(3.0 * step.obs["policy"][:, :3], way, atol=1e-3).all(dim=1).any()


@both
@pytest.mark.parametrize(
    ("way", "tip", "spin"),
    [((0.0, 0.0, 0.0), 0.0, 0.0), ((1.0, 0.0, 0.0), math.pi / 2, 0.0), ((0.3, 0.4, 0.0), 0.0, 2.0)],
)
def test_reward_at_known_states(name, way, tip, spin):
    env = task_env(name)
    task = env.task
    target = task.target if name == "Quadcopter" else task.target.root_pos
    axis = torch.tensor([1.0, 0.0, 0.0]).expand(4, 3)
    task.robot.set_state(
        EVERYWHERE,
        root_pos=(target + torch.tensor(way)).expand(4, 3),
        root_quat=quat_from_axis_angle(axis, torch.full((4,), tip)),
        root_lin_vel=torch.full((4, 3), 9.0),
        root_ang_vel=torch.tensor([7.0, 0.0, spin]).expand(4, 3),
    )
    near = 1 / (1 + sum(part**2 for part in way))
    up = {"Quadcopter": 1.0, "Ingenuity": 5.0}[name] / (1 + (1 - math.cos(tip)) ** 2)
    expected = {"position": near, "upright": near * up, "spin": near / (1 + spin**2)}
    for term, value in task.rewards().items():
        torch.testing.assert_close(value, torch.full((4,), expected.pop(term)), rtol=1e-4, atol=1e-5)
    assert not expected


@both
def test_episode_ends_too_far_from_target_or_too_low(name):
    env = task_env(name)
    task, cfg = env.task, env.cfg
    target = task.target.expand(4, 3) if name == "Quadcopter" else task.target.root_pos
    pos = target.clone()
    pos[0, 0] += cfg.lost_distance + 0.01
    pos[1, 0] += cfg.lost_distance - 0.01
    pos[2, 2] = cfg.lost_height - 0.01
    pos[3, 2] = cfg.lost_height + 0.01
    task.robot.set_state(EVERYWHERE, root_pos=pos)
    assert task.terminated().tolist() == [True, False, True, False]
