"""Velocity tasks: rewards at known states, commands, pushes, success statistics, vision."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import mujoco
import pytest
import torch
from gpusim_rl.tasks.go1_velocity import Go1Velocity
from gpusim_rl.tasks.robots import SensorGroup

import gpusim_rl
from gpusim_rl.api import prepare
from gpusim_rl.env import VecEnv
from gpusim_rl.env.math import euler_xyz, quat_from_axis_angle, wrap_angle
from gpusim_rl.env.mirrors import mirrored
from gpusim_rl.errors import ConfigError, TaskError
from gpusim_rl.settings.compose import compose
from helpers.raised import raises
from helpers.scenes import everywhere
from helpers.task_envs import task_env

NUM = 64
X, Z = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.0, 0.0, 1.0])


def make_env(robot: str = "Go1", num_envs: int = NUM, **settings) -> VecEnv:
    full = compose([f"task={robot}Velocity", "recipe=full"])["task"]  # as in mjlab
    settings |= {name: {**full[name], **settings.get(name, {})} for name in ("weights", "command")}
    return task_env(f"{robot}Velocity", num_envs, **settings)


def in_the_air(env: VecEnv, **state: torch.Tensor) -> dict[str, float]:
    """Return env 0's rewards per second for a robot in its default pose without contacts."""
    task, num = env.task, env.num_envs
    high = torch.tensor([0.0, 0.0, 1.0]).expand(num, 3)
    still = {"root_pos": high, "root_lin_vel": torch.zeros(num, 3), "root_ang_vel": torch.zeros(num, 3)}
    still |= {"joint_pos": task.pose.expand(num, -1), "joint_vel": torch.zeros(num, len(task.pose))}
    task.body.set_state(everywhere(env), **{**still, **{k: v.expand(num, -1) for k, v in state.items()}})
    env.sim.refresh()
    return {name: term[0].item() / task.dt for name, term in task.rewards().items()}


def test_perfect_tracking_gets_the_full_reward():
    env = make_env()
    env.task.command.value[:] = torch.tensor([1.0, 0.0, 0.5])
    level = quat_from_axis_angle(Z.expand(NUM, 3), torch.full((NUM,), 0.5 * math.pi))  # robot x is world y
    moving = {"root_lin_vel": torch.tensor([0.0, 1.0, 0.0]), "root_ang_vel": 0.5 * Z}
    found = in_the_air(env, root_quat=level, **moving)
    most = {"lin_vel": 2.0, "ang_vel": 2.0, "upright": 1.0, "pose": 1.0}
    assert {name: found[name] for name in most} == pytest.approx(most, abs=1e-5)
    assert found["joint_limits"] == found["foot_slip"] == found["soft_landing"] == found["swing_height"] == 0.0


def test_tracking_errors_are_rewarded_by_formula():
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
    speed = torch.stack([sole.data[0, :2] for sole in task.sole_vel]).norm(dim=1)
    height = torch.stack([sole.data[0, 2] for sole in task.sole_pos])
    assert found["foot_clearance"] == pytest.approx(-2.0 * ((height - 0.1).abs() * speed).sum().item(), rel=1e-4)


def test_sensors_are_read_in_any_order():
    env = make_env(num_envs=2)
    for names in (["ahead", "left", "up"], ["up", "left", "ahead"], ["ahead", "up", "left"], ["left"]):
        group = SensorGroup(env.sim, names)
        assert torch.equal(group.data, torch.stack([sensor.data for sensor in group], dim=1))


