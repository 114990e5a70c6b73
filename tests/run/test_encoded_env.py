"""Tests of pretrained encoders: frozen features in place of images, and weights to continue training from."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gpusim_rl.tasks.cartpole_camera import CartpoleCamera
from torch import Tensor

from gpusim_rl.api import prepare
from gpusim_rl.distributed.actors import make_trainer
from gpusim_rl.env.encoded_env import EncodedEnv
from gpusim_rl.env.environment import Environment, Observation, Step
from gpusim_rl.errors import ConfigError
from gpusim_rl.learn.pretrained import load_frozen, save_pretrained
from gpusim_rl.learn.vae import VAE
from gpusim_rl.run import checkpoint
from gpusim_rl.run.eval_process import Evaluation
from gpusim_rl.run.evaluation import evaluate_run
from gpusim_rl.run.trainer import Trainer
from gpusim_rl.spaces import Box
from gpusim_rl.view.player import Player
from gpusim_rl.view.video import seen
from helpers.fake_cuda_graph import differences_of_replays
from helpers.raised import raises
from helpers.training import assert_same_run, final_state, merged, shake, the_run

SIZE = (12, 16)
SHAPE = (*SIZE, 3)
LATENTS = 5


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_encoder(tmp_path / "camera.pt")


def write_encoder(path: Path, kind: str = "spatial", shape: tuple[int, int, int] = SHAPE, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    vae = VAE(shape, kind, LATENTS)
    vae.begin(torch.randint(256, (32, *shape), dtype=torch.uint8))
    save_pretrained(path, {"camera": vae}, kind, LATENTS, {"task": "CartpoleCamera"})
    return path


def trainer(file: Path, folder: Path, /, **more: Any) -> Trainer:
    encoder = {"init_from": str(file), "freeze": True, "frames": 2}
    task = {"height": SIZE[0], "width": SIZE[1], "episode_length": 9}
    settings: dict[str, Any] = {"num_envs": 8, "max_iterations": 2, "sim": "mujoco", "device": "cpu"}
    settings |= {"pretrained": encoder, "task": task}
    settings["log"] = {"console": "quiet", "dir": str(folder)}
    if "algo" not in more:
        settings["ppo"] = {"horizon": 6, "minibatch_size": 24}
    return make_trainer(prepare("CartpoleCamera", **merged(settings, more)))


def test_policy_observes_features_of_newest_frames(file, tmp_path):
    env = trainer(file, tmp_path).env
    assert isinstance(env, EncodedEnv)
    assert env.images == {} and env.obs_sizes == {"policy": 2 * LATENTS, "critic": 4}
    encoder = load_frozen(str(file), {"camera": SHAPE}, torch.device("cpu"))
    inside: list[Step] = []
    step_inside = env.env.step

    def recording_step(action: Tensor) -> Step:
        step = step_inside(action)
        step.obs, step.final_obs = dict(step.obs), dict(step.final_obs)
        inside.append(step)
        return Step(*(getattr(step, field) for field in step.__slots__))

    env.env.step = recording_step  # type: ignore[method-assign]
    first = env.env.reset()
    newest, before = encoder(first), torch.zeros(8, LATENTS)
    torch.testing.assert_close(env._begin(first)["policy"], torch.cat([before, newest], dim=1))
    ended = 0
    for _ in range(20):
        step = env.step(torch.rand(8, 1) * 2 - 1)
        seen, done = inside[-1], step.done[:, None]
        features = encoder(seen.obs)
        stale = torch.cat([before, newest], dim=1)
        expected = torch.where(done, stale, torch.cat([newest, features], dim=1))
        torch.testing.assert_close(step.final_obs["policy"], expected)
        before, newest = newest.masked_fill(done, 0.0), features
        torch.testing.assert_close(step.obs["policy"], torch.cat([before, newest], dim=1))
        assert torch.equal(step.obs["critic"], seen.obs["critic"])
        assert set(step.obs) == set(step.final_obs) == {"policy", "critic"}
        ended += int(step.done.sum())
    assert ended > 8
    env.close()


def test_encoded_run_stores_no_images_and_resumes(file, tmp_path):
    trainer(file, tmp_path / "whole", max_iterations=4).train()
    trainer(file, tmp_path / "parts", max_iterations=2).train()
    run = the_run(tmp_path / "parts")
    file.unlink()  # the run has a copy
    make_trainer(prepare("CartpoleCamera", checkpoint=str(run), max_iterations=4)).train()
    assert_same_run(tmp_path / "whole", tmp_path / "parts", "/config")
    state = final_state(tmp_path / "parts")
    assert state["images"] == {} and state["obs_sizes"]["policy"] == 2 * LATENTS
    assert not any("encoder" in name for name in state["policy"])


def test_trained_policy_is_evaluated_and_played(file, tmp_path):
    trained = trainer(file, tmp_path)
    trained.train()
    run = the_run(tmp_path)
    assert evaluate_run(prepare("CartpoleCamera", checkpoint=str(run), test=True))["episodes"] == 8
    player = Player.open(str(run), num_envs=3)
    assert player.env.images == {"camera": SHAPE} and player.obs["policy"].shape == (3, 2 * LATENTS)
    encoder = load_frozen(str(file), {"camera": SHAPE}, torch.device("cpu"))
    for _ in range(2):
        player.step()
        torch.testing.assert_close(encoder(player.images), player.obs["policy"][:, LATENTS:])
        assert all((a == b.numpy()).all() for a, b in zip(seen(player), player.images["camera"], strict=True))
    player.restart()
    torch.testing.assert_close(encoder(player.images), player.obs["policy"][:, LATENTS:])
    player.close()
    state = checkpoint.load(run / "checkpoints" / "last.pt")
    assert "eval/return" in Evaluation(state["config"])(state)


class CameraAndNumbers(CartpoleCamera):
    """CartpoleCamera whose policy observes numbers in addition to the image."""

    def observe(self) -> dict[str, Any]:
        observed = super().observe()
        state: Any = observed["critic"]
        return {**observed, "policy": {"cart_pos": 100.0 * state["cart_pos"], "cart_vel": state["cart_vel"]}}


@pytest.mark.parametrize(("algo", "frames", "numbers"), [("sac", 1, True), ("gru", 3, False)])
def test_exported_policy_takes_images_and_acts_identically(algo, frames, numbers, file, tmp_path, monkeypatch):
    onnxruntime = pytest.importorskip("onnxruntime")
    from gpusim_rl.export import files

    more: dict[str, Any] = {"pretrained": {"frames": frames}}
    if algo == "sac":
        more |= {"algo": "sac", "sac": {"horizon": 6, "learning_starts": 32, "batch_size": 16}}
    elif algo == "gru":
        more["ppo"] = {"sequence_length": 3, "network": {"rnn": "gru", "rnn_size": 8}}
    if numbers:
        more["task"] = {"_target_": f"{__name__}.CameraAndNumbers"}
    trainer(file, tmp_path, **more).train()
    run = the_run(tmp_path)
    shake(run / "checkpoints" / "last.pt")
    monkeypatch.setattr(files.parity, "CALLS", 10)
    folder, card = files.write_all(str(run), None, int8=False, trust=True)
    assert card["observation"]["size"] == 2 * numbers and card["observation"]["images"] == {"camera": [*SHAPE]}
    session = onnxruntime.InferenceSession(folder / card["files"]["onnx"])
    states = {row["input"]: [5 if n == "batch" else n for n in row["shape"]] for row in card["recurrent_state"]}
    assert len(states) == (frames > 1) + (algo == "gru")
    assert frames == 1 or states["state_0"] == [frames - 1, 5, LATENTS]
    player, ended, acted = Player.open(str(run), num_envs=5, trust=True), 0, []
    given, step_observed = list[Tensor](), player.observed.step
    monkeypatch.setattr(player.observed, "step", lambda action: given.append(action) or step_observed(action))
    state = {name: np.zeros(shape, np.float32) for name, shape in states.items()}
    for _ in range(14):
        own = player.obs["policy"][:, : 2 * numbers].numpy()
        action, _, *following = session.run(None, {"obs": own, "camera": player.images["camera"].numpy(), **state})
        step = player.step()
        np.testing.assert_allclose(action, given[-1].clamp(-1.0, 1.0).numpy(), rtol=1e-4, atol=1e-4)
        keep = ~step.done.numpy()[None, :, None]
        state = {name: value * keep for name, value in zip(state, following, strict=True)}
        ended += int(step.done.sum())
        acted.append(action)
    player.close()
    assert ended >= 5 and np.std(acted) > 0.01


def test_changed_encoder_weights_are_rejected(file, tmp_path):
    trainer(file, tmp_path).train()
    run = the_run(tmp_path)
    write_encoder(run / "encoder.pt", seed=1)
    with raises(ConfigError, key="pretrained.init_from"):
        Player.open(str(run))


def test_graph_replay_equals_eager_run(file, tmp_path):
    warp = {"sim": {"name": "mjwarp", "num_threads": 1}, "max_iterations": 6}
    assert differences_of_replays(lambda folder: trainer(file, folder, **warp), "rollout", tmp_path) == []


class Counting(Environment):
    """Third-party envs with final observations; every pixel shows the step, episodes end at step 3."""

    def __init__(self) -> None:
        self.num_envs, self.device, self.num_actions = 2, torch.device("cpu"), 1
        self.obs_sizes, self.images, self.action_space = {"policy": 1}, {"camera": SHAPE}, Box(1)
        self.max_episode_length = self.steps_between_truncations = 3
        self.summary, self._step = "", torch.tensor([0, 1])

    def _obs(self) -> Observation:
        shown = (20 * self._step)[:, None, None, None].expand(-1, *SHAPE).to(torch.uint8)
        return {"policy": self._step[:, None].float(), "camera": shown}

    def reset(self) -> Observation:
        return self._obs()

    def step(self, action: Tensor) -> Step:
        self._step = self._step + 1
        final_obs, done = self._obs(), self._step == 3
        self._step = self._step.masked_fill(done, 0)
        no, reward = torch.zeros(2, dtype=torch.bool), torch.zeros(2)
        return Step(self._obs(), final_obs, reward, {}, {}, no, done, no, no, done, no)

    def close(self) -> None:
        pass


class Brightness:
    out_size, digest, words = 1, "", "its brightness"

    def __call__(self, images: dict[str, Tensor]) -> Tensor:
        return images["camera"].float().mean(dim=(1, 2, 3))[:, None] / 20.0


def test_final_frame_of_an_episode_is_encoded():
    env = EncodedEnv(Counting(), lambda images: Brightness(), frames=2)
    assert env.reset()["policy"].tolist() == [[0, 0, 0], [1, 0, 1]]  # one number, then features of two frames
    for expected, final in (
        ([[1, 0, 1], [2, 1, 2]], [[1, 0, 1], [2, 1, 2]]),
        ([[2, 1, 2], [0, 0, 0]], [[2, 1, 2], [3, 2, 3]]),
        ([[0, 0, 0], [1, 0, 1]], [[3, 2, 3], [1, 0, 1]]),
    ):
        step = env.step(torch.zeros(2, 1))
        assert step.obs["policy"].tolist() == expected
        assert step.final_obs["policy"].tolist() == final


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"init_from": None}, r"^pretrained\.freeze=true: .*gpusim-rl pretrain-encoder"),
        ({"init_from": "efficientnet", "freeze": False, "frames": 1}, r"init_from=efficientnet: "),
        ({"freeze": False}, r"^pretrained\.frames: .* ppo.network.encoder.frames=\d"),
        ({"init_from": "nowhere.pt"}, r"pretrained\.init_from=nowhere\.pt: no such file"),
        ({"init_from": __file__}, r"^pretrained.init_from=.*test_encoded_env\.py: damaged"),
    ],
)
def test_invalid_encoder_settings_are_rejected(settings, message, file, tmp_path):
    with pytest.raises(ConfigError, match=message):
        trainer(file, tmp_path, pretrained=settings)


def test_images_of_wrong_size_or_missing_images_are_rejected(file, tmp_path):
    with pytest.raises(ConfigError, match=r"shape is \[12, 16, 3\] .* 'camera' has \[14, 16, 3\]"):
        trainer(file, tmp_path, task={"height": 14})
    with pytest.raises(ConfigError, match=r"camera\.pt: .*no images"):
        make_trainer(prepare("Cartpole", pretrained={"init_from": str(file), "freeze": True}, num_envs=2))
    with pytest.raises(ConfigError, match="'eye', only for camera"):
        load_frozen(str(file), {"eye": SHAPE}, torch.device("cpu"))


def test_policy_starts_with_pretrained_weights(file, tmp_path):
    trainable = {"freeze": False, "frames": 1}
    saved = checkpoint.load(file)["groups"]["camera"]["encoder"]
    for frames in (1, 3):
        it = trainer(file, tmp_path, pretrained=trainable, ppo={"network": {"encoder": {"frames": frames}}})
        network = it.algorithm.policy.encoder.networks["camera"]
        weights = network.state_dict()
        first = next(iter(weights))
        assert torch.equal(weights.pop(first)[:, -3:], saved[first])  # newest frame
        assert all(torch.equal(value, saved[name]) for name, value in weights.items())
        with torch.no_grad():  # older frames have no effect at first
            stacks = torch.rand(4, 3 * frames, *SIZE)
            other = stacks.clone()
            other[:, : 3 * frames - 3] = 0.0
            assert torch.equal(network(stacks), network(other))
    it.train()
    assert not torch.equal(network.state_dict()[first][:, :3], torch.zeros_like(saved[first]))  # but learn
    run = the_run(tmp_path)
    file.unlink()
    assert make_trainer(prepare("CartpoleCamera", checkpoint=str(run), max_iterations=3)).iteration == 2
    with pytest.raises(ConfigError, match=r"nature, .* spatial.* ppo.network"):
        trainer(write_encoder(file, "nature", (36, 36, 3)), tmp_path, pretrained=trainable)
    with pytest.raises(ConfigError, match="algo=ppo has no image encoder"):
        make_trainer(prepare("Cartpole", pretrained={"init_from": str(file)}, num_envs=2))


@pytest.mark.slow
def test_imagenet_features_beat_random_weights():
    pytest.importorskip("efficientnet_lite_pytorch")
    images = torch.full((64, 32, 32, 3), 180, dtype=torch.uint8)  # a bar at random angles
    angles = torch.linspace(0.0, 3.1, 64)
    y, x = torch.meshgrid(torch.linspace(1, -1, 32), torch.linspace(-1, 1, 32), indexing="ij")
    distance = (x * angles.sin()[:, None, None] - y * angles.cos()[:, None, None]).abs()
    images[distance < 0.1] = torch.tensor([200, 80, 40], dtype=torch.uint8)
    encoder = load_frozen("efficientnet", {"camera": (32, 32, 3)}, torch.device("cpu"))
    assert encoder.out_size == 1280
    targets = torch.stack([(2 * angles).cos(), (2 * angles).sin()], dim=1)

    def error() -> float:
        features = encoder({"camera": images})
        features = (features - features.mean(dim=0)) / (features.std(dim=0) + 1e-6)
        fit, test = features[::2], features[1::2]
        gram = fit @ fit.T + 10.0 * torch.eye(len(fit))
        return float((test @ fit.T @ torch.linalg.solve(gram, targets[::2]) - targets[1::2]).square().mean())

    learned = error()
    torch.manual_seed(0)
    for module in encoder.modules():
        if isinstance(module, (torch.nn.Conv2d, torch.nn.BatchNorm2d)):
            module.reset_parameters()
    assert learned < 0.15 and learned < 0.5 * error()


def test_resnet18_without_weights_names_their_path(monkeypatch, tmp_path):
    pytest.importorskip("torchvision")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=r"resnet18: weights not found: no .*resnet18-\w+\.pth"):
        load_frozen("resnet18", {"camera": SHAPE}, torch.device("cpu"))


@pytest.mark.parametrize("name", ["efficientnet", "resnet18"])
def test_missing_package_is_rejected(name, monkeypatch):
    for module in ("efficientnet_lite_pytorch", "torchvision"):
        monkeypatch.setitem(sys.modules, module, None)
    with raises(ConfigError, key=f"pretrained.init_from={name}", hint="Try pip install 'gpusim-rl[encoders]'"):
        load_frozen(name, {"camera": SHAPE}, torch.device("cpu"))
