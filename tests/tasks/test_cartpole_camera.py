"""CartpoleCamera: images in both modes."""

from __future__ import annotations

import math
from contextlib import closing

import pytest
import torch

import gpusim_rl


@pytest.mark.parametrize(("image", "channels"), [("rgb", 3), ("depth", 1)])
def test_camera_shows_cart_at_its_position(image, channels):
    options = {"num_envs": 3, "sim": "mujoco", "device": "cpu", "task": {"image": image}}
    with closing(gpusim_rl.make_env("CartpoleCamera", **options)) as env:
        env.reset()
        env.sim.qpos[:] = torch.tensor([[-1.2, 0.0], [0.0, 0.0], [1.2, 0.0]])
        env.sim.qvel[:] = 0.0
        seen = env.step(torch.zeros(3, 1)).obs["camera"]
        assert seen.shape == (3, 36, 96, channels) and seen.dtype == torch.uint8
        background = seen.median(dim=0).values.int()
        differs = (seen.int() - background).abs().sum(dim=(1, 3))  # per column of pixels
        places = (differs * torch.arange(96)).sum(dim=1) / differs.sum(dim=1)
        pixels_per_m = 36 / (2.0 * 5.0 * math.tan(math.radians(6.85)))
        torch.testing.assert_close(places, 47.5 + pixels_per_m * torch.tensor([-1.2, 0.0, 1.2]), atol=1.0, rtol=0.0)