def test_standing_commands_are_zero_and_others_within_stage_ranges():
    env = make_env(num_envs=2048, command={"standing": 0.25, "heading": 0.0, "forward": 0.5})
    value = env.task.command.value.clone()
    still = (value == 0.0).all(dim=1)
    ahead = (value[:, 0] >= 0.3) & (value[:, 1:] == 0.0).all(dim=1)
    assert still.float().mean() == pytest.approx(0.25, abs=0.04)
    assert ahead.float().mean() == pytest.approx(0.375, abs=0.04)
    assert (value.abs() <= torch.tensor([1.0, 1.0, 0.5])).all()
    env.task.command._steps.fill_(240_000)
    env.task.command._drawn[:, 4] = 0.0  # no time left
    step = env.step(torch.zeros(2048, 12))
    assert torch.equal(step.final_obs["critic"][:, 45:48], value)  # new commands are for the next step
    value = env.task.command.value
    assert value[:, 0].max() > 2.5 and value[:, 0].min() < -1.5 and value[:, 1].abs().max() <= 1.0
    assert 0.6 < value[:, 2].abs().max() <= 0.7


def test_resumed_run_uses_new_commands():
    trained = make_env(num_envs=4, command={"stages": [{"steps": 2, "y": [-2.0, 2.0]}]})
    for _ in range(3):
        trained.step(torch.zeros(4, 12))
    fixed = {"x": [0.5, 0.5], "y": [0.0, 0.0], "yaw": [0.0, 0.0], "standing": 0.0, "heading": 0.0, "forward": 0.0}
    env = make_env(num_envs=4, command={**fixed, "stages": []})
    env.begin_from(trained.state_dict())
    assert torch.equal(env.task.command.value, torch.tensor([0.5, 0.0, 0.0]).expand(4, 3))
    same = make_env(num_envs=4, command={"stages": [{"steps": 2, "y": [-2.0, 2.0]}]})
    same.begin_from(trained.state_dict())
    assert torch.equal(same.task.command.limits, trained.task.command.limits)
    assert same.task.command.limits[1, 1] == 2.0


def test_command_ranges_widen_only_below_error_threshold():
    stages = [{"steps": 2, "y": [-2.0, 2.0]}]
    env = make_env(num_envs=4, command={"stages": stages, "stage_error": 0.25})
    command, unit = env.task.command, torch.rand(4, 8)
    for errors in ([0.2, 0.2, 0.2, 0.2], [0.2, 0.2, 0.2, 0.6], [0.0, 0.0, 0.0, 0.9]):
        assert command.limits[1, 1] == 1.0
        command.advance(unit, torch.tensor(errors))
    assert command.limits[1, 1] == 2.0
    for stage_error, counted in ((1e-6, 0), (None, 1)):
        env = make_env(num_envs=4, command={"stages": stages, "stage_error": stage_error})
        before = env.task.command._steps.clone()
        env.step(torch.zeros(4, 12))
        assert env.task.command._steps - before == counted


def test_heading_control_sets_yaw_command():
    env = make_env(command={"standing": 0.0, "heading": 1.0, "forward": 0.0})
    task = env.task
    for _ in range(2):  # at the start and one step later
        _, _, yaw = euler_xyz(task.body.root_quat)
        expected = (0.5 * wrap_angle(task.command._drawn[:, 3] - yaw)).clamp(-0.5, 0.5)
        torch.testing.assert_close(task.command.value[:, 2], expected, atol=1e-5, rtol=0.0)
        assert expected.std() > 0.2
        env.step(torch.zeros(NUM, 12))


def test_servo_tracks_target_of_biased_encoder():
    env = make_env(num_envs=4)
    task = env.task
    assert 0.01 < task.encoder_bias.abs().max() <= 0.015
    task.apply_action(torch.zeros(4, 12))
    task.body.set_state(everywhere(env), joint_pos=env.sim.ctrl)
    env.sim.refresh()
    seen = env.clean_obs()
    torch.testing.assert_close(seen["policy"][:, 6:18], torch.zeros(4, 12), atol=1e-6, rtol=0.0)
    torch.testing.assert_close(seen["critic"][:, 9:21], -task.encoder_bias, atol=1e-6, rtol=0.0)


