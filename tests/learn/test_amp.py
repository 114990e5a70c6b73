"""Adversarial motion priors: discriminator, reward, replay buffer."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gpusim_rl.api import prepare
from gpusim_rl.distributed.actors import make_trainer
from gpusim_rl.errors import ConfigError
from gpusim_rl.learn.algorithm import EnvSpec, LearnerContext
from gpusim_rl.learn.collective import Collective
from gpusim_rl.learn.ppo import PPO
from gpusim_rl.learn.style import FeatureReplay, Style
from gpusim_rl.run.evaluation import evaluate_run
from gpusim_rl.run.trainer import Trainer
from gpusim_rl.settings.checks import build
from gpusim_rl.settings.schema import AMPConfig, DiscriminatorConfig
from gpusim_rl.spaces import Box
from gpusim_rl.testing.conformance import differences, merged
from gpusim_rl.view.player import Player
from helpers.composed import algorithm_defaults
from helpers.fakes import Env, Outcome, RandomEnv
from helpers.on_policy import SMALL, collect, prepared
from helpers.raised import raises
from helpers.states import saved_bytes
from helpers.training import read_csv, the_run

SIZES = {"policy": 5, "style": 4, "reference": 4}
DISCRIMINATOR = {"hidden": [16, 8], "batch_size": 32, "replay": 100, "learning_rate": 1e-3}
CHANGES: dict[str, Any] = merged(SMALL, {"minibatch_size": 32, "epochs": 2, "discriminator": DISCRIMINATOR})


def config(**changes: Any) -> AMPConfig:
    return build(AMPConfig, merged(algorithm_defaults("amp"), CHANGES, changes), "amp")


def agent(env: Env | None = None, *, device: str = "cpu", **changes: Any) -> PPO:
    env = env or RandomEnv(8, SIZES, device=device)
    torch.manual_seed(0)
    spec = EnvSpec(env.num_envs, env.obs_sizes, Box(env.num_actions), 1)
    return PPO(config(**changes), spec, LearnerContext("amp"), device=torch.device(device), seed=0, max_iterations=100)


def style_of(it: PPO) -> Style:
    found = it.extensions["style"]
    assert isinstance(found, Style)
    return found


# The discriminator

KINDS = [*itertools.product(("logistic", "least_squares"), ("relu", "elu", "tanh"), ("reference", "agent", "both"))]


def activation(name: str, z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return value and derivative."""
    if name == "relu":
        return np.maximum(z, 0.0), (z > 0.0).astype(float)
    if name == "elu":
        return np.where(z > 0.0, z, np.expm1(z)), np.where(z > 0.0, 1.0, np.exp(z))
    return np.tanh(z), 1.0 / np.cosh(z) ** 2


def oracle(
    cfg: DiscriminatorConfig, p: list[np.ndarray], agents: np.ndarray, weight: np.ndarray, reference: np.ndarray
) -> float:
    """Return the loss of a two-layer perceptron in numpy; `p` alternates weights and biases."""
    w1, b1, w2, b2, w3, b3 = p

    def score(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        h1, s1 = activation(cfg.activation, x @ w1.T + b1)
        h2, s2 = activation(cfg.activation, h1 @ w2.T + b2)
        return (h2 @ w3.T + b3)[:, 0], ((w3 * s2) @ w2 * s1) @ w1

    def error(d: np.ndarray, target: float) -> np.ndarray:
        return np.log1p(np.exp(-target * d)) if cfg.loss == "logistic" else (d - target) ** 2

    (agent_score, slope), (reference_score, reference_slope) = score(agents), score(reference)
    loss = 0.5 * (weight @ error(agent_score, -1.0) + error(reference_score, 1.0).mean())
    shares = {"reference": (0.0, 1.0), "agent": (1.0, 0.0), "both": (0.5, 0.5)}[cfg.penalized]
    penalty = shares[0] * weight @ (slope**2).sum(axis=1) + shares[1] * (reference_slope**2).sum(axis=1).mean()
    decay = cfg.weight_decay * sum((w**2).sum() for w in (w1, w2, w3))
    return loss + cfg.gradient_penalty * penalty + cfg.logit_decay * (w3**2).sum() + decay


@pytest.mark.parametrize(("loss", "kind", "penalized"), KINDS)
def test_discriminator_loss_and_gradient_equal_numpy_reference(loss: str, kind: str, penalized: str) -> None:
    changes = {"loss": loss, "activation": kind, "penalized": penalized, "weight_decay": 0.1, "hidden": [6, 5]}
    it = agent(discriminator=changes)
    net = style_of(it).discriminator.double()
    numbers = np.random.default_rng(0)
    agents, reference, weight = numbers.normal(size=(12, 4)), numbers.normal(size=(7, 4)), numbers.random(12)
    weight /= weight.sum()
    x = torch.tensor(np.concatenate([agents, reference]))
    found = style_of(it)._discriminator_loss(x, torch.tensor(weight), 1.0 / 7.0)
    gradients = torch.autograd.grad(found[0], [*net.parameters()])
    values = [parameter.detach().numpy().copy() for parameter in net.parameters()]
    assert float(found[0].detach()) == pytest.approx(oracle(it.cfg.discriminator, values, agents, weight, reference))
    for number, gradient in enumerate(gradients):
        for index in np.ndindex(*gradient.shape):
            ends = []
            for step in (1e-6, -1e-6):
                moved = [value.copy() for value in values]
                moved[number][index] += step
                ends.append(oracle(it.cfg.discriminator, moved, agents, weight, reference))
            assert float(gradient[index]) == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-4, abs=1e-7)


