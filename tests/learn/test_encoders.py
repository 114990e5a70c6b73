"""Image encoders, frame stacks and learning from images."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpusim_rl.api import prepare
from gpusim_rl.distributed.actors import make_trainer
from gpusim_rl.errors import ConfigError
from gpusim_rl.learn.encoders import Encoder, FrameStack, SpatialSoftmax
from gpusim_rl.settings.checks import build
from gpusim_rl.settings.schema import EncoderConfig
from helpers.composed import algorithm_defaults
from helpers.fakes import Learner, RandomEnv, ppo_config
from helpers.on_policy import prepared
from helpers.raised import raises

SHAPE = (12, 16, 2)


def encoder_config(**changes: Any) -> EncoderConfig:
    return build(EncoderConfig, {**algorithm_defaults("ppo")["network"]["encoder"], **changes}, "encoder")


def frames(*batch: int, seed: int = 0) -> Tensor:
    return torch.randint(1, 256, (*batch, *SHAPE), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def make_learner(num_envs: int = 6, numbers: int = 0, critic: int = 4, **encoder: Any) -> Learner:
    sizes = {"policy": numbers} | ({"critic": critic} if critic else {})
    env = RandomEnv(num_envs, sizes, images={"camera": SHAPE})
    cfg = ppo_config({"encoder": encoder}, sequence_length=4)
    return Learner(env, cfg, more={"images": env.images})


def test_spatial_softmax_returns_position_of_maximum():
    picture = torch.zeros(1, 2, 5, 9)
    picture[0, 0, 1, 8] = picture[0, 1, 4, 2] = 1e3
    layer = SpatialSoftmax(5, 9)
    torch.testing.assert_close(layer(1e-3 * picture + 7.0), layer(picture), atol=1e-3, rtol=0.0)
    torch.testing.assert_close(layer(picture), torch.tensor([[1.0, -0.5, -0.5, 1.0]]), atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("kind", ["spatial", "nature", "impala"])
def test_encoder_scales_pixels_and_accepts_any_batch_shape(kind):
    torch.manual_seed(0)
    encoder = Encoder({"camera": (64, 48, 3)}, encoder_config(kind=kind), "ppo.network")
    images = torch.randint(256, (2, 3, 64, 48, 3), dtype=torch.uint8)
    features = encoder({"camera": images}, reduced=None)
    assert features.shape == (2, 3, encoder.out_size)
    torch.testing.assert_close(features[1, 2], encoder({"camera": images[1, 2:]}, reduced=None)[0])
    scaled = images[0].permute(0, 3, 1, 2).float() / 255.0 - 0.5
    torch.testing.assert_close(features[0], encoder.networks["camera"](scaled))
    features.square().sum().backward()
    assert all(parameter.grad is not None for parameter in encoder.parameters())


def test_encoder_rejects_too_small_images():
    with raises(ConfigError, key="ppo.network.encoder.kind=nature"):
        Encoder({"camera": SHAPE}, encoder_config(kind="nature"), "ppo.network")
    with raises(ConfigError, key="ppo.network.encoder.kind=spatial"):
        Encoder({"camera": (4, 16, 2)}, encoder_config(kind="spatial"), "ppo.network")


class Mean(nn.Module):
    """Mean brightness, as a custom encoder."""

    def __init__(self, shape: tuple[int, int, int], cfg: EncoderConfig) -> None:
        super().__init__()
        self.out_size = shape[2]

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=(2, 3))


def test_custom_encoder_is_built_and_checked():
    encoder = Encoder({"camera": SHAPE}, encoder_config(_target_=f"{__name__}.Mean"), "ppo.network")
    images = frames(4)
    expected = images.float().mean(dim=(1, 2)) / 255.0 - 0.5
    torch.testing.assert_close(encoder({"camera": images}, reduced=None), expected)
    with pytest.raises(ConfigError, match=r"ppo.network.encoder._target_=torch.nn.ReLU: ReLU\(shape, cfg\) failed"):
        Encoder({"camera": SHAPE}, encoder_config(_target_="torch.nn.ReLU"), "ppo.network")
    with pytest.raises(ConfigError, match=r"torch.nn.Flatten: .*out_size"):
        Encoder({"camera": SHAPE}, encoder_config(_target_="torch.nn.Flatten"), "ppo.network")


def stacks_one_by_one(x: Tensor, is_first: Tensor, number: int) -> Tensor:
    """Return stacks [time, batch, H, W, C * number] by definition."""
    stacked = torch.zeros(*x.shape[:-1], x.shape[-1] * number, dtype=torch.uint8)
    for t in range(len(x)):
        for env in range(x.shape[1]):
            for lag in range(number):
                if t - lag < 0 or is_first[t - lag + 1 : t + 1, env].any():
                    break
                place = (number - 1 - lag) * x.shape[-1]
                stacked[t, env, ..., place : place + x.shape[-1]] = x[t - lag, env]
    return stacked


@pytest.mark.parametrize("length", [1, 2, 3, 12])
def test_frame_stack_starts_at_episode_start(length):
    x, stack = frames(12, 5), FrameStack({"camera": SHAPE}, 4)
    is_first = torch.rand(12, 5, generator=torch.Generator().manual_seed(1)) < 0.3
    expected = stacks_one_by_one(x, is_first, 4)
    hidden = stack.initial_state(5, torch.device("cpu"))
    for start in range(0, 12, length):
        part = slice(start, start + length)
        if start:  # as algorithms reset finished episodes
            hidden = tuple(state.masked_fill(is_first[start][None, :, None], 0) for state in hidden)
        found, hidden = stack({"camera": x[part]}, hidden, is_first[part])
        torch.testing.assert_close(found["camera"], expected[part])


@pytest.mark.parametrize("frames_seen", [1, 3])
@pytest.mark.parametrize("critic", [0, 4])
def test_update_sees_the_frames_acted_on(frames_seen, critic):
    learner = make_learner(critic=critic, numbers=3, frames=frames_seen)
    learner.collect()
    learner.collect()  # continues running episodes
    stats = learner.update()
    assert stats["loss/policy"].isfinite()
    learner.collect()
    rollout, policy = learner.rollout, learner.policy
    _, batch, _ = prepared(learner.ppo)
    again = policy.evaluate(batch.inputs, batch.packed[..., :3], batch.hidden, batch.is_first)
    acted = policy.head.stored(rollout.distribution).log_prob(rollout.action)
    acted = acted.unflatten(0, (-1, rollout.sequence_length)).transpose(0, 1).flatten(1, 2)
    torch.testing.assert_close(again.log_prob, acted, rtol=1e-4, atol=1e-5)


def test_layers_after_encoder_get_fp32_features():
    policy = make_learner(critic=0).policy
    policy.reduced = torch.bfloat16
    seen: list[Tensor] = []
    policy.encoder.register_forward_hook(lambda module, args, features: features.add_(1e-4 * len(seen)))
    policy.actor.layers.register_forward_hook(lambda module, args, features: seen.append(features))
    obs = {"policy": torch.zeros(6, 0), "camera": frames(6)}
    for _ in range(2):
        policy.act(obs, policy.initial_state(6))
    assert seen[0].dtype == torch.float32
    assert not torch.isclose(seen[0], seen[1], rtol=0.0, atol=1e-7).any(dim=1).all()


def test_rollout_of_cartpole_camera_stores_each_frame_once():
    spec = prepare("CartpoleCamera", num_envs=4, sim="mujoco", device="cpu", log={"console": "quiet"})
    it: Any = make_trainer(spec)
    rollout, cfg = it.algorithm.rollout, spec.cfg.algorithm
    steps, length, older, later = cfg.horizon, cfg.sequence_length, cfg.network.encoder.frames - 1, 1 + rollout.slots
    frame = spec.cfg.task.height * spec.cfg.task.width * 3
    # Each frame once, plus the older frames before each training sequence and before each valued observation.
    images = 4 * frame * (steps + older * (steps // length + later))
    floats = 4 * (4 + 1 + rollout.distribution.shape[-1] + 2)  # critic group, action, distribution, value, reward
    numbers = 4 * (steps * (floats + 4) + 1 + later * 4 * 4)  # with four masks and the observations after the rollout
    assert older == 2 and sum(tensor.nbytes for tensor, _ in rollout.memory()) == images + numbers
    assert numbers < 0.01 * images
    assert images < 0.6 * 4 * frame * steps * (older + 1)


def test_images_train_the_encoder_without_statistics():
    learner = make_learner(critic=4)
    assert set(learner.policy.obs_norm) == {"policy", "critic"}
    before = [p.clone() for p in learner.policy.encoder.parameters()]
    learner.train(2)
    assert all(not torch.equal(old, new) for old, new in zip(before, learner.policy.encoder.parameters(), strict=True))
