"""Franka tasks: published kinematics, and scripted hands that solve the tasks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mujoco
import numpy as np
import pytest
import torch
from gpusim_rl.tasks.franka_reach_camera import CAMERA, FOVY, LOOKS_AT
from torch import Tensor

from gpusim_rl.env import VecEnv
from gpusim_rl.env.math import quat_conjugate, quat_from_axis_angle, quat_multiply
from helpers.scenes import everywhere
from helpers.task_envs import class_env, task_model

OPEN, CLOSED = 1.0, -1.0
SPEED_LIMITS = torch.tensor([2.175] * 4 + [2.61] * 3)  # rad/s
UP = torch.tensor([0.0, 0.0, 1.0])


def make_env(name: str, num_envs: int, **settings: Any) -> VecEnv:
    env = class_env(name, num_envs, **{"randomize_episode_start": False, "episode_length": 10000, **settings})
    env.reset()
    return env


def rotation_between(start: Tensor, end: Tensor) -> Tensor:
    """Return the small rotation vector from one orientation to another [rad], shape [N, 3]."""
    turn = quat_multiply(end, quat_conjugate(start))
    return 2.0 * turn[:, 1:] * turn[:, :1].sign()


# The robot


def published_grip(joints: np.ndarray) -> np.ndarray:
    """Compute the pose of the grip point from the manufacturer's modified Denavit-Hartenberg table, shape [4, 4]."""
    table = [  # a [m], d [m], alpha [rad]
        (0.0, 0.333, 0.0),
        (0.0, 0.0, -math.pi / 2),
        (0.0, 0.316, math.pi / 2),
        (0.0825, 0.0, math.pi / 2),
        (-0.0825, 0.384, -math.pi / 2),
        (0.0, 0.0, math.pi / 2),
        (0.088, 0.0, math.pi / 2),
        (0.0, 0.107 + 0.1034, 0.0),
    ]
    pose = np.eye(4)
    for (a, d, alpha), theta in zip(table, [*joints, -math.pi / 4], strict=True):
        ca, sa, ct, st = math.cos(alpha), math.sin(alpha), math.cos(theta), math.sin(theta)
        pose = pose @ np.array(
            [[ct, -st, 0, a], [st * ca, ct * ca, -sa, -d * sa], [st * sa, ct * sa, ca, d * ca], [0, 0, 0, 1]]
        )
    return pose


def test_grip_pose_matches_published_dh_table():
    model = task_model("FrankaCubeStack")
    data = mujoco.MjData(model)
    base = model.body("franka/link0").pos
    for joints in np.random.default_rng(0).uniform(-2.0, 2.0, (50, 7)):
        data.qpos[:7] = joints
        mujoco.mj_kinematics(model, data)
        pose, grip = published_grip(joints), data.body("franka/grip")
        np.testing.assert_allclose(grip.xpos - base, pose[:3, 3], atol=1e-9)
        np.testing.assert_allclose(grip.xmat.reshape(3, 3), pose[:3, :3], atol=1e-9)


@pytest.mark.parametrize("name", ["FrankaCabinet", "FrankaCubeStack"])
def test_limits_and_masses_match_published_values(name):
    env = make_env(name, 1)
    robot, model = env.sim.articulation("franka"), env.sim.scene.model
    low = torch.tensor([-2.8973, -1.7628, -2.8973, -3.0718, -2.8973, -0.0175, -2.8973, 0.0, 0.0])
    high = torch.tensor([2.8973, 1.7628, 2.8973, -0.0698, 2.8973, 3.7525, 2.8973, 0.04, 0.04])
    torch.testing.assert_close(robot.joint_limits, torch.stack([low, high], dim=1), atol=1e-4, rtol=0.0)
    ranges = model.actuator_forcerange if name == "FrankaCabinet" else model.actuator_ctrlrange
    assert ranges[:7, 1].tolist() == [87.0] * 4 + [12.0] * 3
    arm = [model.body(f"franka/link{i}").mass[0] for i in range(8)]
    assert arm == [0.629769, 4.970684, 0.646926, 3.228604, 3.587895, 1.225946, 1.666555, 0.735522]


@pytest.mark.parametrize("name", ["FrankaCabinet", "FrankaCubeStack"])
def test_arm_holds_its_pose_against_gravity(name):
    env = make_env(name, 8, **({"control_type": "joint_tor"} if name == "FrankaCubeStack" else {}))
    start = env.task.robot.joint_pos.clone()
    still = torch.zeros(8, env.num_actions)
    if name == "FrankaCubeStack":
        still[:, -1] = OPEN
    for _ in range(60):
        env.step(still)
    moved = (env.task.robot.joint_pos - start)[:, :7].abs().max()
    assert moved < 1e-4


