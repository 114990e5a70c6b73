"""Tests of image noise: shift, brightness, clean copies, resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gpusim_rl.tasks.cartpole_camera import CartpoleCamera
from torch import Tensor
from torch.nn import functional

import gpusim_rl
from gpusim_rl.env import VecEnv
from gpusim_rl.env.environment import Step
from gpusim_rl.env.image_noise import ImageNoise
from gpusim_rl.env.stateful import kept_tensors
from gpusim_rl.errors import ConfigError
from gpusim_rl.run import checkpoint
from gpusim_rl.testing.conformance import differences
from gpusim_rl.testing.sync_counter import SyncCounter
from helpers.training import make_trainer, merged, read_csv, the_run

SHAPE = (6, 9, 2)
BOTH = {"camera": {"shift": 2, "brightness": [0.7, 1.4]}}


def make_noise(**camera: Any) -> ImageNoise:
    return ImageNoise({"camera": camera}, {"camera": SHAPE}, 400, torch.device("cpu"), 1)


def pictures() -> Tensor:
    return torch.randint(256, (400, *SHAPE), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def make_env(observations: dict[str, Any] | None = None, task: str = "CartpoleCamera", seed: int = 3) -> VecEnv:
    settings = {"episode_length": 9, "randomize_episode_start": False, "observations": observations or {}}
    size = {"height": 12, "width": 20} if task == "CartpoleCamera" else {}
    return gpusim_rl.make_env(task, num_envs=16, sim="mujoco", device="cpu", seed=seed, task={**settings, **size})


def env_noise(env: VecEnv) -> ImageNoise:
    found = env._groups.image_noise
    assert found is not None
    return found


def steps(env: VecEnv, number: int) -> list[Step]:
    generator = torch.Generator().manual_seed(1)
    return [env.step(torch.rand(16, 1, generator=generator) * 2 - 1) for _ in range(number)]


def trainer(folder: Path, **more: Any) -> Any:
    task = {"height": 12, "width": 20, "episode_length": 9, "observations": BOTH}
    settings = {"task": task, "ppo": {"network": {"encoder": {"frames": 2}}}, "sim": "mujoco", "device": "cpu"}
    return make_trainer("CartpoleCamera", folder, **merged(settings, more))


def test_images_shift_with_repeated_borders():
    noise, images = make_noise(shift=2), pictures()
    around = functional.pad(images.movedim(3, 1).float(), (2,) * 4, mode="replicate").movedim(1, 3).to(torch.uint8)
    shifts = noise.shifts["camera"].tolist()
    for found, padded, (dy, dx) in zip(noise.apply("camera", images), around, shifts, strict=True):
        assert torch.equal(found, padded[2 + dy : 8 + dy, 2 + dx : 11 + dx])
    assert len(noise.shifts["camera"].unique(dim=0)) == 25, "each of -2 to 2 in both directions"
    assert noise.factors == {}


def test_brightness_scales_and_saturates_bytes():
    noise, images = make_noise(brightness=[0.5, 2.0]), pictures()
    factors = noise.factors["camera"].flatten().tolist()
    assert 0.5 <= min(factors) < 0.52 and 1.98 < max(factors) <= 2.0
    for found, image, factor in zip(noise.apply("camera", images), images.double(), factors, strict=True):
        exact = (image * factor).clamp(max=255.0)
        assert (found - exact).abs().max() <= 0.5 + 1e-4, "not rounded to the nearest byte"
    noise.factors["camera"].fill_(1.0)
    assert torch.equal(noise.apply("camera", images), images)
    assert noise.shifts == {}


def test_neutral_settings_draw_no_noise():
    noise = make_noise(brightness=[1.0, 1.0])
    assert noise.shifts == noise.factors == {} and torch.equal(noise.apply("camera", pictures()), pictures())
    env = make_env()
    env.reset()
    assert env._groups.image_noise is None and "images" not in env.state_dict()


def test_image_noise_is_drawn_each_step_and_changes_only_images():
    env, clean = make_env(BOTH), make_env()
    acted_on, true = env.reset()["camera"], clean.reset()["camera"]
    noise, draws = env_noise(env), []
    for action in torch.rand(20, 16, 1, generator=torch.Generator().manual_seed(1)) * 2 - 1:
        assert torch.equal(acted_on, noise.apply("camera", true))
        draws.append(torch.cat([noise.shifts["camera"], noise.factors["camera"].flatten(1)], dim=1).clone())
        noisy, truth = env.step(action), clean.step(action)
        assert torch.equal(noisy.final_obs["camera"], acted_on)
        acted_on, true = noisy.obs["camera"], truth.obs["camera"]
        assert torch.equal(noisy.obs["critic"], truth.obs["critic"])
        assert torch.equal(noisy.reward, truth.reward) and torch.equal(noisy.done, truth.done)
        assert torch.equal(env.clean_obs()["camera"], true)
    drawn = torch.stack(draws)
    assert (drawn[1:, :, 2] != drawn[:-1, :, 2]).all() and len(drawn[..., 2].unique()) == 20 * 16
    assert not torch.equal(acted_on, true)


def test_terms_and_images_can_both_be_noisy(monkeypatch):
    def observe(self: Any) -> Any:
        return {**images_alone(self), "policy": {"pole_vel": self.robot.joint_vel[:, 1:]}}

    images_alone = CartpoleCamera.observe
    monkeypatch.setattr(CartpoleCamera, "observe", observe)
    env = make_env({**BOTH, "pole_vel": {"noise": [1.0, 1.0], "history": 2}})
    obs = env.reset()
    clean = env.clean_obs()
    torch.testing.assert_close(obs["policy"], clean["policy"].expand(-1, 2) + 1.0)
    assert not torch.equal(obs["camera"], clean["camera"])


def test_policy_acts_on_the_images_it_learns_from(tmp_path):
    # With one epoch and one minibatch the only update uses the rollout's policy, so the ratio is 1.
    it = trainer(tmp_path, ppo={"epochs": 1, "minibatch_size": 64})
    act, seen = it.algorithm.act, []
    it.algorithm.act = lambda obs: (seen.append(obs["camera"].clone()), act(obs))[1]
    it.train()
    assert torch.equal(it.algorithm.rollout.obs["camera"], torch.stack(seen[-8:]))
    for row in read_csv(the_run(tmp_path)):
        assert abs(float(row["policy/kl"])) < 1e-6 and float(row["policy/clip_fraction"]) == 0.0


def test_run_with_image_noise_resumes_bit_for_bit(tmp_path):
    trainer(tmp_path / "whole", max_iterations=2).train()
    trainer(tmp_path / "parts", max_iterations=1).train()
    run = the_run(tmp_path / "parts")
    trainer(tmp_path, checkpoint=str(run), max_iterations=2).train()
    ends = [checkpoint.load(the_run(tmp_path / part) / "checkpoints" / "last.pt") for part in ("whole", "parts")]
    assert set(ends[0]["env"]["images"]["tensors"]) == {"shifts.camera", "factors.camera"}
    for part in ("policy", "algorithm", "env", "metrics"):
        assert differences(ends[0][part], ends[1][part]) == []
    assert read_csv(the_run(tmp_path / "whole")) == read_csv(run)


def test_resume_draws_new_settings():
    old, new = make_env(BOTH), make_env({"camera": {"brightness": [2.0, 2.0]}})
    old.reset(), new.reset()
    steps(old, 3)
    obs = new.load_state_dict(old.state_dict())
    assert torch.equal(obs["camera"], (2 * old.clean_obs()["camera"].int()).clamp(max=255).to(torch.uint8))
    shown = make_env(BOTH, seed=4)
    shown.reset()
    assert (shown.begin_from(old.state_dict())["camera"] != shown.clean_obs()["camera"]).any()


def test_image_noise_is_reproducible_from_its_seed():
    first, second, other = make_env(BOTH), make_env(BOTH), make_env(BOTH, seed=4)
    assert torch.equal(first.reset()["camera"], second.reset()["camera"])
    assert torch.equal(steps(first, 5)[-1].obs["camera"], steps(second, 5)[-1].obs["camera"])
    other.reset(), steps(other, 5)
    assert not torch.equal(env_noise(first).factors["camera"], env_noise(other).factors["camera"])
    other.seed(3), first.seed(3)
    assert torch.equal(env_noise(first).factors["camera"], env_noise(other).factors["camera"])


def test_image_noise_neither_synchronises_nor_reallocates():
    noise, images = make_noise(shift=1, brightness=[0.9, 1.1]), pictures()
    addresses = {name: tensor.data_ptr() for name, tensor in kept_tensors(vars(noise))}
    with SyncCounter() as syncs:
        for _ in range(3):
            noise.draw()
            noise.apply("camera", images)
    assert syncs.total == 0, syncs.locations
    assert {name: tensor.data_ptr() for name, tensor in kept_tensors(vars(noise))} == addresses


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"camra": {"shift": 1}}, r"observations\.camra: .* mean 'camera'"),
        ({"camera": {"noise": 0.1}}, r"task\.observations\.camera\.noise"),
        ({"camera": {"shift": 12}}, r"camera\.shift: .*12 x 20 pixels\), got 12"),
        ({"camera": {"brightness": [1.2, 0.8]}}, r"camera\.brightness.* got \[1\.2, 0\.8\]"),
    ],
)
def test_invalid_image_noise_is_rejected(settings, words):
    with pytest.raises(ConfigError, match=words):
        make_env(settings).reset()
