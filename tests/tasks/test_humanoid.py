"""Humanoid: contacts and joint limit cost; test_ant.py covers the rest."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch

from helpers.scenes import everywhere
from helpers.sensing import update_sensors
from helpers.task_envs import task_env, task_model

make_env = partial(task_env, "Humanoid")


def test_only_legs_collide_with_each_other():
    model = task_model("Humanoid")
    names = [model.body(body).name.removeprefix("humanoid/") for body in model.geom_bodyid]
    leg = {f"{side}_{part}": side for side in ("right", "left") for part in ("thigh", "shin", "foot")}
    type_, affinity = model.geom_contype, model.geom_conaffinity
    for a, b in itertools.combinations(range(model.ngeom), 2):
        collides = bool(type_[a] & affinity[b] or type_[b] & affinity[a])
        sides = {leg.get(names[a]), leg.get(names[b])}
        assert collides == ("world" in (names[a], names[b]) or sides == {"right", "left"}), (names[a], names[b])


def test_reference_pose_is_just_above_ground():
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
def test_joint_limit_cost_scales_with_motor_strength(joint, position, cost):
    env = make_env()
    task = env.task
    middle = (task.joint_high + task.joint_low) / 2
    joint_pos = middle.clone()
    index = task.robot.joint_names.index(joint)
    joint_pos[index] += position * (task.joint_high - task.joint_low)[index] / 2
    task.robot.set_state(everywhere(env), joint_pos=joint_pos.expand(4, 21))
    env.sim.refresh()
    expected = torch.full((4,), -0.25 * cost)
    torch.testing.assert_close(task.rewards()["joint_limit_cost"], expected, rtol=1e-3, atol=1e-4)