# FrankaCabinet


def reach(env: VecEnv, goal: Callable[[], Tensor], steps: int, gripper: float) -> dict[str, Tensor]:
    """Move the level hand to a point by inverse kinematics; return the last step's reward terms."""
    task = env.task
    dynamics = env.sim.articulation("franka").dynamics("grip")
    env.sim.refresh()
    # hand along -x, left finger up
    facing = torch.tensor([0.5, 0.5, -0.5, -0.5]).expand(env.num_envs, 4)
    terms: dict[str, Tensor] = {}
    for _ in range(steps):
        error = torch.cat([goal() - task.hand.pos[:, 0], rotation_between(task.hand.quat[:, 0], facing)], dim=1)
        velocity = 4.0 * error.clamp(-0.2, 0.2)
        joints = (torch.linalg.pinv(dynamics.jacobian[..., :7], rtol=0.05) @ velocity[..., None])[..., 0]
        fingers = torch.full((env.num_envs, 2), gripper)
        terms = env.step(torch.cat([joints / task.cfg.action_scale, fingers], dim=1)).terms
    return terms


def test_grasping_and_pulling_handle_opens_drawer():
    env = make_env("FrankaCabinet", 4)
    task = env.task

    def handle() -> Tensor:
        return task.handle.pos[:, 0]

    assert (task.stats()["opening"] == 0.0).all()
    terms = reach(env, lambda: handle() + torch.tensor([0.15, 0.0, 0.0]), 150, OPEN)
    distance = torch.linalg.vector_norm(handle() - task.hand.pos[:, 0], dim=1)
    torch.testing.assert_close(terms["distance"], 2.0 / (1.0 + distance**2) ** 2)
    torch.testing.assert_close(terms["rotation"], torch.full((4,), 0.5), atol=0.01, rtol=0.0)
    terms = reach(env, handle, 100, OPEN)
    torch.testing.assert_close(terms["distance"], torch.full((4,), 4.0), atol=0.01, rtol=0.0)
    assert (terms["around_handle"] == 0.125).all()
    torch.testing.assert_close(terms["finger_distance"], torch.zeros(4), atol=0.02, rtol=0.0)  # fingers wide open
    terms = reach(env, handle, 30, CLOSED)
    fingers = task.robot.joint_pos[:, 7:].sum(dim=1)
    torch.testing.assert_close(terms["finger_distance"], 5.0 * (0.08 - fingers), atol=0.02, rtol=0.0)
    assert (fingers > 0.012).all(), "fingers penetrate the handle"
    grasped = handle().clone()
    for pulled in (0.1, 0.2, 0.3):
        terms = reach(env, lambda: grasped + torch.tensor([pulled, 0.0, 0.0]), 60, CLOSED)  # noqa: B023
        opening = task.stats()["opening"]
        torch.testing.assert_close(opening, torch.full((4,), pulled), atol=0.02, rtol=0.0)
        torch.testing.assert_close(terms["open"], 1.5 * 7.5 * opening)
        torch.testing.assert_close(terms["bonuses"], 0.5 + 0.5 * (opening > 0.2))
        assert not task.terminated().any()
    opened = torch.zeros(4, dtype=torch.bool)
    for _ in range(100):
        reach(env, lambda: grasped + torch.tensor([0.42, 0.0, 0.0]), 1, CLOSED)
        opened |= task.progress == 0
    assert opened.all(), "an open drawer must end the episode"


def test_fingers_behind_handle_are_penalized():
    env = make_env("FrankaCabinet", 2)
    task = env.task
    # there is room between handle and drawer, but no motion reaches it, so the state is set
    stretched = torch.tensor([0.0, 0.9, 0.0, -0.6, 0.0, 1.5, 0.785, 0.02, 0.02])
    task.robot.set_state(everywhere(env), joint_pos=stretched.expand(2, 9))
    env.sim.refresh()
    assert (task.hand.pos[:, 1, 0] < task.handle.pos[:, 0, 0] - 0.04).all()
    terms = task.rewards()
    assert (terms.pop("bad_style") == -1.0).all()
    assert all((term == 0.0).all() for term in terms.values())


def speeds(env: VecEnv, steps: int, hold: int) -> Tensor:
    """Return the 97 % quantile of arm joint speeds under random actions; collisions and whipping are left out."""
    random, found = torch.Generator().manual_seed(0), []
    for step in range(steps):
        if step % hold == 0:
            action = torch.randint(-1, 2, (env.num_envs, env.num_actions), generator=random).float()
        env.step(action)
        found.append(env.task.robot.joint_vel[:, :7].abs().clone())
    return torch.cat(found).quantile(0.97, dim=0)