def test_pushes_follow_configured_interval_and_strength():
    env = make_env(push={"interval": [0.04, 0.06], "lin_vel": [0.5, 0.0, 0.0], "ang_vel": [0.0, 0.0, 0.7]})
    task, pushed = env.task, torch.zeros(NUM)
    for _ in range(3):
        before = env.sim.qvel.clone()
        task.pushes.advance(task.random.uniform(0.0, 1.0, 7))
        change = env.sim.qvel - before
        pushed += change.abs().sum(dim=1) > 0.0
        assert (change[:, 1:5].abs() < 1e-5).all() and (change[:, 6:] == 0.0).all()
        assert (change[:, 0].abs() <= 0.5).all() and (change[:, 5].abs() <= 0.7).all()
    assert (pushed >= 1).all() and (pushed <= 2).all()


def test_pushes_come_from_the_configured_sides_of_the_robot():
    env = make_env(push={"lin_vel": [0.8, 0.0, 0.0], "ang_vel": [0.0, 0.0, 0.0], "sides": [0, 3, 1]})
    task = env.task
    task.body.set_state(everywhere(env), root_quat=quat_from_axis_angle(Z.expand(NUM, 3), torch.full((NUM,), 2.0)))
    env.sim.refresh()
    task.pushes.wait.zero_()
    task.pushes.advance(task.random.uniform(0.0, 1.0, 7))
    change = env.sim.qvel[:, :2]
    turns = (torch.atan2(change[:, 1], change[:, 0]) - 2.0).remainder(2.0 * math.pi) / (2.0 * math.pi)
    assert (change.norm(dim=1) <= 0.8 + 1e-5).all()
    assert ((turns > 1 / 6 - 1e-3) & (turns < 5 / 6 + 1e-3)).all()  # not in the third around forward
    assert 0.5 < (turns < 0.5).float().mean() < 0.95  # a share of 3 / 4


def test_fall_ends_episode_and_counts_per_minute():
    env = make_env(num_envs=3)
    task = env.task
    angle = torch.tensor([0.0, 1.1, 1.4])
    task.body.set_state(everywhere(env), root_quat=quat_from_axis_angle(X.expand(3, 3), angle))
    env.sim.refresh()
    assert task.terminated().tolist() == [False, False, True]
    assert task.stats()["falls_per_minute"].tolist() == [0.0, 0.0, 3000.0]  # one fall in 0.02 s


def test_distance_statistic_covers_finished_episode():
    env = make_env(num_envs=2, episode_length=3)
    task = env.task
    for _ in range(3):
        task.body.set_state(everywhere(env), root_pos=task.origin + torch.tensor([[0.0, 0.0, 1.0], [3.0, 4.0, 1.0]]))
        step = env.step(torch.zeros(2, 12))
    assert step.truncated.all()
    torch.testing.assert_close(step.stats["distance"], torch.tensor([0.0, 5.0]), atol=1e-2, rtol=0.0)
    assert env.step(torch.zeros(2, 12)).stats["distance"].isnan().all()


# Robots

# Armature, stiffness, damping, maximum torque, action scale of mjlab, to four digits.
MOTORS = {
    ("Go1", "FR_thigh_joint"): (0.004026, 15.90, 1.012, 23.7, 0.3728),
    ("Go1", "RL_calf_joint"): (0.009059, 35.76, 2.277, 35.55, 0.2485),
    ("G1", "left_elbow_joint"): (0.003610, 14.25, 0.907, 25.0, 0.4386),
    ("G1", "right_ankle_roll_joint"): (0.007219, 28.50, 1.814, 50.0, 0.4386),
    ("G1", "waist_pitch_joint"): (0.007219, 28.50, 1.814, 50.0, 0.4386),
    ("G1", "waist_yaw_joint"): (0.010178, 40.18, 2.558, 88.0, 0.5475),
    ("G1", "left_knee_joint"): (0.025102, 99.10, 6.309, 139.0, 0.3507),
    ("G1", "left_wrist_yaw_joint"): (0.00425, 16.78, 1.068, 5.0, 0.0745),
    ("T1", "Left_Hip_Roll"): (0.03, 200.0, 5.0, 30.0, 0.25),
    ("T1", "Right_Ankle_Pitch"): (0.03, 50.0, 3.0, 12.0, 0.25),
}


