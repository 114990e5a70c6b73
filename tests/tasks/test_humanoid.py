"""Humanoid: what its body touches, its motors, and the cost of joints at their limits; test_ant.py has the rest."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch

from helpers.scenes import everywhere
from helpers.sensing import update_sensors
from helpers.task_envs import task_env, task_model

LEG = ["hip_x", "hip_z", "hip_y", "knee", "ankle_y", "ankle_x"]
ARM = ["shoulder1", "shoulder2", "elbow"]
JOINTS = ["abdomen_z", "abdomen_y", "abdomen_x"]
JOINTS += [f"{side}_{joint}" for part in (LEG, ARM) for side in ("right", "left") for joint in part]
TORQUE = [67.5] * 3 + [45.0, 45.0, 135.0, 90.0, 22.5, 22.5] * 2 + [67.5, 67.5, 45.0] * 2  # N m

make_env = partial(task_env, "Humanoid")


def test_actions_drive_the_joints_in_their_order_with_their_motors_torque():
    env = make_env()
    robot = env.task.robot
    assert robot.joint_names == JOINTS == robot.actuator_names
    action = torch.linspace(-1.5, 1.5, 21).repeat(4, 1)
    obs = env.step(action).final_obs["policy"]
    torque = action.clamp(-1.0, 1.0) * torch.tensor(TORQUE)
    torch.testing.assert_close(obs[:, 54:75], 0.01 * torque)


def test_self_collision_is_between_the_legs_only():
    model = task_model("Humanoid")
    names = [model.body(body).name.removeprefix("humanoid/") for body in model.geom_bodyid]
    leg = {f"{side}_{part}": side for side in ("right", "left") for part in ("thigh", "shin", "foot")}
    type_, affinity = model.geom_contype, model.geom_conaffinity
    for a, b in itertools.combinations(range(model.ngeom), 2):
        collides = bool(type_[a] & affinity[b] or type_[b] & affinity[a])
        sides = {leg.get(names[a]), leg.get(names[b])}
        assert collides == ("world" in (names[a], names[b]) or sides == {"right", "left"}), (names[a], names[b])


def test_the_reference_pose_stands_just_above_the_ground():
    env = make_env()
    robot = env.task.robot
    robot.set_state(everywhere(env), joint_pos=torch.zeros(4, 21), joint_vel=torch.zeros(4, 21))
    update_sensors(env.sim)
    assert (env.task.feet.force == 0).all()
    robot.set_state(everywhere(env), root_pos=torch.tensor([0.0, 0.0, 1.28]).expand(4, 3))
    update_sensors(env.sim)
    assert (env.task.feet.force[:, :, 2] > 1.0).all()


@pytest.mark.parametrize(
    ("joint", "position", "cost"),
    [
        ("right_knee", 0.97, 0.0),
        ("right_knee", 0.99, 0.5 * 90 / 135),
        ("left_hip_y", -1.0, 1.0),
        ("left_elbow", 1.02, 2 * 45 / 135),
    ],
)
def test_a_joint_at_its_limit_costs_by_its_motors_strength(joint, position, cost):
    env = make_env()
    task = env.task
    middle = (task.joint_high + task.joint_low) / 2
    joint_pos = middle.clone()
    index = JOINTS.index(joint)
    joint_pos[index] += position * (task.joint_high - task.joint_low)[index] / 2
    task.robot.set_state(everywhere(env), joint_pos=joint_pos.expand(4, 21))
    env.sim.refresh()
    expected = torch.full((4,), -0.25 * cost)
    torch.testing.assert_close(task.rewards()["joint_limit_cost"], expected, rtol=1e-3, atol=1e-4)
