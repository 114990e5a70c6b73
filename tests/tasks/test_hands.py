"""Hands with a cube: published kinematics, coupled joints, consecutive goals, observation groups."""

from __future__ import annotations

import math
from typing import Any

import mujoco
import numpy as np
import pytest
import torch
from torch import Tensor

from gpusim_rl.env import VecEnv
from gpusim_rl.env.math import quat_from_axis_angle, quat_multiply
from gpusim_rl.errors import ConfigError
from helpers.raised import raises
from helpers.task_envs import task_env, task_model

HANDS = ["ShadowHand", "AllegroHand"]
EVERYWHERE = torch.ones(4, dtype=torch.bool)

every_hand = pytest.mark.parametrize("name", HANDS)


def poses(model: mujoco.MjModel, joints: dict[str, float]) -> mujoco.MjData:
    data = mujoco.MjData(model)
    for joint, angle in joints.items():
        data.joint(f"hand/{joint}").qpos[0] = angle
    mujoco.mj_kinematics(model, data)
    return data


def turned_goal(env: VecEnv, angle: float) -> Tensor:
    """Return the cube's orientations rotated by an angle [rad]."""
    axis = torch.tensor([0.6, 0.0, 0.8]).expand(env.num_envs, 3)
    return quat_multiply(quat_from_axis_angle(axis, torch.full((env.num_envs,), angle)), env.task.cube.root_quat)


def test_shadow_hand_matches_published_dimensions():
    model = task_model("ShadowHand")
    assert model.njnt - 1 == 24 and model.nu == 20
    data = poses(model, {})
    palm, first, tip = (data.body(f"hand/{body}").xpos for body in ("palm", "ffknuckle", "ffdistal"))
    # straight fingers point along -y; knuckles are 95 mm from the wrist, the outer joint 70 mm further
    np.testing.assert_allclose(first - palm, [-0.033, -0.095, 0.0], atol=1e-6)
    np.testing.assert_allclose(tip - first, [0.0, -0.070, 0.0], atol=1e-6)
    bent = poses(model, {"FFJ2": math.pi / 2})
    np.testing.assert_allclose(bent.body("hand/ffdistal").xpos - first, [0.0, 0.0, 0.070], atol=1e-6)


def test_allegro_hand_matches_published_dimensions():
    model = task_model("AllegroHand")
    assert model.njnt - 1 == 16 and model.nu == 16
    data = poses(model, {})
    turn = data.body("hand/palm").xmat.reshape(3, 3)
    assert turn[2, 0] == pytest.approx(math.cos(0.03 * math.pi), abs=1e-3)  # the palm faces up, tilted by 5.4 degrees

    def seen_from_palm(body: str) -> np.ndarray:
        return turn.T @ (data.body(f"hand/{body}").xpos - data.body("hand/palm").xpos)

    np.testing.assert_allclose(seen_from_palm("middle_distal"), [0.0, 0.0, 0.0007 + 0.0164 + 0.054 + 0.0384], atol=1e-6)
    slope = math.radians(5.0)
    along = 0.0164 + 0.054 + 0.0384
    expected = [0.0, 0.0435 + along * math.sin(slope), -0.001542 + along * math.cos(slope)]
    np.testing.assert_allclose(seen_from_palm("index_distal"), expected, atol=1e-5)


@every_hand
def test_actions_are_scaled_to_joint_limits(name):
    env = task_env(name)
    low, high = env.task.hand.control_limits.unbind(dim=1)
    for action, target in ((-1.0, low), (0.0, (low + high) / 2), (1.0, high)):
        env.step(torch.full((4, env.num_actions), action))
        torch.testing.assert_close(env.task.targets, target.expand(4, -1))
    smooth = task_env(name, moving_average=0.25)
    before = smooth.task.targets.clone()
    torch.testing.assert_close(before, torch.zeros_like(before).clamp(low, high))
    smooth.step(torch.ones(4, env.num_actions))
    torch.testing.assert_close(smooth.task.targets, 0.75 * before + 0.25 * high)