@pytest.mark.parametrize("robot", ["Go1", "G1", "T1"])
def test_servo_parameters_match_motors(robot):
    env = make_env(robot, num_envs=1)
    model = env.sim.scene.model
    for joint in (joint for name, joint in MOTORS if name == robot):
        servo, dof = model.actuator(f"robot/{joint}"), model.joint(f"robot/{joint}").dofadr[0]
        found = [model.dof_armature[dof], servo.gainprm[0], -servo.biasprm[2], servo.forcerange[1]]
        scale = env.task.scale[env.task.body.joint_names.index(joint)].item()
        assert [*found, scale] == pytest.approx(MOTORS[robot, joint], rel=1e-3), joint


@pytest.mark.parametrize("robot", ["Go1", "Go2", "G1", "T1"])
def test_robot_stands_in_default_pose(robot):
    env = make_env(robot, num_envs=8, pushes=False, command={"standing": 1.0})
    for _ in range(25):  # T1's ankles are too soft for much longer
        step = env.step(torch.zeros(8, env.num_actions))
    assert not step.terminated.any() and (env.task.torso_up.data[:, 2] > 0.95).all()
    assert (env.task.touched.sum(dim=1) == len(env.task.robot.feet)).all()


def test_optional_rewards_are_computed_only_with_weight():
    env = make_env("G1", num_envs=2, weights={"self_contact": 0.0})
    task = env.task
    assert {"torso_ang_vel", "angular_momentum"} <= set(task.weighted) and "self_contact" not in task.weighted
    spin = torch.tensor([0.3, -0.2, 0.5])
    found = in_the_air(env, root_ang_vel=spin)
    assert found["torso_ang_vel"] == pytest.approx(-0.05 * 0.13, rel=1e-4)
    data = mujoco.MjData(env.sim.scene.model)
    data.qpos[:], data.qvel[:] = env.sim.qpos[0], env.sim.qvel[0]
    mujoco.mj_forward(env.sim.scene.model, data)
    mujoco.mj_subtreeVel(env.sim.scene.model, data)
    momentum = data.subtree_angmom[env.sim.scene.model.body("robot/pelvis").id]
    assert found["angular_momentum"] == pytest.approx(-0.02 * (momentum @ momentum), rel=1e-3)


def test_air_time_counts_swings_and_trot_only_diagonal_pairs():
    # front left and right, rear left and right
    env = make_env("Go2", num_envs=1, weights={"air_time": 1.0, "trot": 1.0})
    env.task.command.value[:] = X
    short, swing, stuck = 0.0, 0.2, 0.6  # air time [s]
    for air_time, number, trot in (
        ([swing, short, short, swing], 2, 2),
        ([short, swing, swing, short], 2, 2),
        ([swing, swing, short, short], 2, 0),
        ([swing, short, swing, short], 2, 0),
        ([swing, swing, swing, swing], 4, 0),
        ([swing, short, short, short], 1, 1),
        ([stuck, short, short, stuck], 0, 0),
    ):
        env.task.air_time[:] = torch.tensor(air_time)
        found = in_the_air(env)
        assert (found["air_time"], found["trot"]) == pytest.approx((number, trot)), air_time
    env.task.command.value.zero_()
    assert in_the_air(env)["trot"] == 0.0
    with raises(ConfigError, key="task.weights.trot", hint="Try task.weights.trot=0"):
        make_env("G1", num_envs=1, weights={"trot": 1.0})
    key = "task.rough_weights.shank_contact"
    with raises(ConfigError, key=key, hint=f"Try {key}=0"):
        make_env("G1", num_envs=1, rough_weights={"shank_contact": -1.0}, **ROUGH)


