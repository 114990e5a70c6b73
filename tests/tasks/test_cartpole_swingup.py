"""CartpoleSwingup: dm_control's reward, and image observations."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import gpusim_rl


def make_env(num_envs: int = 4, **task):
    settings = {"randomize_episode_start": False, **task}
    env = gpusim_rl.make_env("CartpoleSwingup", num_envs=num_envs, sim="mujoco", device="cpu", task=settings)
    return env, env.reset()


def gaussian(x: float, margin: float) -> float:
    """Evaluate dm_control's `tolerance` around 0; its value at the margin is 0.1."""
    return math.exp(-0.5 * (x / margin * math.sqrt(-2.0 * math.log(0.1))) ** 2)


def test_reward_equals_dm_control():
    env, _ = make_env(64)
    random = torch.Generator().manual_seed(0)
    for _ in range(40):
        step = env.step(2.0 * torch.rand(64, 1, generator=random) - 1.0)
    pos, vel = env.task.robot.joint_pos, env.task.robot.joint_vel
    expected = [
        (1.0 + math.cos(angle))
        / 2.0
        * ((1.0 + gaussian(cart, 2.0)) / 2.0)
        * ((4.0 + 1.0 - action**2) / 5.0)
        * ((1.0 + gaussian(spin, 5.0)) / 2.0)
        for (cart, angle), spin, [action] in zip(
            pos.tolist(), vel[:, 1].tolist(), env.task.actions.tolist(), strict=True
        )
    ]
    np.testing.assert_allclose(step.reward, expected, rtol=1e-5, atol=1e-6)
    assert np.ptp(expected) > 0.05
    assert not step.terminated.any()


def test_pole_starts_hanging_and_needs_several_swings():
    env, obs = make_env(16)
    assert obs["policy"][:, 2].max() < -0.99
    highest = torch.full((16,), -1.0)
    for _ in range(25):
        step = env.step(torch.ones(16, 1))
        highest = highest.maximum(step.obs["policy"][:, 2])
    assert highest.max() < 0.5
    assert (step.obs["policy"][:, 0].abs() < 1.9).all()  # end of the rail


@pytest.mark.parametrize("hangs", [True, False])
def test_camera_shows_pole_at_its_angle(hangs: bool):
    env, _ = make_env(3, vision="rgb")
    assert env.images == {"camera": (48, 80, 3)} and env.obs_sizes == {"critic": 5, "policy": 0}
    everywhere = torch.ones(3, dtype=torch.bool)
    angle = math.pi if hangs else 0.0
    env.task.robot.set_state(everywhere, joint_pos=torch.tensor([0.0, angle]).expand(3, 2))
    step = env.step(torch.zeros(3, 1))
    image = step.obs["camera"].int()
    orange = (image[..., 0] > image[..., 2] + 40).sum(dim=2)  # per row
    upper, lower = orange[:, :21], orange[:, 27:]
    seen, other = (lower, upper) if hangs else (upper, lower)
    assert not other.any() and (seen > 0).sum(dim=1).min() > 15