def test_style_reward_of_both_losses() -> None:
    score = torch.tensor([-1.0, 0.0, 1.0, 2.0, 20.0])
    losses = "logistic", "least_squares"
    networks: Any = {name: style_of(agent(discriminator={"loss": name})).discriminator for name in losses}
    doubt = (1.0 / (1.0 + score.double().exp())).clamp(min=1e-4)
    torch.testing.assert_close(networks["logistic"].reward(score), -doubt.log().float())
    torch.testing.assert_close(networks["least_squares"].reward(score), torch.tensor([0.0, 0.75, 1.0, 0.75, 0.0]))


def test_discriminator_separates_only_different_distributions() -> None:
    env = RandomEnv(64, SIZES)
    changes: dict[str, Any] = {"minibatch_size": 256, "discriminator": {"learning_rate": 3e-3}}
    apart, same = (agent(env, **changes) for _ in range(2))
    for name, it in (("apart", apart), ("same", same)):
        for _ in range(30):
            collect(it, env)
            if name == "apart":
                style_of(it).features["reference"].sub_(3.0)
            stats = it.update()
        right = stats["amp/accuracy_agent"], stats["amp/accuracy_reference"]
        if name == "apart":
            assert min(right) > 0.8
        else:
            assert float(sum(right)) == pytest.approx(1.0, abs=0.15)
            assert float(stats["amp/style_reward"]) == pytest.approx(np.log(2.0), abs=0.15)


# Training data


@pytest.mark.parametrize("task_weight", [0.0, 0.25])
def test_reward_sums_task_style_and_rnd_terms(task_weight: float) -> None:
    it = agent(task_weight=task_weight, reward_scale=0.5, rnd={"weight": 2.0})
    collect(it, RandomEnv(8, SIZES))
    net, rnd = style_of(it).discriminator, it.extensions["rnd"]
    with torch.no_grad():
        style = net.reward(net(net.seen(style_of(it).features["style"])))
        zeros = torch.zeros_like(it.rollout.reward)
        task, novelty = task_weight * it.rollout.reward, 2.0 * rnd.begin_update(it.rollout, zeros, {}, it.policy)
        assert novelty.min() > 0.0
        before = it.rollout.reward.clone()
        torch.testing.assert_close(prepared(it)[0], 0.5 * (task + 0.5 * style + novelty))
        assert torch.equal(it.rollout.reward, before)


def test_logged_style_reward_averages_valid_steps_of_all_processes() -> None:
    class TwoProcesses(Collective):
        """Second process with 300 valid steps of reward 0.5."""

        size = 2

        def sum(self, tensors: Any) -> list[Tensor]:
            return [x + other for x, other in zip(tensors, (300.0, 150.0), strict=True)]

    env = RandomEnv(16, SIZES, ends=(0.1, 0.1, 0.3))
    it = agent(env)
    collect(it, env)
    net, valid = style_of(it).discriminator, it.rollout.valid
    style_of(it).features["style"][~valid] = 1e6
    with torch.no_grad():
        style = net.reward(net(net.seen(style_of(it).features["style"])))[valid].mean()
        prepared(it)
        torch.testing.assert_close(style_of(it)._reward, style)
        style_of(it).collective = TwoProcesses()
        prepared(it)
        torch.testing.assert_close(style_of(it)._reward, (valid.sum() * style + 150.0) / (valid.sum() + 300.0))


class Numbered(RandomEnv):
    """Features hold the control step, negative for final observations."""

    time = 0

    def step(self, action: Tensor) -> Outcome:
        out = super().step(action)
        self.time += 1
        for obs, sign in ((out.obs, 1.0), (out.final_obs, -1.0)):
            for group in ("style", "reference"):
                obs[group].fill_(sign * self.time)
        return out