@every_hand
def test_joints_reach_their_targets(name):
    env = task_env(name, fall_distance=1e6)
    env.task.cube.set_state(EVERYWHERE, root_pos=torch.tensor([0.0, 0.0, -50.0]).expand(4, 3))  # out of the way
    hand = env.task.hand
    for _ in range(60):
        env.step(torch.full((4, env.num_actions), -0.4))  # closer to the limit fingers would collide
    low, high = env.task.hand.joint_limits.unbind(dim=1)
    # two joints on one tendon share its range, so each moves as if it had an actuator
    error = (hand.joint_pos - (0.3 * high + 0.7 * low)).abs()
    assert error.max() < 0.1, dict(zip(hand.joint_names, error[0].tolist(), strict=True))


def test_outer_joints_of_shadow_hand_bend_together():
    env = task_env("ShadowHand", fall_distance=1e6)
    env.task.cube.set_state(EVERYWHERE, root_pos=torch.tensor([0.0, 0.0, -50.0]).expand(4, 3))
    names = env.task.hand.joint_names
    action = torch.full((4, 20), -1.0)
    action[:, env.task.hand.actuator_names.index("MFJ1")] = 1.0
    for _ in range(60):
        env.step(action)
    outer = env.task.hand.joint_pos[:, [names.index("MFJ1"), names.index("MFJ0")]]
    assert (outer > 1.4).all()
    assert (env.task.hand.joint_pos[:, [names.index("FFJ1"), names.index("FFJ0")]] < 0.1).all()


@every_hand
def test_reaching_goal_replaces_only_goal(name):
    env, other = task_env(name, success_tolerance=0.1), task_env(name, success_tolerance=0.1)
    still = torch.zeros(4, env.num_actions)
    near = torch.tensor([True, False, True, False])
    goals = torch.where(near[:, None], turned_goal(env, 0.02), turned_goal(env, 1.0))
    env.task.goal_quat.copy_(goals)
    other.task.goal_quat.copy_(turned_goal(other, 1.0))
    first, plain = env.step(still), other.step(still)
    assert torch.equal(first.terms["success"], 250.0 * near)
    assert not first.done.any() and torch.equal(env.task.successes, near.float())
    assert torch.equal((env.task.goal_quat != goals).any(dim=1), near)
    assert torch.equal(env.sim.qpos, other.sim.qpos)
    assert (first.stats["successes"].isnan()).all()
    # The policy observes the new goal; this step's reward is for the old one.
    assert torch.equal(env.step(still).terms["success"], torch.zeros(4))
    terms = env.task._terms()
    torch.testing.assert_close(terms["goal_quat"], env.task.goal_quat)
    torch.testing.assert_close(plain.terms["rotation"], torch.full((4,), 1.0 / 1.1), atol=0.05, rtol=0)


@every_hand
def test_success_statistic_counts_goals_per_episode(name):
    env = task_env(name, episode_length=3, fall_distance=1e6, success_tolerance=3.2)  # every step is a success
    still = torch.zeros(4, env.num_actions)
    for count in (1, 2):
        assert env.step(still).stats["successes"].isnan().all()
        assert torch.equal(env.task.successes, torch.full((4,), float(count)))
    last = env.step(still)
    assert last.truncated.all() and torch.equal(last.stats["successes"], torch.full((4,), 3.0))
    assert torch.equal(env.task.successes, torch.zeros(4))


def curriculum(start: float | None, **settings: float) -> dict[str, Any]:
    return {"curriculum": {"start": start, "factor": 0.5, "threshold": 3.0, "window": 2, **settings}}


def test_wide_tolerance_rewards_goals_without_counting_successes():
    env = task_env("AllegroHand", episode_length=3, **curriculum(0.8))
    still = torch.zeros(4, env.num_actions)
    angles = [0.02, 0.5, 1.0, 0.02]
    goals = torch.stack([turned_goal(env, angle)[i] for i, angle in enumerate(angles)])
    env.task.goal_quat.copy_(goals)
    step = env.step(still)
    assert step.terms["success"].tolist() == [250.0, 250.0, 0.0, 250.0]
    assert (env.task.goal_quat != goals).any(dim=1).tolist() == [True, True, False, True]
    assert env.task.successes.tolist() == [1.0, 0.0, 0.0, 1.0] and env.task.goals.tolist() == [1.0, 1.0, 0.0, 1.0]
    env.task.goal_quat.copy_(turned_goal(env, 3.0))
    env.step(still)
    env.task.goal_quat.copy_(turned_goal(env, 3.0))
    last = env.step(still)
    assert last.truncated.all() and last.stats["goals"].tolist() == [1.0, 1.0, 0.0, 1.0]
    assert last.stats["successes"].tolist() == [1.0, 0.0, 0.0, 1.0]


