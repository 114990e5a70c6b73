"""Symmetry of PPO: rsl_rl's losses and symmetric policies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gpusim_rl.errors import ConfigError, TaskError
from gpusim_rl.learn.minibatch import Samples
from gpusim_rl.learn.symmetry import IMAGE, Symmetry
from gpusim_rl.settings.schema import SymmetryConfig
from gpusim_rl.spaces import SignedPermutation
from helpers.fakes import Learner, RandomEnv, ppo_config
from helpers.on_policy import prepared
from helpers.training import make_trainer

MAPS = {
    "policy": SignedPermutation([1, 0, 2, 3, 4], [1.0, 1.0, -1.0, 1.0, -1.0]),
    "critic": SignedPermutation([0, 2, 1, 3], [1.0, -1.0, -1.0, 1.0]),
    "actions": SignedPermutation([1, 0, 2], [-1.0, -1.0, 1.0]),
}


def image(name: str, x: Tensor) -> Tensor:
    if name == "camera":
        return torch.stack([*reversed(x.unbind(dim=-2))], dim=-2)
    index, signs, _ = MAPS[name]
    return x[..., index] * torch.tensor(signs)


def learner(
    augment: bool,
    mirror_loss: float,
    *,
    critic: bool = False,
    images: bool = False,
    device: str = "cpu",
    **changes: Any,
) -> Learner:
    sizes = {"policy": 5, "critic": 4} if critic else {"policy": 5}
    settings = {"minibatch_size": 32, "epochs": 2, "symmetry": {"augment": augment, "mirror_loss": mirror_loss}}
    net = changes.pop("network", {})
    env = RandomEnv(8, sizes, device=device, images={"camera": (13, 16, 1)} if images else None)
    more = {"mirrored": lambda: (MAPS, 0.01), "images": env.images}
    return Learner(env, ppo_config(net, **settings, **changes), device=device, more=more)


@pytest.mark.parametrize(
    ("augment", "mirror_loss", "critic", "images", "state_dependent_std"),
    [(True, 0.0, False, False, False), (False, 0.7, True, False, True), (True, 0.7, True, True, False)],
)
def test_symmetry_losses_and_gradients_equal_definition(augment, mirror_loss, critic, images, state_dependent_std):
    network = {"state_dependent_std": state_dependent_std}
    it = learner(augment, mirror_loss, critic=critic, images=images, network=network, bounds_coef=0.1)
    it.train(2)  # observation statistics have changed and are not symmetric
    it.collect()
    ppo, policy, rollout = it.ppo, it.policy, it.rollout
    _, batch, _ = prepared(ppo)
    index = torch.randperm(64)[:32]
    chunk = batch.select(index)
    got = ppo._loss(chunk.inputs, chunk.packed, chunk.hidden, chunk.is_first)
    old = Samples.unpack(chunk.packed, 3, policy.head.num_parameters)
    raw = {group: value.flatten(0, 1)[index] for group, value in rollout.obs.items()}
    batches = [raw, {group: image(group, value) for group, value in raw.items()}]  # raw, then normalised
    weight, samples, means = old.weight[0], [], []
    for obs, action in zip(batches, (old.action[0], image("actions", old.action[0])), strict=True):
        now = policy.evaluate({group: x[None] for group, x in policy.normalize(obs).items()}, action[None])
        means.append(now.distribution.mean[0])
        samples.append({name: x[0] for name, x in ppo.sample_losses(old, now).items()})
    both = samples if augment else samples[:1]
    expected = {}
    for name in ("loss/policy", "loss/value", "loss/bounds"):  # means over samples and their images
        expected[name] = torch.stack([(x[name] * weight).sum() for x in both]).mean()
    for name in ("policy/entropy", "policy/kl", "policy/clip_fraction"):  # originals only
        expected[name] = (samples[0][name] * weight).sum()
    distance = (means[1] - image("actions", means[0]).detach()).square().mean(dim=-1)
    expected["loss/symmetry"] = (distance * weight).sum()
    torch.testing.assert_close(dict(zip(ppo.losses, got, strict=True)), expected)

    cfg = ppo.cfg
    total = expected["loss/policy"] + 0.5 * cfg.value_coef * expected["loss/value"]
    total = total + 0.1 * expected["loss/bounds"] + mirror_loss * expected["loss/symmetry"]
    parameters = ppo.steps.optimizer.parameters
    wanted = torch.autograd.grad(total, parameters, allow_unused=True, materialize_grads=True)
    gradients = torch.autograd.grad(got, parameters, ppo._coefficients)
    torch.testing.assert_close(gradients, wanted)


def asymmetry(it: Learner, x: Tensor) -> float:
    act = it.policy.act_without_critic
    with torch.no_grad():
        mean, image_mean = (act({"policy": seen}, ())[0] for seen in (x, image("policy", x)))
    return float((image_mean - image("actions", mean)).square().mean() / mean.square().mean())


def test_policy_becomes_symmetric():
    x = 3.0 + 2.0 * torch.randn(64, 5, generator=torch.Generator().manual_seed(1))
    found = {}
    for name, settings in {"augment": (True, 0.0), "mirror loss": (False, 5.0), "without": (False, 1e-30)}.items():
        it = learner(*settings, horizon=16, learning_rate=3e-3, schedule="constant")
        for _ in range(20):
            it.collect()
            it.rollout.reward.copy_(-(it.rollout.action - 0.3).square().sum(dim=-1))  # an asymmetric task
            it.update()
        found[name] = asymmetry(it, x)
    assert max(found["augment"], found["mirror loss"]) < 0.5 * found["without"], found


def test_inputs_are_mirrored_before_normalization():
    it = learner(True, 0.0)
    it.train(3)
    it.collect()
    inputs = prepared(it.ppo)[1].inputs
    seen, raw = it.policy.obs_norm["policy"], it.rollout.obs["policy"].flatten(0, 1)[None]
    torch.testing.assert_close(inputs[f"{IMAGE}policy"], seen(image("policy", raw)))
    assert not torch.allclose(inputs[f"{IMAGE}policy"], image("policy", seen(raw)), atol=1e-2)


def test_mirrored_camera_images_stay_uint8():
    it = learner(True, 0.5, critic=True, images=True)
    it.policy.reduced = torch.bfloat16
    it.collect()
    _, batch, _ = prepared(it.ppo)
    before = {name: x.clone() for name, x in batch.inputs.items()}
    assert before["camera"].dtype == before[f"{IMAGE}camera"].dtype == torch.uint8
    assert before[f"{IMAGE}policy"].dtype == torch.float32
    assert torch.equal(before[f"{IMAGE}camera"], image("camera", before["camera"]))
    it.update()
    assert torch.equal(batch.inputs[f"{IMAGE}camera"], before[f"{IMAGE}camera"])


def test_observation_statistics_exclude_mirrored_samples():
    one, two = learner(True, 0.5), learner(False, 0.0)
    for it in (one, two):
        it.collect()
        it.update()
    assert torch.equal(one.policy.obs_norm["policy"].mean, two.policy.obs_norm["policy"].mean)


def test_unsupported_symmetry_is_rejected_with_a_fix():
    def error_message(more: dict[str, Any], **changes: Any) -> str:
        with pytest.raises(ConfigError) as info:
            symmetry = {"augment": True, "mirror_loss": 0.0}
            Learner(RandomEnv(8), ppo_config(changes, symmetry=symmetry), more=more)
        assert str(info.value).endswith("Try ppo.symmetry.augment=false ppo.symmetry.mirror_loss=0")
        return str(info.value)

    def no_mirror_image() -> Any:
        raise TaskError("'arm' has no mirror image")

    assert "network.rnn=gru" in error_message({}, rnn="gru")
    assert "ppo.symmetry: 'arm'" in error_message({"mirrored": no_mirror_image})
    assert "these envs" in error_message({})
    sees = {"images": {"camera": (13, 16, 1)}}
    assert "network.encoder.frames=3" in error_message(sees, encoder={"frames": 3})


def test_symmetry_is_described(tmp_path):
    symmetry = {"ppo": {"symmetry": {"augment": True, "mirror_loss": 0.5}}}
    line = make_trainer("Anymal", tmp_path, **symmetry).algorithm.describe()["symmetry"]
    assert "mirror loss 0.5" in line
    assert "symmetry" not in make_trainer("Anymal", tmp_path).algorithm.describe()


def test_mirror_image_adds_cross_terms():
    swap = SignedPermutation([1, 0, 2], [1.0, 1.0, -1.0], [(0, 2, 0.5), (1, 0, -2.0)])
    symmetry = Symmetry(SymmetryConfig(augment=True, mirror_loss=0.0), {"policy": swap}, 0.0, torch.device("cpu"))
    values = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    assert symmetry.image("policy", values).tolist() == [[3.5, -1.0, -3.0], [8.0, -4.0, -6.0]]