def test_style_uses_final_observations_and_is_hidden_from_policy() -> None:
    env = Numbered(8, SIZES)
    it = agent(env)
    collect(it, env)
    for group, sign in (("style", -1.0), ("reference", 1.0)):
        assert style_of(it).features[group][:, 0, 0].tolist() == [sign * t for t in range(1, 9)]
    assert it.rollout.obs.keys() == {"policy"}
    assert it.policy.obs_norm.keys() == {"policy"}


def test_diverged_envs_do_not_train_the_discriminator() -> None:
    env = RandomEnv(16, SIZES, ends=(0.1, 0.1, 0.3))
    learned = []
    for value in (0.0, 1e6):
        it = agent(env)
        env.generator.manual_seed(1)
        collect(it, env)
        style_of(it).features["style"][~it.rollout.valid] = value
        it.update()
        learned.append(it.state_dict()["extensions"]["style"])
        style_of(it).replay.rows[~style_of(it).replay.valid] = 0.0
    for part in ("discriminator", "optimizer"):
        assert differences(learned[0][part], learned[1][part]) == []


def test_discriminator_statistics_cover_both_groups_after_update() -> None:
    env = RandomEnv(16, SIZES)
    it = agent(env)
    collect(it, env)
    style_of(it).features["reference"].add_(10.0)
    it.update()
    rows = torch.cat([x[it.rollout.valid] for x in style_of(it).features.values()]).double()
    torch.testing.assert_close(style_of(it).discriminator.seen.mean, rows.mean(dim=0))
    torch.testing.assert_close(style_of(it).discriminator.seen.var, rows.var(dim=0, unbiased=False))


def test_difference_mode_uses_zeros_as_reference() -> None:
    env = RandomEnv(16, {"policy": 5, "style": 3})
    it = agent(env, difference=True)
    for _ in range(20):
        collect(it, env)
        stats = it.update()
    assert min(stats["amp/accuracy_agent"], stats["amp/accuracy_reference"]) > 0.7
    net = style_of(it).discriminator
    near, far = (float(net(net.seen(torch.full((1, 3), x)))) for x in (0.0, 3.0))  # 3 is the agent's mean
    assert near > 0.0 > far
    assert not net.seen(torch.zeros(1, 3)).any()


def test_difference_mode_scales_by_mean_absolute_value() -> None:
    env = RandomEnv(16, {"policy": 5, "style": 3})
    it = agent(env, difference=True)
    collect(it, env)
    it.update()
    rows = style_of(it).features["style"][it.rollout.valid]
    torch.testing.assert_close(style_of(it).discriminator.seen(rows), (rows / rows.abs().mean(dim=0)).clamp(-5.0, 5.0))
    again = agent(env, difference=True)
    again.load_state_dict(it.state_dict())
    torch.testing.assert_close(style_of(again).discriminator.seen(rows), style_of(it).discriminator.seen(rows))


@pytest.mark.parametrize(("difference", "penalized"), [(False, "reference"), (True, "agent")])
def test_auto_gradient_penalty_uses_samples_of_the_paper(difference: bool, penalized: str) -> None:
    x, weight = torch.randn(12, 4), torch.full((8,), 1.0 / 8.0)
    auto = agent(difference=difference, discriminator={"penalized": "auto"})
    typed = agent(difference=difference, discriminator={"penalized": penalized})
    losses = [style_of(it)._discriminator_loss(x, weight, 0.25) for it in (auto, typed)]
    torch.testing.assert_close(*losses)


class Imitable(RandomEnv):
    """Features are the actions; the reference's are near 0.7."""

    def step(self, action: Tensor) -> Outcome:
        out = super().step(action)
        out.final_obs["style"] = action.clone()
        out.obs["reference"] = 0.7 + 0.1 * torch.randn(self.num_envs, self.num_actions, generator=self.generator)
        out.reward.zero_()
        return out


@pytest.mark.parametrize("loss", ["logistic", "least_squares"])
def test_policy_learns_a_style(loss: str) -> None:
    env = Imitable(64, {"policy": 2, "style": 2, "reference": 2}, num_actions=2, ends=(0.1, 0.1, 0.0))
    changes = {"minibatch_size": 128, "learning_rate": 3e-3, "schedule": "constant", "gamma": 0.5}
    it = agent(env, **changes, network={"log_std_init": -1.0}, discriminator={"loss": loss})
    before = it.policy.act(env.reset(), ())[0].mean()
    for _ in range(25):
        collect(it, env)
        stats = it.update()
    assert abs(float(before)) < 0.2
    assert (it.policy.act(env.reset(), ())[0].mean(dim=0) - 0.7).abs().max() < 0.2
    assert {"loss/discriminator", "amp/gradient_penalty"} <= stats.keys()


# The replay buffer