def test_drives_respect_joint_speed_limits():
    fast = speeds(make_env("FrankaCabinet", 32), 200, 25)
    assert (fast < 1.1 * SPEED_LIMITS).all() and (fast > 0.9 * SPEED_LIMITS).all(), fast


# FrankaCubeStack


def move(env: VecEnv, goal: Callable[[], Tensor], quat: Tensor, steps: int, gripper: float) -> dict[str, Tensor]:
    """Move the grip point with the task's controller; return the last step's reward terms."""
    task, terms = env.task, {}
    for _ in range(steps):
        error = torch.cat([goal() - task.hand.pos[:, 0], rotation_between(task.hand.quat[:, 0], quat)], dim=1)
        pull = 0.5 * error / torch.tensor([0.1] * 3 + [0.5] * 3)
        terms = env.step(torch.cat([pull, torch.full((env.num_envs, 1), gripper)], dim=1)).terms
    return terms


def from_above(cube_quat: Tensor) -> Tensor:
    """Return the orientation of a hand that points down and is aligned with the cube."""
    yaw = 2.0 * torch.atan2(cube_quat[:, 3], cube_quat[:, 0])
    turn = quat_from_axis_angle(UP.expand(len(yaw), 3), yaw)
    return quat_multiply(turn, torch.tensor([0.0, 1.0, 0.0, 0.0]).expand(len(yaw), 4))


def test_scripted_hand_stacks_cubes():
    env = make_env("FrankaCubeStack", 8, end_when_stacked=True)
    task = env.task
    cube_a, cube_b, hand = task.cube_a, task.cube_b, task.hand
    down = from_above(cube_a.root_quat)
    move(env, lambda: cube_a.root_pos + 0.1 * UP, down, 80, OPEN)
    terms = move(env, lambda: cube_a.root_pos, down, 60, OPEN)
    assert (terms["distance"] > 0.05).all() and (terms["lift"] == 0.0).all()
    move(env, lambda: cube_a.root_pos, down, 30, CLOSED)
    width = task.robot.joint_pos[:, 7:].sum(dim=1)
    torch.testing.assert_close(width, torch.full((8,), 0.05), atol=0.002, rtol=0.0)
    base = hand.pos[:, 0].clone()
    terms = move(env, lambda: base + 0.2 * UP, down, 80, CLOSED)
    assert (terms["lift"] == 1.5).all()

    def to_place(height: float) -> Callable[[], Tensor]:
        return lambda: hand.pos[:, 0] + cube_b.root_pos - cube_a.root_pos + height * UP

    move(env, to_place(0.12), down, 100, CLOSED)
    terms = move(env, to_place(0.062), down, 60, CLOSED)
    assert (terms["align"] > 1.7).all() and (terms["stack"] == 0.0).all(), "not released yet"
    there = hand.pos[:, 0].clone()
    move(env, lambda: there, down, 30, OPEN)
    stacked = torch.zeros(8, dtype=torch.bool)
    for _ in range(40):
        terms = move(env, lambda: there + 0.15 * UP, down, 1, OPEN)
        stacked |= terms["stack"] == 16.0
        assert all((term[terms["stack"] > 0] == 0.0).all() for name, term in terms.items() if name != "stack")
        assert torch.equal(terms["stack"] > 0, (terms["stack"] > 0) & (task.progress == 0))
    assert stacked.sum() >= 7
    now = task._stacked()
    task.advance(torch.arange(8) < 6)
    stats = task.stats()
    assert torch.equal(stats["stacked"], now.float()) and torch.equal(stats["success"][:6], now[:6].float())
    assert stats["success"][6:].isnan().all(), "no success before the episode ends"


def test_displacement_action_moves_hand_along_its_axis():
    env = make_env("FrankaCubeStack", 6, start_joint_noise=0.0)
    before = env.task.hand.pos[:, 0].clone()
    action = torch.cat([torch.eye(6), torch.ones(6, 1)], dim=1)
    action[2, 2] = -1.0  # the table blocks downward motion
    action[2] *= -1.0
    for _ in range(10):
        env.step(0.5 * action)
    moved = env.task.hand.pos[:, 0] - before
    for axis in range(3):
        others = [i for i in range(3) if i != axis]
        assert moved[axis, axis] > 0.02
        assert moved[axis, others].abs().max() < 0.2 * moved[axis, axis]
    spin = env.task.hand.ang_vel[3:, 0]
    assert (spin.diagonal() > 0.1).all() and (spin.abs().argmax(dim=1) == torch.arange(3)).all()
    assert moved[3:].abs().max() < 0.01


