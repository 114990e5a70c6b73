"""Trifinger: published kinematics, the arena's wall, rewards at known poses, and the curriculum."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import mujoco
import numpy as np
import pytest
import torch
from torch import Tensor

from gpusim_rl.env import Task
from gpusim_rl.errors import ConfigError
from helpers.raised import raises
from helpers.task_envs import task_env, task_model

make_env = partial(task_env, "Trifinger")


def fingertips(joints: tuple[float, float, float]) -> np.ndarray:
    """Compute the positions of the three fingertips [m] from the frames of the published URDF."""

    def turn(axis: int, angle: float) -> np.ndarray:
        i, j = [(1, 2), (2, 0), (0, 1)][axis]
        matrix = np.eye(3)
        matrix[i, i] = matrix[j, j] = np.cos(angle)
        matrix[i, j], matrix[j, i] = -np.sin(angle), np.sin(angle)
        return matrix

    upper, middle, lower = joints
    tip = np.array([0.0185, 0.0, -0.1626])
    tip = np.array([0.04922, 0.0, -0.16]) + turn(0, lower) @ tip
    tip = np.array([0.01685, 0.0505, 0.0]) + turn(0, middle) @ tip
    tip = np.array([0.0, 0.0, 0.29]) + turn(1, upper) @ tip
    return np.stack([turn(2, -2.0 * np.pi / 3.0 * finger) @ tip for finger in range(3)])


def reach(task: Task) -> Tensor:
    """Sum the fingertips' distances from the cube [m]."""
    return (task.tips.pos - task.cube.root_pos[:, None]).norm(dim=2).sum(dim=1)


@pytest.mark.parametrize("joints", [(0.0, 0.9, -2.0), (0.0, 0.0, 0.0), (-0.3, 1.2, -0.7), (0.9, 0.4, -2.5)])
def test_fingertip_positions_match_published_urdf(joints):
    model = task_model("Trifinger")
    data = mujoco.MjData(model)
    data.qpos[:9] = joints * 3
    mujoco.mj_kinematics(model, data)
    tips = [data.body(f"trifinger/tip_{finger}").xpos for finger in range(3)]
    np.testing.assert_allclose(tips, fingertips(joints), atol=1e-6)


def test_arena_wall_stops_thrown_cube():
    env = make_env(num_envs=16)
    cube = env.task.cube
    angle = torch.linspace(0.0, 6.0, 16)
    velocity = 3.0 * torch.stack([angle.cos(), angle.sin(), torch.zeros(16)], dim=1)
    cube.set_state(torch.ones(16, dtype=torch.bool), root_lin_vel=velocity)
    farthest = torch.zeros(16)
    for _ in range(100):
        env.step(torch.zeros(16, 9))
        farthest = torch.maximum(farthest, cube.root_pos[:, :2].norm(dim=1))
    assert farthest.min() > 0.13, "a cube missed the wall"
    assert farthest.max() < 0.26
    assert cube.root_pos[:, :2].norm(dim=1).max() < 0.195
    assert (cube.root_pos[:, 2] > 0.03).all()


def test_pose_reward_peaks_at_goal():
    env = make_env(num_envs=3, difficulty=1)
    task = env.task
    everywhere = torch.ones(3, dtype=torch.bool)
    goal = torch.tensor([[0.02, 0.03, 0.0325]]).repeat(3, 1)
    task.goal.set_state(everywhere, root_pos=goal)
    offset = torch.tensor([[0.0, 0.0, 0.0], [0.03, 0.0, 0.04], [0.0, 0.0, 0.0]])
    half_turn = torch.tensor([[1.0, 0, 0, 0], [1.0, 0, 0, 0], [0.0, 0, 0, 1.0]])  # the third cube: about z
    task.cube.set_state(everywhere, root_pos=goal + offset, root_quat=half_turn)
    pose = task.rewards()["pose"]

    def kernel(distance: float) -> float:
        return 1.0 / (np.exp(30.0 * distance) + 2.0 + np.exp(-30.0 * distance))

    expected = [kernel(0.0), kernel(0.05), kernel(0.065 * np.sqrt(2.0))]
    assert pose.tolist() == pytest.approx([2000.0 * 0.02 * value for value in expected], rel=1e-4)
    stats = task.stats()
    assert stats["position_error"].tolist() == pytest.approx([0.0, 0.05, 0.0], abs=1e-6)
    assert stats["rotation_error"].tolist() == pytest.approx([0.0, 0.0, np.pi], abs=1e-3)
    assert stats["success"].tolist() == [1.0, 0.0, 1.0]  # at difficulty 1 orientation does not count


def test_reaching_is_rewarded_only_early_in_training():
    env = make_env(num_envs=2, reach_env_steps=6)  # 2 envs: steps 0 to 3 are early, counted from the check in reset
    task = env.task
    before = reach(task)
    paid = []
    for _ in range(5):
        step = env.step(torch.full((2, 9), -0.5))
        after = reach(task)
        paid.append((step.terms["finger_reach"], 250.0 * (before - after)))
        before = after
    early = [torch.allclose(term, expected, atol=1e-3) and bool(term.abs().min() > 0) for term, expected in paid]
    assert early == [True, True, True, False, False]
    assert all(bool((term == 0).all()) for term, _ in paid[3:])