def test_feature_replay_overwrites_oldest_rows() -> None:
    ring = FeatureReplay(5, 1)
    for first in (0, 3, 6):
        ring.store(torch.arange(first, first + 3.0)[:, None], torch.tensor([True, False, True]))
        unit = torch.rand(200)
        drawn = ring.draw(unit)[0].flatten().unique().tolist()
        assert drawn == [*map(float, range(max(0, first - 2), first + 3))]
    assert ring.rows.flatten().tolist() == [5.0, 6.0, 7.0, 8.0, 4.0]
    assert ring.valid.tolist() == [True, True, False, True, False]
    least, most = ring.draw(torch.tensor([0.0, 1.0 - 2.0**-24]))[0].flatten().tolist()
    assert (least, most) == (5.0, 4.0)


def test_feature_replay_saves_only_written_rows() -> None:
    ring, other = FeatureReplay(1000, 4), FeatureReplay(1000, 4)
    ring.store(torch.randn(3, 4), torch.tensor([True, False, True]))
    state = ring.contents()
    assert saved_bytes(state) < 100
    other.restore(state)
    for number in (3, 999):
        rows, valid = torch.randn(number, 4), torch.rand(number) < 0.5
        for memory in (ring, other):
            memory.store(rows, valid)
        assert differences(ring.state_dict(), other.state_dict()) == []
        assert differences(ring.contents(), other.contents()) == []


@pytest.mark.parametrize(("share", "capacity", "kept"), [(0.25, 100, 16), (0.0, 100, 1), (1.0, 10, 10)])
def test_feature_replay_keeps_a_share_of_each_rollout(share: float, capacity: int, kept: int) -> None:
    it = agent(discriminator={"replay_share": share, "replay": capacity})
    for number in (1, 2):
        collect(it, RandomEnv(8, SIZES))
        it.update()
        assert int(style_of(it).replay.filled) == min(capacity, number * kept)


@pytest.mark.skipif(hasattr(PPO.update, "__wrapped__"), reason="shape checks prevent full-graph compilation")
def test_discriminator_loss_compiles_as_full_graph() -> None:
    it = agent(discriminator={"penalized": "both"})
    x, weight = torch.randn(12, 4), torch.full((8,), 0.125)
    compiled = torch.compile(style_of(it)._discriminator_loss, fullgraph=True, dynamic=False, backend="aot_eager")
    both = [loss(x, weight, 0.25) for loss in (style_of(it)._discriminator_loss, compiled)]
    torch.testing.assert_close(*both)
    gradients = [torch.autograd.grad(numbers[0], [*style_of(it).discriminator.parameters()]) for numbers in both]
    torch.testing.assert_close(*gradients)


# Settings


def test_wrong_observation_groups_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"^algo=amp: .*'reference'"):
        agent(RandomEnv(8, {"policy": 5, "style": 4}))
    with raises(ConfigError, key="algo=amp", got={"style": 4, "reference": 6}):
        agent(RandomEnv(8, {"policy": 5, "style": 4, "reference": 6}))


def test_amp_describes_style_settings() -> None:
    assert re.findall(r"\d[\dx.]*", agent().describe()["style"]) == ["4", "16x8", "0.5", "0.5"]


# Whole runs


TASK = {"episode_length": 9, "_target_": "helpers.styled.Styled"}


def trainer(folder: Path, /, **more: Any) -> Trainer:
    settings = {"num_envs": 8, "max_iterations": 4, "log": {"console": "quiet", "dir": str(folder)}}
    settings |= {"amp": CHANGES, "task": TASK}
    return make_trainer(prepare("Cartpole", algo="amp", **merged(settings, more)))


def test_amp_run_can_be_evaluated_and_played(tmp_path: Path) -> None:
    trainer(tmp_path, max_iterations=2).train()
    run = the_run(tmp_path)
    columns = read_csv(run)[0].keys()
    assert {"loss/discriminator", "amp/style_reward", "amp/accuracy_agent", "amp/accuracy_reference"} <= columns
    again: Any = {"checkpoint": str(run), "num_envs": 8, "task": TASK}
    assert evaluate_run(prepare("Cartpole", test=True, **again))["episodes"] == 8
    player = Player.open(str(run), num_envs=3, trust=True)
    player.step()
    player.close()


def test_non_finite_feature_stops_run_and_is_located(tmp_path: Path) -> None:
    it = trainer(tmp_path, log={"interval": 1})
    observe: Any = it.env.task.observe  # type: ignore[attr-defined]

    def broken() -> Any:
        obs = observe()
        obs["style"][3, 1] = torch.nan
        return obs

    it.env.task.observe = broken  # type: ignore[attr-defined]
    with pytest.raises(Exception, match=r"'style', step 0, env 3, column 1"):
        it.train()
