"""Off-policy algorithms on images: frames, encoder training, memory, resume, learning."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from gpusim_rl.api import prepare
from gpusim_rl.env import VecEnv
from gpusim_rl.errors import ConfigError
from gpusim_rl.learn.algorithm import EnvSpec, load_algorithm_class, make_policy
from gpusim_rl.learn.choose_replay import make_replay
from gpusim_rl.learn.encoders import random_shift
from gpusim_rl.learn.pixel_replay import PixelReplay
from gpusim_rl.learn.remote import remote_of
from gpusim_rl.learn.replay import Trajectory
from gpusim_rl.run.devices import choose_devices
from gpusim_rl.settings.schema import ALGORITHMS
from gpusim_rl.spaces import Box
from gpusim_rl.testing.conformance import differences
from helpers.fakes import RandomEnv
from helpers.off_policy import NAMES, OffPolicyLearner, off_policy_config
from helpers.painted import Painted
from helpers.raised import raises

CPU = torch.device("cpu")
SHAPES = {"camera": (12, 16, 2)}
IMAGES_ONLY, WITH_NUMBERS, NUMERIC_CRITIC = {"policy": 0}, {"policy": 3}, {"policy": 2, "critic": 4}
needs_lz4 = pytest.mark.skipif(importlib.util.find_spec("lz4") is None, reason="pip install lz4")
KINDS: dict[str, dict[str, Any]] = {
    "one frame": {"replay": {"storage": "fp16"}},
    "frames": {"network": {"encoder": {"frames": 3}}, "n_step": 3},
    "on the host": {"network": {"encoder": {"frames": 2}}, "replay": {"device": "cpu"}},
    "compressed": {"network": {"encoder": {"frames": 2}}, "replay": {"device": "cpu", "compress": True}},
}


def learner(name: str, kind: str = "frames", sizes: dict[str, int] = WITH_NUMBERS, **more: Any) -> OffPolicyLearner:
    final, shapes = more.pop("final_images", False), more.pop("shapes", SHAPES)
    env = RandomEnv(4, sizes, images=shapes)
    return OffPolicyLearner(name, env, {**KINDS[kind], **more}, final_images=final)


@pytest.mark.parametrize("pixels", [0, 1, 4])
def test_random_shift_is_a_crop_of_the_padded_image(pixels: int) -> None:
    images = torch.randint(256, (1500, 5, 7, 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    shifted = random_shift(images, pixels, torch.Generator().manual_seed(1))
    padded = functional.pad(images.movedim(3, 1).float(), (pixels,) * 4, mode="replicate").movedim(1, 3).to(torch.uint8)
    offsets = [(y, x) for y in range(2 * pixels + 1) for x in range(2 * pixels + 1)]
    crops = torch.stack([padded[:, y : y + 5, x : x + 7] for y, x in offsets])
    equal = (crops == shifted).flatten(2).all(dim=2)
    assert equal.any(dim=0).all(), "not a crop"
    assert equal.any(dim=1).all(), "a crop never occurs"


@pytest.mark.parametrize("name", NAMES)
def test_update_holds_images_of_one_batch_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    it = learner(name, sizes=NUMERIC_CRITIC)
    draw, drawn = it.algorithm._draw, []
    monkeypatch.setattr(it.algorithm, "_draw", lambda number: drawn.extend(draw(number)) or drawn)
    it.train(1)
    assert len(drawn) > 1
    assert all("camera" not in obs for batch in drawn for obs in (batch.obs, batch.next_obs))
    assert all(target.grad_fn is None for target in it.algorithm._targets)  # else the graph grows with every update


@pytest.mark.parametrize("final_images", [False, True])
def test_replay_returns_the_frames_acted_on(final_images: bool) -> None:
    it = learner("sac", final_images=final_images, shapes={"left": (12, 13, 1), "right": (11, 14, 2)})
    algorithm, seen = it.algorithm, []
    encoder: Any = algorithm.policy.encoder
    hook = encoder.register_forward_pre_hook(lambda _, args: seen.append({g: x[0] for g, x in args[0].items()}))
    for _ in range(9):
        it.collect()
        it.algorithm.update = lambda: {}  # type: ignore[method-assign]
    hook.remove()
    replay: Any = algorithm.replay
    drawn = replay.sample(300, torch.Generator().manual_seed(0))
    replay.with_frames(drawn)
    time, env = drawn.index // 4, drawn.index % 4
    assert drawn.weight.sum() > 100
    for group in ("left", "right"):
        acted = torch.stack([stacks[group] for stacks in seen])
        assert torch.equal(drawn.obs[group], acted[time, env])
        plain = (drawn.discount - algorithm.cfg.gamma**3).abs() < 1e-6  # within an episode
        plain &= (drawn.weight > 0.0) & (replay.ends.take(drawn.index + 2 * 4) == 0)
        assert plain.sum() > 10
        assert torch.equal(drawn.next_obs[group][plain], acted[(time + 3)[plain], env[plain]])


@pytest.mark.parametrize("name", NAMES)
def test_standalone_policy_acts_like_the_algorithm(name: str) -> None:
    it = learner(name)
    it.train(3)
    run = dataclasses.replace(prepare("Cartpole", algo=name).cfg, algorithm=it.algorithm.cfg)
    policy = make_policy(load_algorithm_class(ALGORITHMS[name][0]), run, it.env.obs_sizes, Box(3), CPU, SHAPES)
    policy.load_state_dict(it.algorithm.policy.state_dict())
    hidden = policy.initial_state(4)
    it.algorithm.begin_episodes()
    it.algorithm.begin_rollout()
    for _ in range(4):
        it.algorithm.noise.now.fill_(-1.0 if name == "dqn" else 0.0)  # no random actions
        action, step = it.algorithm.act(it.obs), it.env.step(torch.zeros(4, 3))
        expected, hidden = policy.act(it.obs, hidden)
        torch.testing.assert_close(action, expected)
        it.algorithm.record(action, step)
        hidden = tuple(frames.masked_fill(step.done[None, :, None], 0) for frames in hidden)
        it.obs = step.obs


def changed_by(it: OffPolicyLearner, part: Any) -> set[str]:
    """Return the names of the networks that `part` changes."""
    before = {name: p.detach().clone() for name, p in it.algorithm.policy.named_parameters()}
    part()
    after = dict(it.algorithm.policy.named_parameters())
    return {name.split(".")[0] for name, old in before.items() if not torch.equal(old, after[name])}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sizes", [WITH_NUMBERS, NUMERIC_CRITIC], ids=["images", "numeric critic"])
def test_encoder_is_trained_by_the_network_that_sees_images(name: str, sizes: dict[str, int]) -> None:
    it = learner(name, sizes=sizes)
    it.train(2)
    it.collect()
    algorithm, limit = it.algorithm, torch.tensor(torch.inf)
    (batch,) = algorithm._draw(1)
    algorithm._look(batch, moves_actor=algorithm.actor_optimizer is not None)
    sees = algorithm.policy.critic_sees_images
    assert sees == (sizes == WITH_NUMBERS or name == "dqn")
    assert changed_by(it, lambda: algorithm._critic_step(batch, limit)) == {"critic", *(["encoder"] if sees else [])}
    if algorithm.actor_optimizer is not None:
        expected = {"actor", *([] if sees else ["encoder"])}
        assert changed_by(it, lambda: algorithm._actor_step(batch, limit)) == expected


def plain_updates(it: OffPolicyLearner, batches: list[Any]) -> list[Tensor]:
    """Return parameters after SAC's updates with autograd losses and plain Adam."""
    policy, cfg = copy.deepcopy(it.algorithm.policy), it.algorithm.cfg
    encoder, actor, critic, sees = policy.encoder, policy.actor, policy.critic, policy.critic_sees_images
    assert encoder is not None and actor is not None
    alpha, full = it.algorithm.log_alpha.detach().exp(), {"reduced": None}  # type: ignore[attr-defined]
    trained = [*critic.parameters(), *(encoder.parameters() if sees else [])]
    critic_adam = torch.optim.Adam(trained, cfg.learning_rate)
    trained = [*actor.parameters(), *([] if sees else encoder.parameters())]
    actor_adam = torch.optim.Adam(trained, cfg.learning_rate)

    def descend(adam: torch.optim.Adam, loss: Tensor) -> None:
        policy.zero_grad()
        loss.backward()
        adam.step()

    def inputs(groups: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        features = torch.cat([groups["policy"], encoder(groups, **full)], dim=1)
        return features, features if sees else groups["critic"]

    for index, batch in enumerate(batches):
        it.algorithm.replay.with_frames(batch)
        with torch.no_grad():
            to_actor, to_critic = inputs(batch.next_obs)
            action, log_prob = policy.distribution(actor(to_actor, **full)).sample_with_log_prob(batch.noise[0])
            value = policy.target_critic(to_critic, action, **full).squeeze(2).amin(dim=0) - alpha * log_prob
            y = batch.reward + batch.discount * value
        to_actor, to_critic = inputs(batch.obs)  # before the critics' step
        q = critic(to_critic, batch.action, **full).squeeze(2)
        descend(critic_adam, ((q - y).square() @ batch.weight).sum())
        if (index + 1) % cfg.policy_delay == 0:
            to_critic = to_critic.detach()
            to_actor = to_actor.detach() if sees else inputs(batch.obs)[0]
            action, log_prob = policy.distribution(actor(to_actor, **full)).sample_with_log_prob(batch.noise[1])
            q = critic(to_critic, action, **full).squeeze(2).amin(dim=0)
            descend(actor_adam, (alpha * log_prob - q) @ batch.weight)
        with torch.no_grad():
            for slow, fast in zip(policy.target_critic.parameters(), critic.parameters(), strict=True):
                slow.lerp_(fast, cfg.tau)
    return list(policy.parameters())


@pytest.mark.parametrize("sizes", [WITH_NUMBERS, NUMERIC_CRITIC], ids=["images", "numeric critic"])
def test_updates_equal_plain_reference(sizes: dict[str, int]) -> None:
    encoder = {"frames": 3, "shift": 0, "kind": "impala"}  # Adam turns tiny gradients into steps of rounding errors
    it = learner("sac", sizes=sizes, learn_alpha=False, n_step=2, updates=2, network={"encoder": encoder})
    for _ in range(4):
        it.collect()
    batches = it.algorithm._draw(8)
    assert any((batch.weight == 0.0).any() for batch in batches), "no sample has zero weight"
    expected = plain_updates(it, copy.deepcopy(batches))
    it.algorithm._draw = lambda number: batches[:number]  # type: ignore[method-assign]
    it.algorithm.update()
    for found, plain in zip(it.algorithm.policy.parameters(), expected, strict=True):
        torch.testing.assert_close(found, plain, atol=2e-5, rtol=1e-4)


@needs_lz4
def test_compressed_frames_train_identically() -> None:
    plain, packed = (learner("sac", kind) for kind in ("on the host", "compressed"))
    a, b = (it.train(5)[-1] for it in (plain, packed))
    assert differences(a, b) == []


def test_banner_reports_replay_memory() -> None:
    it = learner("sac", "one frame")
    replay, lines = it.algorithm.replay, it.algorithm.describe()
    assert isinstance(replay, PixelReplay)
    frames: Any = replay.frames["camera"]
    memory = *replay.obs.values(), replay.action, replay.reward, replay.ends, replay._final_step, frames._memory
    size = sum(x.nbytes for x in memory)
    assert size == replay.expected_bytes
    kilobytes = size / 400 / 1e3
    assert f"replay of 100 x 4, {size / 1e9:.3g} GB ({kilobytes:.3g} kB per trans" in lines["batch"]
    assert "spatial (frames: 1)" in lines["network"]
    on_host = learner("sac", "on the host").algorithm.describe()["batch"]
    assert "host" in on_host and "prefetched" in on_host


@needs_lz4
def test_banner_estimates_memory_of_compressed_frames() -> None:
    assert "LZ4" in learner("sac", "compressed").algorithm.describe()["batch"]


def test_unsupported_image_settings_are_rejected() -> None:
    with raises(ConfigError, key="sac.replay.compress=true", hint="Try sac.replay.device=cpu"):
        learner("sac", replay={"compress": True})
    with raises(ConfigError, key="sac.replay.compress=true", hint="Try sac.replay.compress=false"):
        OffPolicyLearner("sac", RandomEnv(4), {"replay": {"compress": True}})
    with raises(ConfigError, key="sac.replay.capacity", got=20, hint="Try sac.replay.capacity=24"):
        learner("sac", replay={"capacity": 20})  # windows of 3 steps, stacks of 3 frames
    with raises(ConfigError, key="sac.demonstrations.file"):
        learner("sac", demonstrations={"file": "x.pt"})
    with raises(ConfigError, key="sac.network.encoder.kind=nature"):
        learner("sac", network={"encoder": {"kind": "nature"}})
    it = learner("sac")
    with pytest.raises(ConfigError, match=r"^algo=sac: .* Try actors=none, or"):
        remote_of(it.algorithm)


def test_replay_larger_than_memory_is_rejected() -> None:
    cfg = off_policy_config("sac", {"replay": {"capacity": 100_000_000}})
    spec = EnvSpec(64, {"policy": 0}, Box(1), 500, images={"camera": (84, 84, 3)})
    rollout = Trajectory.empty(1, spec, ["camera", "policy"], torch.device("meta"))
    with pytest.raises(ConfigError, match=r"4\.\d+e\+03 GB .* cpu"):
        make_replay(cfg, spec, rollout, "sac", device=CPU, seed=0, drawn=1)
    memory = {"capacity": 16, "save": False, "device": "cpu"}
    cfg = off_policy_config("sac", {"replay": memory, "network": {"encoder": {"frames": 8}}})
    spec = EnvSpec(1, {"policy": 0}, Box(1), 500, images={"camera": (6000, 6000, 3)})
    with pytest.raises(ConfigError, match=r"221 GB .* Try sac\.batch_size=\d+"):
        make_replay(cfg, spec, rollout, "sac", device=CPU, seed=0, drawn=64)


class GroupFilter:
    """Envs restricted to some observation groups; records the lengths of finished episodes."""

    def __init__(self, env: VecEnv, groups: set[str]) -> None:
        self._env, self._groups, self.num_envs, self.num_actions = env, groups, env.num_envs, 1
        self.lengths: list[float] = []
        self._steps = torch.zeros(env.num_envs)
        self.reset()
        self.images = dict(env.images)
        self.obs_sizes = {group: size for group, size in env.obs_sizes.items() if group in groups}

    def _filtered(self, obs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {group: value.clone() for group, value in obs.items() if group in self._groups}

    def reset(self) -> dict[str, Tensor]:
        return self._filtered(self._env.reset())

    def step(self, action: Tensor) -> Any:
        step = self._env.step(action)
        self._steps += 1
        self.lengths += self._steps[step.done].tolist()
        self._steps *= ~step.done
        return dataclasses.replace(step, obs=self._filtered(step.obs), final_obs=self._filtered(step.final_obs))


@pytest.mark.slow
@pytest.mark.parametrize("groups", [set(), {"critic"}], ids=["images", "numeric critic"])
def test_sac_balances_cartpole_from_images(groups: set[str]) -> None:
    spec = prepare("Cartpole", num_envs=16, device="cpu")
    choice = choose_devices(spec.cfg)[1]
    envs = VecEnv.make(Painted, spec.cfg.task, num_envs=16, choice=choice, sim=spec.cfg.sim, seed=0)
    env = GroupFilter(envs, {"policy", "camera"} | groups)
    network = {"hidden": [64, 64], "critic_hidden": [64, 64], "encoder": {"frames": 2, "shift": 2}}
    changes = {"horizon": 8, "batch_size": 64, "learning_starts": 1000, "learning_rate": 1e-3, "reward_scale": 0.1}
    changes |= {"network": network, "replay": {"capacity": 40_000}}
    it = OffPolicyLearner("sac", env, changes, final_images=not groups)  # the envs render them
    it.train(250)
    begun, learned = (sum(lengths) / len(lengths) for lengths in (env.lengths[:100], env.lengths[-32:]))
    assert begun < 25.0
    assert learned > 60.0, "expected about 125 of 500 steps; a random policy lasts 15"