def test_late_checkpoint_gives_no_reaching_reward():
    trained, shown = make_env(num_envs=4, reach_env_steps=6), make_env(num_envs=1, reach_env_steps=6)
    trained.step(torch.zeros(4, 9))
    shown.begin_from(trained.state_dict())
    assert (shown.step(torch.full((1, 9), -0.5)).terms["finger_reach"] == 0).all()


def test_reset_affects_neither_movement_nor_reaching_reward():
    env = make_env(num_envs=2, episode_length=20, randomize_episode_start=False)
    for _ in range(20):
        step = env.step(torch.ones(2, 9))
    assert step.truncated.all()
    task = env.task
    assert torch.equal(task.tips.pos, task.start_tips)
    before = reach(task)
    first = env.step(torch.zeros(2, 9)).terms
    velocity = (task.tips.pos - task.start_tips) / 0.02
    assert first["finger_movement"] == pytest.approx(-0.5 * velocity.square().sum(dim=(1, 2)), rel=1e-4)
    assert first["finger_reach"] == pytest.approx(250.0 * (before - reach(task)), abs=1e-3)


@pytest.mark.parametrize(("difficulty", "low", "high"), [(1, 0.0325, 0.0325), (2, 0.0825, 0.0825), (3, 0.0325, 0.1)])
def test_goals_follow_the_difficulty(difficulty, low, high):
    goal = make_env(num_envs=64, difficulty=difficulty).task.goal
    height = goal.root_pos[:, 2]
    assert low - 1e-6 <= height.min() and height.max() <= high + 1e-6
    assert torch.equal(goal.root_quat, torch.tensor([1.0, 0.0, 0.0, 0.0]).expand(64, 4))
    radius = goal.root_pos[:, :2].norm(dim=1)
    assert radius.max() == 0 if difficulty == 2 else radius.max() > 0.1


def curriculum(start: float | None) -> dict[str, Any]:
    return {"curriculum": {"start": start, "factor": 0.5, "threshold": 0.5, "window": 2}}


def yaw(quat: Tensor) -> Tensor:
    return 2.0 * torch.atan2(quat[:, 3], quat[:, 0])


def test_three_of_four_envs_start_near_their_goals():
    plain = make_env(num_envs=32, difficulty=1).task
    task = make_env(num_envs=32, difficulty=1, **curriculum(0.25)).task
    for env_id in range(32):
        share = 1.0 if env_id % 4 == 0 else 0.25
        for axis in range(3):
            cube, goal = plain.cube.root_pos[env_id, axis].item(), plain.goal.root_pos[env_id, axis].item()
            assert task.cube.root_pos[env_id, axis].item() == pytest.approx(cube, abs=1e-6)
            assert task.goal.root_pos[env_id, axis].item() == pytest.approx(cube + share * (goal - cube), abs=1e-6)
        turned = yaw(task.cube.root_quat)[env_id].item()
        assert turned == pytest.approx(share * yaw(plain.cube.root_quat)[env_id].item(), abs=1e-5)
    assert yaw(plain.cube.root_quat).abs().max() > 0.5 * math.pi


def test_spread_grows_with_near_success_and_success_counts_plain_envs():
    env = make_env(num_envs=8, difficulty=1, **curriculum(0.3))
    task, spreads = env.task, []
    everywhere, nobody = torch.ones(8, dtype=torch.bool), torch.zeros(8, dtype=torch.bool)
    task.spread._steps.zero_()
    task.spread._total.zero_()
    for at_goal in (2, 2, 6, 6, 8, 8, 8, 8):  # envs 0 and 4 have no curriculum, so 1, 4, 6 and 6 of 6 near ones
        away = 0.1 * (torch.arange(8) >= at_goal)
        task.goal.set_state(everywhere, root_pos=task.cube.root_pos + away[:, None])
        task.advance(nobody)
        stats = task.stats()
        spreads.append(round(stats["spread"][0].item(), 4))
        for env_id in range(8):
            own, other = ("success", "near_success") if env_id % 4 == 0 else ("near_success", "success")
            assert stats[own][env_id].item() == float(env_id < at_goal) and stats[other][env_id].isnan()
    assert spreads == [0.3, 0.3, 0.3, 0.6, 0.6, 1.0, 1.0, 1.0]


def test_evaluation_disables_curriculum():
    cfg = make_env(num_envs=1, difficulty=1, **curriculum(0.3)).cfg.whole_episodes()
    assert cfg == make_env(num_envs=1, difficulty=1, randomize_episode_start=False, **curriculum(None)).cfg


@pytest.mark.parametrize(
    ("settings", "fields"),
    [
        ({"difficulty": 7}, {"key": "task.difficulty", "expected": "one of [1, 2, 3, 4]", "got": 7}),
        ({"difficulty": 1, **curriculum(1.0)}, {"key": "task.curriculum.start", "got": 1.0}),
        ({"difficulty": 4, **curriculum(0.1)}, {"key": "task.curriculum", "hint": "Try task.difficulty=3"}),
    ],
)
def test_bad_settings_are_rejected(settings, fields):
    with raises(ConfigError, **fields):
        make_env(**settings)