def test_self_contact_of_legs_is_penalized():
    env = make_env("G1", num_envs=2, pushes=False)
    task = env.task
    roll = task.body.joint_names.index("left_hip_roll_joint")
    action = torch.zeros(2, 29)
    action[0, roll], action[0, roll + 6] = -2.0, 2.0  # legs inwards
    for _ in range(20):
        terms = env.step(action).terms
    assert terms["self_contact"].tolist() == pytest.approx([-4.0 * task.dt, 0.0])


@pytest.mark.parametrize(
    ("robot", "foot", "trunk", "sliding"),
    [("Go1", "FR_calf", "trunk", (0.3, 1.5)), ("T1", "left_foot_link", "Trunk", (0.3, 1.2))],
)
def test_foot_friction_and_trunk_com_are_randomized(robot, foot, trunk, sliding):
    env = make_env(robot, randomize=True)
    friction = env.sim.param("geom_friction", "robot", [foot])
    feet = friction.value[..., 0][:, friction.default[:, 0] == (1.0 if robot[:2] == "Go" else 0.6)]
    low, high = sliding
    assert low - 1e-6 <= feet.min() < low + 0.2 and high - 0.2 < feet.max() <= high + 1e-6
    com = env.sim.param("body_ipos", "robot", [trunk])
    offset = com.value - com.default
    assert 0.02 < offset.abs().max() <= 0.0251


@pytest.mark.parametrize(
    ("values", "fields"),
    [
        ({"pose": {"*_caff_joint": -1.8}}, {"key": "pose", "problem": "'*_caff_joint' matches no joint"}),
        ({"widths": {"*_calf_joint": (0.1, 0.6, 0.6)}}, {"key": "widths", "hint": "Try '*' for all others"}),
        ({"widths": {"*": (0.1, 0.6, 0.0)}}, {"key": "widths['*']", "got": (0.1, 0.6, 0.0)}),
        ({"feet": ("FR_calf", *["body:FL_calf"] * 3)}, {"key": "feet, thighs and shanks", "got": "FR_calf"}),
        ({"soles": ("FR", "FL", "RR")}, {"key": "soles", "got": ("FR", "FL", "RR")}),
    ],
)
def test_wrong_robot_description_is_rejected(values, fields, monkeypatch):
    with raises(TaskError, **{**fields, "key": f"robot 'go1': {fields['key']}"}):
        monkeypatch.setattr(Go1Velocity, "robot", dataclasses.replace(Go1Velocity.robot, **values))
        make_env(num_envs=1)


ROUGH = {"terrain": "rough", "pushes": False}


@pytest.mark.parametrize("robot", ["Go1", "G1"])
def test_foot_heights_and_height_scan_follow_rough_ground(robot):
    env = make_env(robot, num_envs=20, **ROUGH)
    task = env.task
    task.levels.value.fill_(6)
    env.reset()
    offset = 1.2 * torch.stack([torch.arange(20).cos(), torch.arange(20).sin(), torch.zeros(20)], dim=1)
    task.body.set_state(everywhere(env), root_pos=task.body.root_pos + offset)
    env.sim.refresh()
    heights, (x, y, _) = env.clean_obs()["policy"][:, -187:], task.body.root_pos.unbind(dim=1)
    middle = 5 * 17 + 8
    assert task.units["heights"] == "5 m"  # input unit of an exported policy
    below = (task.body.root_pos[:, 2] - task.ground.height(x, y)) / 5.0
    torch.testing.assert_close(heights[:, middle], below, atol=1e-5, rtol=0.0)
    _, _, yaw = euler_xyz(task.body.root_quat)
    ahead = task.ground.height(x + 0.8 * yaw.cos(), y + 0.8 * yaw.sin())
    torch.testing.assert_close(heights[:, middle + 8], (task.body.root_pos[:, 2] - ahead) / 5.0, atol=1e-4, rtol=0.0)
    assert heights.std() > 0.005
    sole = task.sole_pos[0].data
    highest = task.ground.height(sole[:, 0], sole[:, 1])
    assert (task._foot_height()[:, 0] <= (sole[:, 2] - highest).clamp(0.0, 1.0) + 1e-5).all()


