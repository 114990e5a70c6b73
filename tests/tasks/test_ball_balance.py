"""BallBalance: fixed feet, knees that lift and tilt the tray, rewards and terminations."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from gpusim_rl.env import VecEnv
from gpusim_rl.env.math import quat_rotate
from helpers.scenes import everywhere
from helpers.task_envs import task_env, task_model

LEGS = (0.0, 2 * math.pi / 3, 4 * math.pi / 3)  # rad
BALL_WEIGHT = 4 / 3 * math.pi * 0.1**3 * 200 * 9.81  # N


make_env = partial(task_env, "BallBalance")


def put_ball(env: VecEnv, pos: list[list[float]], velocity: tuple[float, ...] = (0.0, 0.0, 0.0)) -> None:
    velocities = torch.tensor(velocity).expand(env.num_envs, 3)
    env.task.ball.set_state(everywhere(env), root_pos=torch.tensor(pos), root_lin_vel=velocities)


def remove_ball(env: VecEnv) -> None:
    put_ball(env, [[3.0, 0.0, 50.0]] * env.num_envs)


def tray_normal(env: VecEnv) -> Tensor:
    up = torch.tensor([0.0, 0.0, 1.0]).expand(env.num_envs, 3)
    return quat_rotate(env.task.robot.root_quat, up)


def test_feet_stay_in_place_under_random_knee_motion():
    env = make_env(num_envs=16)
    shins = env.task.robot.bodies(["lower_leg_1", "lower_leg_2", "lower_leg_3"])
    tip = 0.36 / math.sqrt(2) * torch.tensor([1.0, 0.0, -1.0])
    feet = torch.tensor([[0.4 * math.cos(angle), 0.4 * math.sin(angle), 0.02] for angle in LEGS])
    random = torch.Generator().manual_seed(0)
    worst = 0.0
    for step in range(200):
        push = 2.0 * torch.rand(16, 3, generator=random) - 1.0
        env.step(push if step % 20 < 10 else push.sign())
        drift = shins.pos + quat_rotate(shins.quat, tip.expand(16, 3, 3)) - feet
        worst = max(worst, float(drift.norm(dim=2).max()))
    assert 1e-5 < worst < 0.03


def test_stretching_all_knees_lifts_tray_and_one_knee_tilts_it():
    env = make_env()
    remove_ball(env)
    env.step(torch.zeros(4, 3))
    for _ in range(30):
        env.step(torch.tensor([[0.1, 0.1, 0.1], [0.1, 0.0, 0.0], [0.0, 0.1, 0.0], [0.0, 0.0, 0.1]]))
    knee = 0.6  # rad: 30 steps of 0.1 x 20 rad/s x 0.01 s
    lifted = 2 * 0.36 * math.sin(math.pi / 4 + knee / 2) + 0.05  # the legs are isosceles triangles on their feet
    torch.testing.assert_close(env.task.robot.joint_pos[0, 1::2], torch.full((3,), knee), atol=0.05, rtol=0)
    assert env.task.robot.root_pos[0, 2] == pytest.approx(lifted, abs=0.01)
    normal = tray_normal(env)
    assert normal[0, 2] > 0.9999
    for env_id, angle in enumerate(LEGS, start=1):
        away = -torch.tensor([math.cos(angle), math.sin(angle)])
        assert normal[env_id, :2] @ away > 0.2
        assert (normal[env_id, :2] - (normal[env_id, :2] @ away) * away).norm() < 0.02


def test_knee_targets_are_clamped_to_limits():
    env = make_env()
    remove_ball(env)
    for _ in range(20):
        env.step(torch.tensor([1.0, -1.0, 0.0]).expand(4, 3))
    expected = torch.deg2rad(torch.tensor([90.0, -70.0, 0.0])).expand(4, 3)
    torch.testing.assert_close(env.task.knee_target, expected)


def test_ball_weight_follows_density():
    assert 9.81 * task_model("BallBalance").body("ball/ball").mass[0] == pytest.approx(BALL_WEIGHT, rel=1e-4)


@pytest.mark.parametrize(
    ("pos", "velocity", "reward"),
    [
        ((0.0, 0.0, 0.7), (0.0, 0.0, 0.0), 1.0),
        ((0.3, 0.4, 0.7), (0.0, 0.0, 0.0), 1 / 1.5),
        ((0.0, 0.0, 0.2), (0.0, -3.0, 0.0), 1 / (1.5 * 4.0)),
    ],
)
def test_reward_at_known_states(pos, velocity, reward):
    env = make_env()
    put_ball(env, [list(pos)] * 4, velocity)
    torch.testing.assert_close(env.task.rewards()["balance"], torch.full((4,), reward))


def test_ball_off_the_tray_ends_episode():
    env = make_env()
    put_ball(env, [[0.7, 0.0, 0.149], [0.7, 0.0, 0.151], [0.0, 0.0, 0.7], [0.0, 0.0, 2.0]])
    assert env.task.terminated().tolist() == [True, False, False, False]
