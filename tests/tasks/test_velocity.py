"""The velocity tasks: rewards at known states, commands, pushes, and the numbers that tell success."""

from __future__ import annotations

import math

import pytest
import torch

import gpusim_rl
from gpusim_rl.env import VecEnv
from gpusim_rl.env.math import quat_from_axis_angle

NUM = 64
X, Z = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.0, 0.0, 1.0])


def make_env(robot: str = "Go1", num_envs: int = NUM, **settings) -> VecEnv:
    settings = {"randomize_episode_start": False, **settings}
    env = gpusim_rl.make_env(f"{robot}Velocity", num_envs=num_envs, sim="mujoco", device="cpu", task=settings)
    env.reset()
    return env


def everywhere(env: VecEnv) -> torch.Tensor:
    return torch.ones(env.num_envs, dtype=torch.bool)


def in_the_air(env: VecEnv, **state: torch.Tensor) -> dict[str, float]:
    """Rewards per second of a robot in its pose that touches nothing, in one env."""
    task, num = env.task, env.num_envs
    high = torch.tensor([0.0, 0.0, 1.0]).expand(num, 3)
    still = {"root_pos": high, "root_lin_vel": torch.zeros(num, 3), "root_ang_vel": torch.zeros(num, 3)}
    still |= {"joint_pos": task.pose.expand(num, -1), "joint_vel": torch.zeros(num, len(task.pose))}
    task.body.set_state(everywhere(env), **{**still, **{k: v.expand(num, -1) for k, v in state.items()}})
    env.sim.refresh()
    return {name: term[0].item() / task.dt for name, term in task.rewards().items()}


def test_what_follows_its_command_upright_in_its_pose_gets_all():
    env = make_env()
    env.task.command.value[:] = torch.tensor([1.0, 0.0, 0.5])
    level = quat_from_axis_angle(Z.expand(NUM, 3), torch.full((NUM,), 0.5 * math.pi))  # its x axis is the world's y
    moving = {"root_lin_vel": torch.tensor([0.0, 1.0, 0.0]), "root_ang_vel": 0.5 * Z}
    found = in_the_air(env, root_quat=level, **moving)
    assert {name: found[name] for name in ("lin_vel", "ang_vel", "upright", "pose")} == pytest.approx(
        {"lin_vel": 2.0, "ang_vel": 2.0, "upright": 1.0, "pose": 1.0}, abs=1e-5
    )
    assert found["joint_limits"] == found["foot_slip"] == found["soft_landing"] == found["swing_height"] == 0.0


def test_errors_are_paid_as_the_formulas_say():
    env = make_env()
    task = env.task
    task.command.value[:] = torch.tensor([1.0, 0.0, 0.5])
    tilted = quat_from_axis_angle(X.expand(NUM, 3), torch.full((NUM,), 0.3))
    knee = task.pose + 0.2 * torch.eye(12)[2]
    found = in_the_air(env, root_quat=tilted, root_lin_vel=torch.tensor([0.4, 0.0, 0.0]), joint_pos=knee)
    assert found["lin_vel"] == pytest.approx(2.0 * math.exp(-0.36 / 0.25), rel=1e-5)
    assert found["ang_vel"] == pytest.approx(2.0 * math.exp(-0.25 / 0.5), rel=1e-5)
    assert found["upright"] == pytest.approx(math.exp(-(math.sin(0.3) ** 2) / 0.2), rel=1e-5)
    assert found["pose"] == pytest.approx(math.exp(-((0.2 / 0.6) ** 2) / 12), rel=1e-5)
    assert task.errors[:, 0].tolist() == pytest.approx([0.6, 0.5])
    speed = (task.soles.lin_vel[0, :, :2]).norm(dim=1)
    height = task.soles.pos[0, :, 2]
    assert found["foot_clearance"] == pytest.approx(-2.0 * ((height - 0.1).abs() * speed).sum().item(), rel=1e-4)


def test_a_command_to_stand_is_zero_and_others_are_within_the_ranges_of_their_stage():
    env = make_env(num_envs=2048, command={"standing": 0.25, "heading": 0.0, "forward": 0.5})
    value = env.task.command.value
    still = (value == 0.0).all(dim=1)
    ahead = (value[:, 0] >= 0.3) & (value[:, 1:] == 0.0).all(dim=1)
    assert still.float().mean() == pytest.approx(0.25, abs=0.04)
    assert ahead.float().mean() == pytest.approx(0.375, abs=0.04)
    assert (value.abs() <= torch.tensor([1.0, 1.0, 0.5])).all()
    env.task.command._steps.fill_(240_000)
    env.task.command.resample(everywhere(env))
    value = env.task.command.value
    assert value[:, 0].max() > 2.5 and value[:, 0].min() < -1.5 and value[:, 1].abs().max() <= 1.0
    assert 0.6 < value[:, 2].abs().max() <= 0.7


def test_robots_turn_to_their_heading():
    env = make_env(command={"standing": 0.0, "heading": 1.0, "forward": 0.0})
    task = env.task
    task.command._heading.fill_(1.0)
    yaw = torch.linspace(-2.0, 2.0, NUM)
    task.command.turn(yaw)
    torch.testing.assert_close(task.command.value[:, 2], (0.5 * (1.0 - yaw)).clamp(-0.5, 0.5))


def test_pushes_come_within_their_interval_and_are_as_strong_as_configured():
    env = make_env(push={"interval": [0.04, 0.06], "lin_vel": [0.5, 0.0, 0.0], "ang_vel": [0.0, 0.0, 0.7]})
    task, pushed = env.task, torch.zeros(NUM)
    for _ in range(3):
        before = env.sim.qvel.clone()
        task._push()
        change = env.sim.qvel - before
        pushed += change.abs().sum(dim=1) > 0.0
        assert (change[:, 1:5].abs() < 1e-5).all() and (change[:, 6:] == 0.0).all()
        assert (change[:, 0].abs() <= 0.5).all() and (change[:, 5].abs() <= 0.7).all()
    assert (pushed >= 1).all() and (pushed <= 2).all()


def test_a_fall_ends_the_episode_and_is_counted_per_minute():
    env = make_env(num_envs=3)
    task = env.task
    angle = torch.tensor([0.0, 1.1, 1.4])
    task.body.set_state(everywhere(env), root_quat=quat_from_axis_angle(X.expand(3, 3), angle))
    assert task.terminated().tolist() == [False, False, True]
    assert task.stats()["falls_per_minute"].tolist() == [0.0, 0.0, 3000.0]  # one in a step of 0.02 s


def test_the_distance_is_that_of_the_episode_that_ended():
    env = make_env(num_envs=2, episode_length=3)
    task = env.task
    for _ in range(3):
        task.body.set_state(everywhere(env), root_pos=torch.tensor([[0.0, 0.0, 1.0], [3.0, 4.0, 1.0]]))
        step = env.step(torch.zeros(2, 12))
    assert step.truncated.all()
    torch.testing.assert_close(step.stats["distance"], torch.tensor([0.0, 5.0]), atol=1e-2, rtol=0.0)
    assert env.step(torch.zeros(2, 12)).stats["distance"].isnan().all()