def test_on_rough_ground_thigh_contact_ends_episode_but_tilt_does_not():
    env = make_env(num_envs=2, **ROUGH)
    task = env.task
    tilted = quat_from_axis_angle(X.expand(2, 3), torch.tensor([1.5, 0.0]))
    high = task.origin + torch.tensor([[0.0, 0.0, 0.6], [0.0, 0.0, 0.05]])
    task.body.set_state(everywhere(env), root_pos=high, root_quat=tilted)
    for _ in range(3):
        step = env.step(torch.tensor([[0.0], [1.0]]) * task.pose)  # thighs up
        if step.terminated.any():
            break
    assert step.terminated.tolist() == [False, True]


def test_terrain_level_follows_distance_walked():
    ahead = {"x": [1.0, 1.0], "standing": 0.0, "forward": 1.0, "heading": 0.0}
    env = make_env(num_envs=3, episode_length=2, command=ahead, **ROUGH)
    task = env.task
    task.levels.value.fill_(3)
    env.reset()
    away = torch.tensor([5.0, 0.015, 0.025])[:, None] * X
    for _ in range(2):
        task.body.set_state(everywhere(env), root_pos=task.origin + away + Z)
        env.step(torch.zeros(3, 12))
    # 0.04 s at 1 m/s are 40 mm; half of that keeps the level
    assert task.levels.value.tolist() == [4, 2, 3]


# Vision

KINDS = ("slope_up", "rough_slope_down", "stairs_up", "stairs_down", "obstacles")
PATCHES = {"levels": 2, "columns": dict.fromkeys(KINDS, 1)}
SEES = {"vision": "depth", "pushes": False}


def seen(env: VecEnv, **state: torch.Tensor) -> torch.Tensor:
    """Render depth images of robots at rest in their default pose, shape [num_envs, height, width]."""
    task = env.task
    still = {"root_quat": torch.tensor([1.0, 0.0, 0.0, 0.0]).expand(env.num_envs, 4)}
    env.sim.reset(everywhere(env))  # a full reset makes the camera due
    task.body.set_state(everywhere(env), **{**still, "joint_pos": task.pose.expand(env.num_envs, -1), **state})
    env.sim.refresh()
    env.sim.draw()
    return env.clean_obs()["depth"][..., 0].int()


def rays(env: VecEnv) -> torch.Tensor:
    """Return pixel rays of a pinhole camera, 1 m along its view, in the level torso's frame, shape [24, 32, 3]."""
    eye, half = env.task.robot.eye, math.tan(math.radians(29.0))
    ahead, up = (torch.tensor([math.cos(a), 0.0, math.sin(a)]) for a in (-eye.pitch, 0.5 * math.pi - eye.pitch))
    above = half * (1.0 - (torch.arange(24) + 0.5) / 12)[:, None, None]
    left = half * 32 / 24 * (1.0 - (torch.arange(32) + 0.5) / 16)[:, None]
    return ahead + above * up + left * torch.tensor([0.0, 1.0, 0.0])


@pytest.mark.parametrize("robot", ["Go1", "G1"])
def test_depth_on_flat_ground_is_that_of_plane(robot):
    env = make_env(robot, num_envs=2, **SEES)
    task, eye = env.task, env.task.robot.eye
    images = seen(env, root_pos=torch.tensor([[0.0, 0.0, 0.0], [3.0, -2.0, 0.1]]) + task.robot.height * Z)
    data = mujoco.MjData(env.sim.scene.model)
    data.qpos[:] = env.sim.qpos[0]
    mujoco.mj_kinematics(env.sim.scene.model, data)
    torso = data.body(f"robot/{task.robot.torso}").xpos[2]
    down = -rays(env)[..., 2]
    for image, height in zip(images, (torso + eye.z, torso + eye.z + 0.1), strict=True):
        depth = torch.where(down > 0.0, height / down, torch.inf)
        expected = 255.0 * ((depth - eye.near) / (eye.far - eye.near)).clamp(0.0, 1.0)
        assert (image - expected).abs().max() <= 1.01  # the robot is not in the image
        assert image[-1].max() < 100 < image[0].min() and (image < 255).float().mean() > 0.75