def test_tolerance_narrows_with_goals_down_to_final_value():
    env = task_env("AllegroHand", episode_length=100, **curriculum(0.35))
    task, tolerances = env.task, []
    nobody = torch.zeros(4, dtype=torch.bool)
    task.tolerance._steps.zero_()
    task.tolerance._total.zero_()
    # one goal among four envs in a window of two steps counts 100 / 8 per episode
    for goals in (0, 1, 0, 0, 1, 1, 4, 4):
        task.rotation_error.copy_(torch.arange(4) >= goals)
        task.advance(nobody)
        tolerances.append(round(task.stats()["tolerance"][0].item(), 4))
    assert tolerances == [0.35, 0.175, 0.175, 0.175, 0.175, 0.1, 0.1, 0.1]


def test_evaluation_uses_final_tolerance():
    trained = task_env("AllegroHand", **curriculum(0.8))
    trained.step(torch.zeros(4, 16))
    cfg = trained.cfg.whole_episodes()
    assert cfg.curriculum.start is None and cfg.reset_from.share == 0.0
    shown = task_env("AllegroHand", **curriculum(None))
    shown.begin_from(trained.state_dict())
    shown.task.goal_quat.copy_(turned_goal(shown, 0.5))
    step = shown.step(torch.zeros(4, 16))
    assert (step.terms["success"] == 0).all() and set(step.stats) == {"successes", "rotation_error"}


def test_widening_tolerance_is_rejected():
    with raises(ConfigError, key="task.curriculum.start", got=0.05):
        task_env("AllegroHand", **curriculum(0.05))


@every_hand
def test_dropped_cube_ends_episode(name):
    env = task_env(name)
    away = torch.tensor([[0.0, 0.0, -0.2], [0.25, 0.0, 0.0], [0.0, 0.0, 0.05], [0.0, -0.26, 0.0]])
    env.task.cube.set_state(EVERYWHERE, root_pos=env.task.goal_pos + away)
    step = env.step(torch.zeros(4, env.num_actions))
    assert step.terminated.tolist() == [False, True, False, True]
    distance = -step.terms["distance"] / 10.0
    torch.testing.assert_close(distance, torch.tensor([0.2, 0.25, 0.05, 0.26]), atol=0.01, rtol=0)  # cube is falling
    assert torch.equal(step.terms["fall"], torch.zeros(4))


@every_hand
def test_cube_starts_near_palm_in_any_orientation(name):
    env = task_env(name, num_envs=256)
    task = env.task
    start = task.cube.root_pos - task.cube.default_root_pos
    assert start.abs().max() <= 0.01 and start.abs().max() > 0.009
    low, high = task.hand.joint_limits.unbind(dim=1)
    least, most = (0.2 * low).maximum(low), (0.2 * high).maximum(low)
    assert ((least <= task.hand.joint_pos) & (task.hand.joint_pos <= most)).all()
    # angles between uniform orientations: mean pi/2 + 2/pi
    assert task._rotation_error().mean().item() == pytest.approx(math.pi / 2 + 2 / math.pi, abs=0.15)


SIZES = {
    "ShadowHand": {"openai": 42, "full_no_vel": 77, "full": 157, "full_state": 211},
    "AllegroHand": {"full_no_vel": 50, "full": 72, "full_state": 88},
}


@every_hand
def test_observation_types_have_expected_sizes(name):
    for kind, size in SIZES[name].items():
        env = task_env(name, 1, observation_type=kind, asymmetric=True)
        assert env.obs_sizes == {"policy": size, "critic": SIZES[name]["full_state"]}
    action = torch.rand(1, env.num_actions)
    assert torch.equal(env.step(action).obs["critic"], task_env(name, 1).step(action).obs["policy"])


@pytest.mark.slow
@every_hand
def test_no_env_diverges_under_random_actions(name):
    env = task_env(name, num_envs=64)
    generator = torch.Generator().manual_seed(1)
    for count in range(200):
        if count % 10 == 0:
            held = 2.0 * torch.randint(0, 2, (64, env.num_actions), generator=generator) - 1.0
        jitter = 2.0 * torch.rand(64, env.num_actions, generator=generator) - 1.0
        step = env.step(torch.where(torch.arange(64)[:, None] % 2 == 0, held, jitter))
        assert not step.diverged.any()
    assert not env.sim.overflow.any()