def test_torque_actions_set_motor_torques():
    env = make_env("FrankaCubeStack", 2, control_type="joint_tor")
    assert env.num_actions == 8 and env.obs_sizes == {"policy": 26}
    env.step(torch.tensor([[0.1] * 7 + [OPEN], [-0.1] * 7 + [CLOSED]]))
    torque = torch.tensor([8.7] * 4 + [1.2] * 3)
    torch.testing.assert_close(env.sim.ctrl[:, :7], torch.stack([torque, -torque]))
    torch.testing.assert_close(env.sim.ctrl[:, 7:], torch.tensor([[0.04, 0.04], [0.0, 0.0]]))


@pytest.mark.slow
def test_cubes_start_uniformly_and_apart():
    env = make_env("FrankaCubeStack", 2000)
    places = [cube.root_pos[:, :2] for cube in (env.task.cube_a, env.task.cube_b)]
    for place in places:
        assert place.abs().max() <= 0.25 + 1e-6
        # each of 5 x 5 cells has its share of the envs
        field = ((place + 0.25) / 0.1).floor().clamp(0, 4) @ torch.tensor([5.0, 1.0])
        assert (torch.bincount(field.long(), minlength=25) > 40).all()
    apart = torch.linalg.vector_norm(places[0] - places[1], dim=1)
    assert apart.min() >= 0.12 * math.sqrt(2.0) - 1e-6
    assert apart.max() > 0.4
    env.sim.step(60)
    for cube, half in ((env.task.cube_a, 0.025), (env.task.cube_b, 0.035)):
        resting = cube.root_pos[:, 2] - 1.025
        assert (resting - half).abs().quantile(0.9) < 1e-3


# FrankaReach


def go(env: VecEnv, goal: Tensor, steps: int) -> list[dict[str, Tensor]]:
    """Move the grip point by inverse kinematics; return the statistics of each step."""
    task = env.task
    dynamics = task.robot.dynamics("grip")
    env.sim.refresh()
    joints, stats = task.robot.joint_pos[:, :7].clone(), []
    for _ in range(steps):
        error = (goal - task.hand.pos[:, 0]).clamp(-0.05, 0.05)
        inverse = torch.linalg.pinv(dynamics.jacobian[:, :3, :7], rtol=0.05)
        joints += 0.3 * (inverse @ error[..., None])[..., 0]
        stats.append(env.step((joints - task.pose[:, :7]) / task.cfg.action_scale).stats)
    return stats


def give(env: VecEnv, targets: Tensor) -> None:
    """Move the targets without resetting their time."""
    env.task.target.value.copy_(targets)
    env.task.ball.set_state(everywhere(env), root_pos=targets)


def corners(env: VecEnv) -> Tensor:
    """Return the corners of the target box, shape [8, 3]."""
    low, high = env.task.target.limits
    return low + torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * 3) * (high - low)


def test_reach_reward_follows_formula():
    env = make_env("FrankaReach", 16)
    task, dt = env.task, 1.0 / 30.0
    random = torch.Generator().manual_seed(0)
    first, second = 2.0 * torch.rand(2, 16, 7, generator=random) - 1.0
    start = env.step(first).terms
    torch.testing.assert_close(start["action_rate"], -1e-3 * dt * first.square().sum(dim=1))
    for _ in range(5):
        terms = env.step(second).terms
    assert (terms["action_rate"] == 0.0).all()
    joints = task.robot.joint_pos[:, :7].double().numpy()
    hand = torch.from_numpy(np.stack([published_grip(row)[:3, 3] for row in joints])).float()
    distance = torch.linalg.vector_norm(hand - task.target.value, dim=1)
    assert distance.min() < 0.2 < distance.max()
    torch.testing.assert_close(terms["distance"], -0.2 * dt * distance)
    torch.testing.assert_close(terms["near"], 0.1 * dt * (1.0 - torch.tanh(distance / 0.1)), atol=1e-6, rtol=1e-4)
    speed = task.robot.joint_vel[:, :7].square().sum(dim=1)
    torch.testing.assert_close(terms["joint_vel"], -1e-3 * dt * speed)