def test_depth_points_lie_on_rough_ground():
    env = make_env(num_envs=5, **SEES, terrain="rough", rough=PATCHES)
    task = env.task
    task.levels.value.fill_(1)
    env.reset()
    pos = task.origin + torch.tensor([1.1, 0.3, 0.0])
    pos[:, 2] = task.ground.height(*pos[:, :2].T) + 0.35
    images = seen(env, root_pos=pos)
    eye = task.robot.eye
    points = (pos + torch.tensor([eye.x, 0.0, eye.z]))[:, None, None] + task.eye.depth[..., None] * rays(env)
    off = (task.ground.height(points[..., 0], points[..., 1]) - points[..., 2]).abs()
    near = (images < 255) & (images > 0)
    assert near.float().mean() > 0.6 and off[near].max() < 5e-3
    kinds = dict(zip(task.ground.kinds, images.float(), strict=True))
    assert (kinds["stairs_down"] - kinds["stairs_up"]).mean() > 10.0


def test_blind_policy_observes_same_as_vision_teacher():
    settings = {"terrain": "rough", "rough": PATCHES, "observations": {"heights": {"noise": 0.01, "history": 2}}}
    plain, sees = make_env(num_envs=4, **settings), make_env(num_envs=4, **settings, vision="depth")
    assert plain.obs_sizes == {"policy": 129 + 2 * 187, "critic": 72 + 187} and not plain.sim.scene.cameras
    assert sees.obs_sizes == {**plain.obs_sizes, "policy": 129, "teacher": 129 + 2 * 187}
    assert sees.images == {"depth": (24, 32, 1)}
    assert (plain.sim.scene.model.geom_group == 0).all()
    action = torch.linspace(-0.5, 0.5, 48).view(4, 12)
    for _ in range(7):
        here, there = plain.step(action).obs, sees.step(action).obs
        assert torch.equal(there["teacher"], here["policy"]) and torch.equal(there["critic"], here["critic"])
        assert torch.equal(there["policy"], here["policy"][:, :129])
        assert (here["policy"][:, 6:9] != plain.clean_obs()["policy"][:, :3]).any()  # noise is applied
    heights = {"observations": {"heights": {"used": True}}}
    both = make_env(num_envs=4, **{**settings, **heights}, vision="depth")
    assert both.obs_sizes == {"policy": 129 + 187, "critic": 72 + 187} and "depth" in both.images


def test_image_is_updated_every_fifth_control_step():
    env = make_env(num_envs=2, **SEES)
    ages = [env.task.eye.age.tolist()] + [env.step(torch.zeros(2, 12)) and env.task.eye.age.tolist() for _ in range(6)]
    assert ages == [[age, age] for age in (0, 1, 2, 3, 4, 0, 1)]


def test_mirrored_robot_sees_mirrored_image(monkeypatch):
    env = make_env(num_envs=2, **SEES)
    turn = quat_from_axis_angle(torch.tensor([[1.0, 0.2, 1.0], [-1.0, 0.2, -1.0]]) / 2.04**0.5, torch.full((2,), 0.25))
    here, there = seen(env, root_quat=turn, root_pos=torch.tensor([[0.1, 0.2, 0.9], [0.1, -0.2, 0.9]]))
    assert (here.flip(1) - there).abs().max() <= 1 and (here - there).abs().max() > 20
    assert set(mirrored(env)[0]) == {"policy", "critic", "actions"}
    monkeypatch.setattr(type(env.task), "mirrors", {**type(env.task).mirrors, "depth": "scalar"})
    with pytest.raises(TaskError, match=r"mirrors\['depth'\]"):
        mirrored(env)


