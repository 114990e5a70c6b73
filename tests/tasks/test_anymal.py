"""Anymal: published kinematics, joint tracking, rewards and terminations at known states."""

from __future__ import annotations

import math
from functools import partial

import mujoco
import numpy as np
import pytest
import torch

from gpusim_rl.env.math import quat_from_axis_angle, quat_rotate
from helpers.scenes import everywhere
from helpers.sensing import update_sensors
from helpers.task_envs import task_env, task_model

LEGS = {"LF": (1, 1), "LH": (-1, 1), "RF": (1, -1), "RH": (-1, -1)}  # forwards, to the left
Z = torch.tensor([0.0, 0.0, 1.0])
make_env = partial(task_env, "Anymal")


def foot(leg: str, haa: float, hfe: float, kfe: float) -> np.ndarray:
    """Compute a foot's position in the base frame [m] from the frames of the published URDF."""
    c, s = math.cos, math.sin
    about_x = np.array([[1, 0, 0], [0, c(haa), -s(haa)], [0, s(haa), c(haa)]])

    def about_y(angle: float) -> np.ndarray:
        return np.array([[c(angle), 0, s(angle)], [0, 1, 0], [-s(angle), 0, c(angle)]])

    x, y = LEGS[leg]
    mirror = np.array([x, y, 1])
    shank = mirror * [0.08795, 0.01305, -0.31547]
    thigh = mirror * [0.0, 0.1003, -0.285] + about_y(kfe) @ shank
    hip = mirror * [0.0599, 0.08381, 0.0] + about_y(hfe) @ thigh
    return mirror * [0.2999, 0.104, 0.0] + about_x @ hip


def test_foot_positions_match_published_urdf():
    model = task_model("Anymal")
    data = mujoco.MjData(model)
    for angles in np.random.default_rng(0).uniform(-0.4, 0.4, (20, 4, 3)):
        data.qpos[7:] = angles.flatten()
        mujoco.mj_kinematics(model, data)
        for leg, joints in zip(LEGS, angles, strict=True):
            shank = model.body(f"anymal/{leg}_SHANK").id
            (sphere,) = [g for g in range(model.ngeom) if model.geom_bodyid[g] == shank and model.geom_contype[g]]
            np.testing.assert_allclose(
                data.geom_xpos[sphere] - data.body("anymal/base").xpos, foot(leg, *joints), atol=1e-5
            )
    assert model.body_mass.sum() == pytest.approx(45.0, abs=0.05)


def test_each_action_moves_only_its_joint():
    env = make_env(num_envs=12)
    robot = env.task.robot
    high = torch.tensor([0.0, 0.0, 3.0]).expand(12, 3)
    robot.set_state(everywhere(env), root_pos=high, joint_pos=env.task.stance.expand(12, 12))
    for _ in range(6):  # the robot falls meanwhile
        env.step(0.6 * torch.eye(12))
    moved = robot.joint_pos - env.task.stance
    assert robot.joint_names == robot.actuator_names == [f"{leg}_{j}" for leg in LEGS for j in ("HAA", "HFE", "KFE")]
    assert (moved.diagonal() > 0.15).all()
    assert (moved.abs().argmax(dim=1) == torch.arange(12)).all()


def test_robot_stands_with_zero_actions():
    env = make_env()
    env.task.robot.set_state(
        everywhere(env),
        root_pos=torch.tensor([0.0, 0.0, 0.56]).expand(4, 3),
        joint_pos=env.task.stance.expand(4, 12),
        joint_vel=torch.zeros(4, 12),
    )
    for _ in range(150):
        assert not env.step(torch.zeros(4, 12)).done.any()
    assert (env.task.robot.root_pos[:, 2] > 0.46).all()  # feet on soft contacts creep outwards
    assert (env.task.observe()["policy"]["gravity"][:, 2] < -0.99).all()  # gravity points to the feet
    assert (env.task.robot.joint_vel.abs() < 0.05).all()


@pytest.mark.parametrize("speed", [0.0, 0.5])
def test_reward_at_known_tracking_error(speed):
    env = make_env(num_envs=64)
    task, robot, num = env.task, env.task.robot, env.num_envs
    task.apply_action(torch.zeros(num, 12))
    heading = quat_from_axis_angle(Z.expand(num, 3), torch.linspace(-3.0, 3.0, num))
    command = task.commands.value
    error = speed * torch.tensor([0.6, 0.8, 0.0])
    velocity = torch.cat([command[:, :2], torch.zeros(num, 1)], dim=1) + error
    robot.set_state(
        everywhere(env),
        root_pos=torch.tensor([0.0, 0.0, 2.0]).expand(num, 3),
        root_quat=heading,
        root_lin_vel=quat_rotate(heading, velocity),
        root_ang_vel=(command[:, 2:] - speed) * Z,
        joint_pos=(task.stance + 0.1).expand(num, 12),
        joint_vel=torch.zeros(num, 12),
    )
    update_sensors(env.sim)
    terms = task.rewards()
    full = 0.02 * math.exp(-(speed**2) / 0.25)
    torque = 0.02 * 2.5e-5 * 12 * (85.0 * 0.1) ** 2
    for name, value in {"lin_vel_xy": full, "ang_vel_z": 0.5 * full, "torque": -torque}.items():
        torch.testing.assert_close(terms[name], torch.full((num,), value), rtol=1e-3, atol=1e-6)
    for error in task.stats().values():
        torch.testing.assert_close(error, torch.full((num,), speed), rtol=1e-3, atol=1e-4)


def test_torque_penalty_is_capped_by_tracking_reward():
    env = make_env(num_envs=64)
    capped = 0
    for step in range(40):
        terms = env.step(torch.full((64, 12), (-1.0) ** (step // 4))).terms
        gained = terms["lin_vel_xy"] + terms["ang_vel_z"]
        assert (gained + terms["torque"] >= 0).all() and (terms["torque"] <= 0).all()
        capped += int((gained == -terms["torque"]).sum())
    assert 0 < capped < 40 * 64


@pytest.mark.parametrize(
    ("height", "kfe", "ends"),
    [
        (0.55, None, False),  # the stance
        (0.335, 2.5, True),  # on the knees, shanks folded
        (0.345, 2.5, False),  # 5 mm above
        (0.095, 2.5, True),  # on the belly
    ],
)
def test_knee_or_belly_contact_ends_episode(height, kfe, ends):
    env = make_env()
    joint_pos = env.task.stance.clone()
    if kfe is not None:
        joint_pos = torch.tensor([value for x, _ in LEGS.values() for value in (0.0, 0.0, -kfe * x)])
    if height < 0.3:  # legs in the air
        joint_pos = torch.tensor([value for x, _ in LEGS.values() for value in (0.0, -1.6 * x, 0.0)])
    env.task.robot.set_state(
        everywhere(env), root_pos=torch.tensor([0.0, 0.0, height]).expand(4, 3), joint_pos=joint_pos.expand(4, 12)
    )
    update_sensors(env.sim)
    assert (env.task.terminated() == ends).all()
