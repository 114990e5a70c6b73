"""Tracking tasks: rewards on and off the clip, terminations, starts, invalid clips."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gpusim_rl.env import VecEnv
from gpusim_rl.env.clip import Clip, save
from gpusim_rl.env.math import quat_angle, quat_from_axis_angle, quat_multiply
from gpusim_rl.errors import ConfigError
from gpusim_rl.settings.compose import compose
from helpers.raised import raises
from helpers.scenes import everywhere
from helpers.task_envs import task_env

NUM = 16
SETTINGS = compose(["task=Go1Tracking", "recipe=full"])["task"]
SIGMA = {name: term["sigma"] for name, term in SETTINGS["beyondmimic"].items()}
STILL = {"pos": [0.0] * 3, "rot": [0.0] * 3, "lin_vel": [0.0] * 3, "ang_vel": [0.0] * 3, "joint_pos": 0.0}
X, Y, Z = torch.eye(3)


def make_env(num_envs: int = NUM, **settings: Any) -> VecEnv:
    own = {key: value for key, value in SETTINGS.items() if key not in ("_target_", "randomize_episode_start")}
    return task_env("Go1Tracking", num_envs, **{**own, **settings})


def put(env: VecEnv, **changes: Tensor) -> None:
    """Put robots into their target frames, with overrides of root and joints."""
    task, root = env.task, env.task.root_index
    frame = task.motions.frame(task.playhead.index)
    state = {f"root_{key}": getattr(frame, f"body_{key}")[:, root] for key in ("pos", "quat", "lin_vel", "ang_vel")}
    state |= {"joint_pos": frame.joint_pos, "joint_vel": frame.joint_vel}
    task.body.set_state(everywhere(env), **{**state, **changes})
    env.sim.refresh()


def paid(env: VecEnv) -> dict[str, Tensor]:
    """Return rewards as shares of their weights."""
    task = env.task
    terms, weights = task.rewards(), task.cfg.terms
    return {name: terms[name] / (task.dt * weights[name].weight) for name in weights}


def walking(file: Path, *, speed: float = 0.0, turn: float = 0.0, swing: float = 0.0, frames: int = 101) -> Path:
    """Write a clip of Go1 that slides ahead [m/s] and turns about z [rad/s] while its joints move [rad/s]."""
    env = make_env(frames, clips=["go1_trot"])
    body, t = env.task.body, torch.arange(frames) / 50.0
    yaw, ahead = quat_from_axis_angle(Z.expand(frames, 3), turn * t), speed * t[:, None] * X
    body.set_state(
        everywhere(env),
        root_pos=ahead + torch.tensor([0.0, 0.0, 0.3]),
        root_quat=yaw,
        root_lin_vel=(speed * X).expand(frames, 3),
        root_ang_vel=(turn * Z).expand(frames, 3),
        joint_pos=env.task.pose + swing * t[:, None] - 0.5 * swing * t[-1],
        joint_vel=torch.full((frames, 12), swing),
    )
    env.sim.refresh()
    bodies = body.bodies(body.body_names)
    env.sim.refresh()
    arrays = {"joint_pos": body.joint_pos, "joint_vel": body.joint_vel, "body_pos_w": bodies.pos}
    arrays |= {"body_quat_w": bodies.quat, "body_lin_vel_w": bodies.lin_vel, "body_ang_vel_w": bodies.ang_vel}
    names = {"joint_names": tuple(body.joint_names), "body_names": tuple(body.body_names)}
    save(file, Clip(fps=50.0, **names, **{name: value.numpy().copy() for name, value in arrays.items()}))
    return file


# Rewards


@pytest.mark.parametrize("reward", ["beyondmimic", "deepmimic"])
def test_perfect_tracking_of_clip_gets_full_reward(reward):
    env = make_env(200, clips=["go1_trot"], reward=reward)
    env.task.playhead.index.copy_(torch.arange(1, 201))
    put(env)
    for name, share in paid(env).items():
        assert share.tolist() == pytest.approx([1.0] * 200, abs=2e-6), name
    assert env.task.errors.max() < 1e-5 and not env.task.terminated().any(), "precision of the file"
    costs = env.task.rewards()
    assert costs["joint_limits"].abs().max() == 0.0 and costs["action_rate"].abs().max() == 0.0


def late_by(env: VecEnv, frames: int) -> dict[str, float]:
    """Return rewards of robots that lag some frames behind their clip."""
    env.task.playhead.index.fill_(30)
    put(env)
    env.task.playhead.index.fill_(30 + frames)
    return {name: share[0].item() for name, share in paid(env).items()}


def test_late_position_is_rewarded_by_formula(tmp_path):
    env = make_env(clips=[str(walking(tmp_path / "ahead.npz", speed=0.8))])
    found, way = late_by(env, 10), 0.8 * 10 / 50.0
    others = dict.fromkeys(("anchor_ori", "body_pos", "body_ori", "body_lin_vel", "body_ang_vel"), 1.0)
    assert found == pytest.approx({"anchor_pos": math.exp(-((way / SIGMA["anchor_pos"]) ** 2)), **others}, abs=2e-5)
    assert env.task.errors[:, 0].tolist() == pytest.approx([0.0, way, 0.0], abs=1e-5)


def test_late_rotation_is_rewarded_by_formula(tmp_path):
    env = make_env(clips=[str(walking(tmp_path / "turn.npz", turn=1.5))])
    found, angle = late_by(env, 8), 1.5 * 8 / 50.0
    assert found["anchor_ori"] == pytest.approx(math.exp(-((angle / SIGMA["anchor_ori"]) ** 2)), abs=1e-5)
    alike = [found[name] for name in ("anchor_pos", "body_ang_vel", "body_pos", "body_ori")]
    assert alike == pytest.approx([1.0] * 4, abs=1e-5), "bodies are compared in the yaw frame"
    frame, now = env.task._frame(), env.task.followed
    square = (frame.body_lin_vel - now.lin_vel).square().sum(dim=2).mean(dim=1)[0].item()
    expected = math.exp(-square / SIGMA["body_lin_vel"] ** 2)
    assert square > 1e-3 and found["body_lin_vel"] == pytest.approx(expected, abs=1e-5)


def test_late_joints_are_rewarded_by_formula(tmp_path):
    env = make_env(clips=[str(walking(tmp_path / "swing.npz", swing=0.3))], reward="deepmimic")
    found, off = late_by(env, 20), 0.3 * 20 / 50.0
    assert found["joint_pos"] == pytest.approx(math.exp(-0.25 * 12 * off**2), rel=1e-5)
    assert found["joint_vel"] == pytest.approx(1.0) and found["root_pose"] == pytest.approx(1.0)
    assert env.task.errors[2, 0].item() == pytest.approx(off, rel=1e-5)
    assert found["end_pos"] < 0.99
    put(env, joint_vel=torch.full((NUM, 12), 0.3 + 2.0), root_lin_vel=(0.5 * Y).expand(NUM, 3))
    found = {name: share[0].item() for name, share in paid(env).items()}
    assert found["joint_vel"] == pytest.approx(math.exp(-0.01 * 12 * 4.0), rel=1e-5)
    assert found["root_vel"] == pytest.approx(math.exp(-0.25), rel=1e-5) and found["end_pos"] == pytest.approx(1.0)
    turn = quat_from_axis_angle(X.expand(NUM, 3), torch.full((NUM,), 0.4))
    frame = env.task._frame()
    put(env, root_pos=frame.body_pos[:, 0] + 0.2 * Y, root_quat=quat_multiply(turn, frame.body_quat[:, 0]))
    found = {name: share[0].item() for name, share in paid(env).items()}
    assert found["root_pose"] == pytest.approx(math.exp(-(0.04 + 0.1 * 0.16) / 0.447**2), rel=1e-4)


def test_targets_are_aligned_to_robot_position_and_yaw():
    env = make_env(1, clips=["go1_trot"])
    task, angle = env.task, torch.tensor([0.9])
    task.playhead.index.fill_(40)
    frame, turn = task._frame(), quat_from_axis_angle(Z[None], angle)
    moved = torch.tensor([[3.0, -2.0, 0.0]])
    put(env, root_pos=frame.body_pos[:, 0] + moved, root_quat=quat_multiply(turn, frame.body_quat[:, 0]))
    found = {name: share[0].item() for name, share in paid(env).items()}
    assert [found["body_pos"], found["body_ori"]] == pytest.approx([1.0, 1.0], abs=1e-5)
    assert found["anchor_ori"] == pytest.approx(math.exp(-((0.9 / SIGMA["anchor_ori"]) ** 2)), rel=1e-4)
    put(env, root_pos=frame.body_pos[:, 0] + torch.tensor([[0.0, 0.0, 0.05]]))
    found = {name: share[0].item() for name, share in paid(env).items()}
    expected = math.exp(-((0.05 / SIGMA["body_pos"]) ** 2))
    assert found["body_pos"] == pytest.approx(expected, rel=1e-4), "heights are absolute"
    knee = frame.joint_pos.clone()
    knee[:, 2] += 0.3
    put(env, joint_pos=knee)
    away = torch.zeros(9)
    away[2] = 0.3  # the calf rotates about its origin
    found = {name: share[0].item() for name, share in paid(env).items()}
    assert found["body_ori"] == pytest.approx(math.exp(-away.square().mean().item() / SIGMA["body_ori"] ** 2), rel=1e-4)
    assert found["body_pos"] == pytest.approx(1.0, abs=1e-5)


def test_costs_follow_their_weights():
    env = make_env(4, clips=["go1_trot"])
    task = env.task
    put(env)
    task.actions.fill_(0.5)
    task.last_actions.fill_(0.25)
    beyond = task._frame().joint_pos.clone()
    beyond[:, 2] = task.mid[2] + task.half_range[2] + 0.02
    put(env, joint_pos=beyond)
    terms = task.rewards()
    assert terms["action_rate"].tolist() == pytest.approx([0.02 * -0.1 * 12 * 0.0625] * 4)
    assert terms["joint_limits"].tolist() == pytest.approx([0.02 * -10.0 * 0.02] * 4, rel=1e-4)
    assert "self_contact" not in make_env(4, costs={**SETTINGS["costs"], "self_contact": 0.0}).task.terms


# Ends and starts


def test_episode_ends_far_from_clip():
    env = make_env(6, clips=["go1_trot"])
    task = env.task
    frame, still = task._frame(), torch.zeros(6, 1)
    height, limit = still.clone(), task.cfg.anchor_height_limit
    height[1], height[2], height[3] = limit + 0.01, -limit - 0.01, limit - 0.01
    tilt = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.3, 1.5])  # 1 - cos is 0.73, 0.93
    turned = quat_multiply(quat_from_axis_angle(Y.expand(6, 3), tilt), frame.body_quat[:, 0])
    task.limits[task.end_index] = 10.0
    put(env, root_pos=frame.body_pos[:, 0] + height * Z, root_quat=turned)
    assert task.terminated().tolist() == [False, True, True, False, False, True]
    task.limits[task.end_index] = 0.12
    legs = frame.joint_pos.clone()
    legs[1, 1] += 1.6  # a rotated thigh raises the knee
    put(env, joint_pos=legs)
    assert task.terminated().tolist() == [False, True, False, False, False, False]
    assert task.stats()["ends_per_minute"].tolist() == [0.0, 3000.0, 0.0, 0.0, 0.0, 0.0]


def test_episode_starts_near_random_frame_with_noise():
    env = make_env(256, clips=["go1_trot"])
    task, noise = env.task, env.task.cfg.start_noise
    frame = task.motions.frame(task.playhead.index - 1)
    assert (task.playhead.index >= 1).all() and task.playhead.index.unique().numel() > 50
    for value, middle, most in (
        (task.body.root_pos, frame.body_pos, noise.pos),
        (task.body.root_lin_vel, frame.body_lin_vel, noise.lin_vel),
        (task.body.root_ang_vel, frame.body_ang_vel, noise.ang_vel),
    ):
        off, limit = (value - middle[:, 0]).abs().amax(dim=0), torch.tensor(most)
        assert (off <= limit + 1e-5).all() and (off > 0.8 * limit).all()
    angle = quat_angle(task.body.root_quat, frame.body_quat[:, 0])
    assert 0.1 < angle.max() <= torch.tensor(noise.rot).norm() + 1e-5
    off = (task.body.joint_pos - frame.joint_pos).abs().amax()
    assert 0.09 < off <= 0.1 + 1e-6
    torch.testing.assert_close(task.body.joint_vel, frame.joint_vel, atol=1e-5, rtol=0.0)
    assert (task.body.joint_pos - task.mid).abs().le(task.half_range + 1e-6).all()


def test_finished_clip_restarts_within_episode(tmp_path):
    clips = [str(walking(tmp_path / f"{n}.npz", frames=n)) for n in (5, 9)]
    limits = {"anchor_height_limit": 10.0, "anchor_tilt_limit": 10.0, "end_height_limit": 10.0}
    env = make_env(64, clips=clips, episode_length=1000, **limits)
    task, before, jumped = env.task, env.task.playhead.index.clone(), 0
    for _ in range(30):
        step = env.step(torch.zeros(64, 12))
        assert not step.done.any() and all(value.isfinite().all() for value in step.obs.values())
        after = task.playhead.index.clone()
        over = torch.isin(before, task.motions.last)
        assert torch.equal(after[~over], before[~over] + 1), "next frame of the same clip"
        start = task.motions.frame(after - 1).body_pos[:, 0]
        assert ((task.body.root_pos - start)[over].abs() <= torch.tensor([0.05, 0.05, 0.01]) + 1e-6).all()
        before, jumped = after, jumped + int(over.sum())
    assert jumped > 64


def test_failure_counts_are_per_bin_and_survive_other_num_envs():
    env = make_env(32, clips=["go1_trot"])
    task = env.task
    task.playhead.index.fill_(170)
    far = task._frame().body_pos[:, 0] + 0.5 * Z * (torch.arange(32) < 8)[:, None]
    put(env, root_pos=far)
    step = env.step(torch.zeros(32, 12))
    assert step.terminated.sum() == 8
    assert task.playhead.failures.tolist() == pytest.approx([0.0, 0.0, 0.0, 8 * 0.001])
    assert step.stats["start_top_bin"].tolist() == [3.0] * 32
    fewer = make_env(8, clips=["go1_trot"])
    fewer.begin_from(env.state_dict())
    assert torch.equal(fewer.task.playhead.failures, task.playhead.failures)


def test_run_resumes_with_other_clips(tmp_path, capsys):
    env = make_env(4, clips=["go1_trot"])
    env.task.playhead.index.fill_(170)
    put(env, root_pos=env.task._frame().body_pos[:, 0] + 0.5 * Z)
    env.step(torch.zeros(4, 12))
    env.task.playhead.index.fill_(170)
    other = make_env(4, clips=[str(walking(tmp_path / "short.npz", frames=9))])
    other.load_state_dict(env.state_dict())
    assert other.task.playhead.failures.tolist() == [0.0], "counts restart"
    assert "playhead.failures, playhead._now" in capsys.readouterr().err
    other.load_state_dict(other.state_dict())
    assert capsys.readouterr().err == ""
    assert other.task.playhead.index.tolist() == [8] * 4
    assert other.step(torch.zeros(4, 12)).reward.isfinite().all()


def test_diverged_simulation_is_no_policy_failure():
    env = make_env(8, clips=["go1_trot"])
    far = env.task._frame().body_pos[:, 0] + 0.5 * Z
    put(env, root_pos=far, root_lin_vel=torch.where(torch.arange(8)[:, None] < 2, 1e12 * X, 0.0 * X))
    lost, advance = [], env.task.advance
    env.task.advance = lambda done: lost.append(env.task.lost.clone()) or advance(done)
    step = env.step(torch.zeros(8, 12))
    assert lost[0].all() and step.diverged.sum() == 2 and step.terminated.sum() == 6
    assert env.task.playhead.failures.sum().item() == pytest.approx(6 * 0.001)


def test_time_limit_is_no_policy_failure():
    env = make_env(8, clips=["go1_trot"], episode_length=1)
    assert env.step(torch.zeros(8, 12)).truncated.all()
    assert env.task.playhead.failures.sum() == 0.0


def test_evaluation_starts_at_first_frame():
    cfg = make_env(2).cfg.whole_episodes()
    assert cfg.starts == "first" and not cfg.randomize_episode_start
    env = make_env(16, clips=["go1_trot"], starts="first")
    assert env.task.playhead.index.tolist() == [1] * 16


# Observations


def test_anchor_observations_can_be_disabled():
    unused = {name: {**SETTINGS["observations"][name], "used": False} for name in ("anchor_pos", "lin_vel")}
    env = make_env(4, clips=["go1_trot"], observations={**SETTINGS["observations"], **unused})
    assert env.obs_sizes == {"policy": 75 - 6, "critic": 156, "teacher": 75}


def test_observed_frame_is_rewarded_frame():
    env = make_env(4, clips=["go1_trot"], observations={})
    wanted = env.look()["policy"][:, :12].clone()
    seen = {}
    rewards = env.task.rewards
    env.task.rewards = lambda: seen.update(paid=env.task._frame().joint_pos.clone()) or rewards()
    env.step(torch.zeros(4, 12))
    assert torch.equal(seen["paid"], wanted)


@pytest.mark.parametrize("around", ["pose", "clip"])
def test_action_is_offset_from_pose_or_clip(around):
    env = make_env(4, clips=["go1_trot"], action_around=around)
    task = env.task
    task.encoder_bias.fill_(0.01)
    task.apply_action(torch.full((4, 12), 0.5))
    middle = task.pose if around == "pose" else task._frame().joint_pos
    torch.testing.assert_close(env.sim.ctrl, (middle + 0.5 * task.scale - 0.01).expand(4, 12))


# Mistakes


@pytest.mark.parametrize(
    ("settings", "fields"),
    [
        ({"clips": []}, {"key": "task.clips", "got": []}),
        ({"start_noise": {**STILL, "pos": [0.1]}}, {}),
        ({"starts": "adaptiv"}, {}),
        ({"beyondmimic": {**SETTINGS["beyondmimic"], "body_pos": {"weight": 1.0, "sigma": 0.0}}}, {}),
    ],
)
def test_bad_settings_are_rejected(settings, fields):
    with raises(ConfigError, **fields) as info:
        make_env(**settings)
    assert str(info.value).startswith(f"task.{next(iter(settings))}")


def test_file_without_clip_is_rejected(tmp_path):
    (tmp_path / "text.npz").write_text("no clip")
    with pytest.raises(ConfigError, match=r"text\.npz"):
        make_env(clips=["go1_trot", str(tmp_path / "text.npz")])