def test_unsupported_vision_is_rejected(monkeypatch):
    with pytest.raises(ConfigError, match=r"^task.vision: .*depth.*rgb"):
        make_env(num_envs=1, vision="rgb")
    with pytest.raises(ConfigError, match=r"^task.observations.heights"):
        make_env(num_envs=1, **SEES, terrain="rough", rough=PATCHES, observations={"heights": 3})
    monkeypatch.setattr(Go1Velocity, "robot", dataclasses.replace(Go1Velocity.robot, eye=None))
    with raises(ConfigError, key="task.vision=depth", hint="Try task.vision=null"):
        make_env(num_envs=1, **SEES)


def test_every_reward_term_accepts_weight():
    weights = prepare("Go1Velocity", task={"weights": {"self_contact": -0.1}}).cfg.task.weights
    assert weights["self_contact"] == -0.1 and "self_contact" not in prepare("Go1Velocity").cfg.task.weights


@pytest.mark.parametrize("key", ["weights", "rough_weights"])
def test_unknown_reward_term_is_named(key):
    with pytest.raises(ConfigError, match=rf"task.{key}.foot_slips|no reward term 'foot_slips'.*'foot_slip'"):
        make_env(num_envs=1, **{key: {"foot_slips": 1.0}})


class Low(Go1Velocity):
    """Go1 with a custom reward: a term here and a weight in `task.weights`."""

    terms: ClassVar = {**Go1Velocity.terms, "height": lambda task, now: (task.body.root_pos[:, 2] - 0.25).square()}


def test_custom_reward_needs_term_and_weight(tmp_path, monkeypatch):
    (tmp_path / "task").mkdir()
    own = f"task: {{_target_: {__name__}.Low, weights: {{height: -3.0}}, randomize_episode_start: false}}\n"
    (tmp_path / "task" / "Low.yaml").write_text(f"# @package _global_\ndefaults: [Go1Velocity]\n{own}")
    env = gpusim_rl.make_env("Low", config_dir=tmp_path, num_envs=2, sim="mujoco", device="cpu")
    env.reset()
    assert in_the_air(env)["height"] == pytest.approx(-3.0 * 0.75**2, rel=1e-5)
    terms = env.step(torch.zeros(2, 12)).terms
    assert list(terms) == [name for name in Low.terms if name in env.task.cfg.all_weights]
    monkeypatch.setattr(Low, "terms", {**Low.terms, "height": lambda task, now: task.body.root_pos[:, 2:]})
    with raises(TaskError, key="reward 'height'", expected="shape [2]", got=[2, 1]):
        env.step(torch.zeros(2, 12))
    without = make_env(num_envs=1)
    assert "height" not in without.task.rewards()
    with pytest.raises(ConfigError, match=r"task.weights.height|no reward term 'height'"):
        make_env(num_envs=1, weights={"height": -3.0})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"command": {"stages": [{"steps": -5}]}}, r"command\.stages\[0\]\.steps.*got -5"),
        ({"command": {"stages": [{"steps": 5}, {"steps": 4}]}}, r"command\.stages: .*\[5, 4\]"),
        ({"command": {"stages": [{"steps": 5, "yaw": [1.0, -1.0]}]}}, r"command\.stages\[0\]\.yaw.*\[1\.0, -1\.0\]"),
        ({"command": {"x": [1.0, 0.0]}}, r"command\.x.*got \[1\.0, 0\.0\]"),
        ({"push": {"interval": [3.0, 1.0]}}, r"push\.interval.*got \[3\.0, 1\.0\]"),
        ({"push": {"ang_vel": [0.5, 0.5, -1.0]}}, r"push\.ang_vel.*got"),
        ({"push": {"sides": [0.0, 0.0]}}, r"push\.sides.*got"),
        ({"start_height": [0.1]}, r"start_height.*got \[0\.1\]"),
    ],
)
def test_wrong_settings_are_rejected(settings, words):
    with pytest.raises(ConfigError, match=rf"^task\.{words}"):
        make_env(num_envs=1, **settings)