def test_hand_reaches_all_corners_and_gets_new_targets():
    env = make_env("FrankaReach", 8)
    task = env.task
    give(env, corners(env))
    stats = go(env, corners(env), 60)  # control steps per target
    assert (stats[-2]["distance"] < 0.01).all(), "actions are not clamped"
    assert all(each["success"].isnan().all() for each in stats[:-1])
    assert (stats[-1]["success"] == 1.0).all()
    low, high = task.target.limits
    assert (task.target.value != corners(env)).all()
    assert ((low <= task.target.value) & (task.target.value <= high)).all()
    torch.testing.assert_close(task.ball.root_pos, task.target.value)
    give(env, task.hand.pos[:, 0] + 0.06 * UP)
    stats = [env.step(task.actions.clone()).stats for _ in range(60)]
    assert (stats[-1]["success"] == 0.0).all(), "6 cm is no success"


def test_reach_starts_near_pose_and_respects_speed_limits():
    env = make_env("FrankaReach", 64)
    task = env.task
    offset = (task.robot.joint_pos - task.pose)[:, :7].abs()
    assert 0.2 < offset.max() <= 0.25 and (task.robot.joint_vel == 0.0).all()
    assert task.hand.pos[:, 0, 2].min() > 0.05
    middle = torch.tensor([0.5, 0.0, 0.325])
    published = torch.from_numpy(published_grip(task.pose[0, :7].double().numpy())[:3, 3]).float()
    torch.testing.assert_close(published, middle, atol=2e-3, rtol=0.0)
    assert (speeds(env, 80, 8) < 1.1 * SPEED_LIMITS).all()


# FrankaReachCamera


def pinhole(points: Tensor, height: int) -> tuple[Tensor, Tensor]:
    """Columns and rows [pixels] of points in a square image of the camera, and their distances along its view [m]."""
    position, target = torch.tensor(CAMERA), torch.tensor(LOOKS_AT)
    view = torch.nn.functional.normalize(target - position, dim=0)
    right = torch.nn.functional.normalize(torch.linalg.cross(view, UP), dim=0)
    down = torch.linalg.cross(view, right)
    x, y, depth = ((points - position) @ torch.stack([right, down, view], dim=1)).unbind(dim=1)
    focal = 0.5 * height / math.tan(math.radians(FOVY) / 2)
    return torch.stack([focal * x / depth, focal * y / depth], dim=1) + 0.5 * height, depth


def red(images: Tensor) -> Tensor:
    """Pixels that show the ball, float32 [N, H, W]."""
    r, g, b = images.float().unbind(dim=-1)
    return ((r > 2.0 * g) & (r > 2.0 * b)).float()


def test_target_position_and_size_in_image_match_pinhole():
    env = make_env("FrankaReachCamera", 27)
    task = env.task
    low, high = task.target.limits
    places = low + torch.cartesian_prod(*[torch.tensor([0.0, 0.5, 1.0])] * 3) * (high - low)
    aside = task.pose.clone()
    aside[:, 0] = 2.5
    task.robot.set_state(everywhere(env), joint_pos=aside)
    give(env, places)
    env.sim.refresh()
    env.sim.draw()
    seen = red(task.camera.rgb)
    size = seen.shape[1]
    assert seen.shape == (27, size, size)
    assert seen[:, [0, -1]].sum() + seen[:, :, [0, -1]].sum() == 0, "a ball at the border"
    count = seen.sum(dim=(1, 2))
    middles = torch.arange(size) + 0.5
    found = torch.stack([(seen.sum(dim=1) @ middles) / count, (seen.sum(dim=2) @ middles) / count], dim=1)
    expected, depth = pinhole(places, size)
    assert (found - expected).abs().max() < 0.8
    radius = 0.05 * 0.5 * size / math.tan(math.radians(FOVY) / 2) / depth
    ratio = count / (math.pi * radius.square())
    assert (ratio > 0.6).all() and (ratio < 1.5).all(), ratio
    assert radius.max() > 2.0 * radius.min(), "the size tells how far away it is"


def test_policy_observes_target_only_in_images():
    env, plain = make_env("FrankaReachCamera", 4), make_env("FrankaReach", 4)
    obs, state = env.reset(), plain.reset()["policy"]
    for group in ("critic", "teacher"):
        assert torch.equal(obs[group], state), "seeds and numbers are those of FrankaReach"
    assert torch.equal(obs["policy"], torch.cat([state[:, :14], state[:, 17:]], dim=1))
    before = {name: value.clone() for name, value in obs.items()}
    low, high = env.task.target.limits
    env.task.target.hold(everywhere(env), low + 0.9 * (high - low))
    env.task.advance(torch.zeros(4, dtype=torch.bool))
    env.sim.refresh()
    env.sim.draw()
    obs = env.clean_obs()
    assert torch.equal(obs["policy"], before["policy"])
    assert all((obs[name] != before[name]).flatten(1).any(dim=1).all() for name in ("camera", "critic", "teacher"))
