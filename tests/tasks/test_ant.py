"""Ant, and Humanoid where it shares code: reward terms at known states, terminations, starts and motors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import mujoco
import pytest
import torch
from torch import Tensor

from gpusim_rl.env import VecEnv
from helpers.task_envs import task_env

EVERYWHERE = torch.ones(4, dtype=torch.bool)
LEG = ["hip_x", "hip_z", "hip_y", "knee", "ankle_y", "ankle_x"]
ARM = ["shoulder1", "shoulder2", "elbow"]
HUMANOID = ["abdomen_z", "abdomen_y", "abdomen_x"]
HUMANOID += [f"{side}_{joint}" for part in (LEG, ARM) for side in ("right", "left") for joint in part]
JOINTS = {"Ant": [f"{joint}_{leg}" for leg in (1, 2, 3, 4) for joint in ("hip", "ankle")], "Humanoid": HUMANOID}
STRONG = [67.5] * 3 + [45.0, 45.0, 135.0, 90.0, 22.5, 22.5] * 2 + [67.5, 67.5, 45.0] * 2
TORQUE = {"Ant": [15.0] * 8, "Humanoid": STRONG}  # N m
HEIGHT = {"Ant": 0.31, "Humanoid": 0.8}  # m; lower is a fall

both = pytest.mark.parametrize("name", ["Ant", "Humanoid"])


def turned(axis: Sequence[float], angles: Sequence[float]) -> Tensor:
    """Return quaternions of rotations about an axis by angles [rad]."""
    return torch.tensor([[math.cos(angle / 2), *(math.sin(angle / 2) * part for part in axis)] for angle in angles])


def put(env: VecEnv, **state: Tensor) -> None:
    """Put robots 3 m up with joints in the middle of their ranges, unless `state` overrides it."""
    robot, num = env.task.robot, env.num_envs
    middle = robot.joint_limits.mean(dim=1).expand(num, -1)
    standard = {"root_pos": torch.tensor([0.0, 0.0, 3.0]).expand(num, 3), "joint_pos": middle}
    robot.set_state(torch.ones(num, dtype=torch.bool), **{**standard, **state})
    env.sim.refresh()


def check(term: Tensor, expected: Sequence[float], atol: float = 1e-5) -> None:
    torch.testing.assert_close(term, torch.tensor(expected), rtol=1e-4, atol=atol)


@both
def test_progress_is_speed_towards_target(name):
    env = task_env(name)
    start = torch.tensor([[0.0, 0.0, 3.0]] * 3 + [[700.0, 400.0, 3.0]])  # the last target is in direction (300, -400)
    put(env, root_pos=start)
    env.task.rewards()
    moved = torch.tensor([[0.05, 0.0, 0.0], [-0.05, 0.0, 0.0], [0.0, 0.05, 0.05], [0.0, -0.05, 0.0]])
    put(env, root_pos=start + moved)
    check(env.task.rewards()["progress"], [3.0, -3.0, 0.0, 2.4], atol=0.01)  # 60 Hz; 1 km away float32 is coarse
    check(env.task.rewards()["progress"], [0.0] * 4)


@both
def test_alive_and_up_rewards(name):
    env = task_env(name)
    put(env, root_quat=turned((0.6, 0.8, 0.0), [0.0, 0.37, 0.38, math.pi]))  # cosines 1, 0.932, 0.929, -1
    terms = env.task.rewards()
    check(terms["alive"], [{"Ant": 0.5, "Humanoid": 2.0}[name]] * 4)
    check(terms["up"], [0.1, 0.1, 0.0, 0.0])


@both
def test_heading_reward_favors_facing_target(name):
    env = task_env(name)
    put(env, root_quat=turned((0.0, 0.0, 1.0), [0.0, 0.6, -1.0, 2.5]))
    check(env.task.rewards()["heading"], [0.5, 0.5, 0.5 * math.cos(1.0) / 0.8, 0.5 * math.cos(2.5) / 0.8])
    beside = torch.tensor([700.0, 400.0, 3.0]).expand(4, 3)
    put(env, root_pos=beside, root_quat=turned((0.0, 0.0, 1.0), [0.0, math.pi / 2, -math.pi / 2, math.pi]))
    check(env.task.rewards()["heading"], [0.5 * 0.6 / 0.8, -0.5, 0.5, -0.5 * 0.6 / 0.8])
    put(env, root_quat=turned((0.0, 1.0, 0.0), [0.5, -1.0, 2.5, math.pi / 2]))  # looking up or down reduces heading
    check(env.task.rewards()["heading"], [0.5, 0.5 * math.cos(1.0) / 0.8, 0.5 * math.cos(2.5) / 0.8, 0.0])


@both
def test_actions_and_energy_cost(name):
    env = task_env(name)
    robot = env.task.robot
    action, speed = torch.zeros(2, 4, env.num_actions).unbind()
    action[1, 3], action[2, 3], action[3] = 0.5, -0.5, 1.0
    speed[0], speed[1, 3], speed[2, 3], speed[3, 3] = 5.0, 4.0, 4.0, -4.0
    env.task.actions.copy_(action)
    put(env, joint_vel=speed)
    terms = env.task.rewards()
    # Humanoid's joint 3, right_hip_x, has a motor of 45 N m; its strongest have 135 N m
    per_action, per_power = {"Ant": (0.005, 0.05 * 0.2), "Humanoid": (0.01, 0.05 * 0.1 * 45 / 135)}[name]
    check(terms["action_cost"], [0.0, -0.25 * per_action, -0.25 * per_action, -per_action * len(robot.actuator_names)])
    check(terms["energy_cost"], [0.0, -2.0 * per_power, -2.0 * per_power, -4.0 * per_power])


def test_ant_pays_a_tenth_per_joint_at_upper_limit():
    env = task_env("Ant")
    low, high = env.task.robot.joint_limits.unbind(dim=1)
    place = torch.zeros(4, 8)  # from -1 to 1
    place[0, [0, 5]], place[1, 2], place[2], place[3, 1] = 0.995, 0.98, -1.0, 1.02
    put(env, joint_pos=(low + high) / 2 + place * (high - low) / 2)
    check(env.task.rewards()["joint_limit_cost"], [-0.2, 0.0, 0.0, -0.1])


@both
def test_fall_ends_episode_and_replaces_all_other_rewards(name):
    env = task_env(name)
    height = HEIGHT[name] + torch.tensor([-0.2, -0.005, 0.005, 2.0])
    fell = torch.tensor([True, True, False, False])
    put(env, root_pos=torch.stack([torch.full((4,), 0.3), torch.zeros(4), height], dim=1))
    env.task.actions.fill_(1.0)
    assert torch.equal(env.task.terminated(), fell)
    terms = env.task.rewards()
    check(terms.pop("death"), [{"Ant": -2.0, "Humanoid": -1.0}[name]] * 2 + [0.0] * 2)
    for term, value in terms.items():
        assert (value[fell] == 0.0).all(), term
    assert (terms["alive"][~fell] > 0.0).all() and (terms["action_cost"][~fell] < 0.0).all()


@both
def test_reset_and_resume_are_not_rewarded_as_progress(name):
    env = task_env(name)
    away = torch.tensor([[50.0, 0.0, 0.1], [50.0, 0.0, 3.0], [-50.0, 0.0, 0.1], [0.0, 50.0, 3.0]])
    put(env, root_pos=away)
    still = torch.zeros(4, env.num_actions)
    assert env.step(still).terminated.tolist() == [True, False, True, False]
    assert (env.step(still).terms["progress"].abs() < 5.0).all()  # 100 m would be 6000
    state = env.state_dict()
    del state["task"]["tensors"]["distance"]  # as in an old checkpoint
    env.load_state_dict(state)
    assert (env.step(still).terms["progress"].abs() < 5.0).all()


@both
def test_starts_vary_around_reference_pose(name):
    env = task_env(name, num_envs=256)
    robot = env.task.robot
    low, high = robot.joint_limits.unbind(dim=1)
    reference = robot.default_joint_pos.clamp(low, high)
    assert torch.equal(robot.root_pos, robot.default_root_pos.expand(256, 3))
    assert (robot.root_lin_vel == 0.0).all() and (robot.root_ang_vel == 0.0).all()
    away = robot.joint_pos - reference
    assert away.abs().max() <= 0.2 + 1e-6 and (robot.joint_pos >= low).all() and (robot.joint_pos <= high).all()
    # up to 0.2 rad or the limit in both directions; Humanoid's legs never start inwards
    free = torch.tensor([not (name == "Humanoid" and joint.endswith("hip_x")) for joint in robot.joint_names])
    assert (away.amax(dim=0) > 0.9 * (high - reference).clamp(max=0.2) - 1e-6)[free].all()
    assert (away.amax(dim=0) <= 0.0)[~free].all()
    assert (away.amin(dim=0) < 0.9 * (low - reference).clamp(min=-0.2) + 1e-6).all()
    speed = robot.joint_vel.abs().amax(dim=0)
    assert (speed <= 0.1).all() and (speed > 0.09).all()
    assert not env.task.terminated().any()


@both
def test_actions_map_to_joints_in_order_with_motor_torques(name):
    env = task_env(name)
    robot = env.task.robot
    assert robot.joint_names == robot.actuator_names == JOINTS[name]
    action = torch.linspace(-1.5, 1.5, env.num_actions).repeat(4, 1)
    env.step(action)
    data = mujoco.MjData(env.sim.scene.model)
    data.ctrl[:] = env.sim.ctrl[0]
    mujoco.mj_forward(env.sim.scene.model, data)
    torque = torch.tensor(TORQUE[name]) * action[0].clamp(-1.0, 1.0)
    check(torch.from_numpy(data.qfrc_actuator[6:]).float(), torque.tolist())
