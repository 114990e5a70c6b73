"""DQN: action values, exploration, targets, priorities, learning."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gpusim_rl.learn.dqn import DQN
from gpusim_rl.learn.off_policy import Batch
from gpusim_rl.learn.q_networks import DiscreteCritic
from gpusim_rl.spaces import ActionSpace, Box, MultiDiscrete
from gpusim_rl.testing.sync_counter import SyncCounter
from helpers.fakes import RandomEnv
from helpers.off_policy import C51, OffPolicyLearner, off_policy_config

COUNTS = (2, 4, 3)


def learner(space: ActionSpace, envs: int = 8, **changes: Any) -> tuple[OffPolicyLearner, DQN]:
    changes = {"replay": {"capacity": 100 * envs}, **changes}
    it = OffPolicyLearner("dqn", RandomEnv(envs, num_actions=space.size), changes, space=space)
    assert isinstance(it.algorithm, DQN)
    return it, it.algorithm


def make_critic(**network: Any) -> DiscreteCritic:
    torch.manual_seed(0)
    net: Any = off_policy_config("dqn", {"network": {"hidden": [16], **network}}).network
    return DiscreteCritic(5, COUNTS, net, "dqn.network")


# Action values


@pytest.mark.parametrize("network", [{}, {"dueling": False}, {"critics": 2}, C51], ids=["one", "plain", "two", "atoms"])
def test_best_option_per_choice_is_best_joint_action(network: dict[str, Any]) -> None:
    critic = make_critic(**network)
    obs = torch.randn(20, 5)
    every = critic.options(obs, reduced=None)
    assert every.shape == (network.get("critics", 1), 20, network.get("atoms", 1), sum(COUNTS))
    offsets = [0, 2, 6]
    actions = [torch.tensor(choice) for choice in itertools.product(*map(range, COUNTS))]
    values = []
    for action in actions:
        joint = critic(obs, action.expand(20, 3).float(), reduced=None)  # a replay buffer holds floats
        slow = sum(every[..., offset + int(k)] for offset, k in zip(offsets, action, strict=True)) / 3
        assert torch.allclose(joint, slow, atol=1e-6)  # type: ignore[arg-type]
        values.append(joint.mean(dim=0).squeeze(-1))
    if "atoms" not in network:  # a mean of logits is not a value
        best = torch.stack(values).argmax(dim=0)
        assert torch.equal(critic.best(every), torch.stack([actions[int(i)] for i in best]))
    parts = critic.value(every.mT).mean(dim=0).split(COUNTS, dim=1)
    assert torch.equal(critic.best(every), torch.stack([part.argmax(dim=1) for part in parts], dim=1))


@pytest.mark.parametrize("atoms", [1, 11])
def test_dueling_subtracts_mean_advantage_per_choice(atoms: int) -> None:
    critic = make_critic(**(C51 if atoms > 1 else {}))
    obs = torch.randn(7, 5)
    assert critic.state_head is not None
    features = critic.features(obs.expand(1, -1, -1))
    state, advantage = critic.state_head(features)[0], critic.head(features)[0].view(7, atoms, sum(COUNTS))
    found, start = critic.options(obs, reduced=None)[0], 0
    for count in COUNTS:
        part = advantage[:, :, start : start + count]
        for option in range(count):
            expected = state + part[:, :, option] - part.sum(dim=2) / count
            assert torch.allclose(found[:, :, start + option], expected, atol=1e-6)
        start += count


def test_continuous_actions_are_binned() -> None:
    it, dqn = learner(Box(2), bins=5, action_scale=2.0)
    grid = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0])
    actions = dqn.policy.action(torch.arange(5)[:, None].expand(-1, 2))
    assert torch.equal(actions[:, 0], grid)
    it.train(3)
    stored = dqn.replay.action[:12]
    assert stored.unique().tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert torch.equal(dqn.policy.index(dqn.policy.action(stored.long())), stored)
    action, _ = dqn.policy.act(it.obs, ())
    assert all(value in grid for value in action.flatten())


@pytest.mark.parametrize("space", [MultiDiscrete((4,)), MultiDiscrete(COUNTS)], ids=["one choice", "three choices"])
def test_discrete_actions_are_indices(space: MultiDiscrete) -> None:
    it, dqn = learner(space, n_step=2, network={"critics": 2}, replay={"capacity": 800, "alpha": 0.6})
    with SyncCounter() as syncs:
        dqn.begin_rollout()
        action = dqn.act(it.obs)
    assert syncs.total == 0, syncs.locations
    assert action.dtype == torch.int64 and action.shape == (8, space.size)
    it.train(5)
    taken = dqn.replay.action[:20].flatten(0, 1)
    assert taken.amin(dim=0).tolist() == [0.0] * space.size
    assert taken.amax(dim=0).tolist() == [count - 1.0 for count in space.counts]


# Exploration


def test_epsilon_falls_linearly_to_its_end_value() -> None:
    _, dqn = learner(MultiDiscrete((2,)), epsilon_start=0.9, epsilon_end=0.1, epsilon_decay=80)
    found = []
    for steps in (0, 5, 10, 11, 1000):
        dqn.steps.fill_(steps)  # per env; there are 8
        found.append(dqn.epsilon(dqn.steps).unique().item())
    assert found == pytest.approx([0.9, 0.5, 0.1, 0.1, 0.1])


def test_epsilon_ladder_matches_ape_x() -> None:
    ape_x: dict[str, Any] = {"epsilon_start": 0.4, "epsilon_end": 0.4, "epsilon_ladder": 7.0}
    _, dqn = learner(MultiDiscrete((2,)), **ape_x)
    assert dqn.epsilon(dqn.steps)[:, 0].tolist() == pytest.approx([0.4 ** (1 + 7 * i / 7) for i in range(8)])
    _, alone = learner(MultiDiscrete((2,)), envs=1, **ape_x, learning_starts=16)
    assert alone.epsilon(alone.steps).tolist() == [[pytest.approx(0.4)]]


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0])
def test_share_of_random_actions_is_epsilon(epsilon: float) -> None:
    it, dqn = learner(MultiDiscrete((5,)), envs=4000, epsilon_start=epsilon, epsilon_end=epsilon, learning_starts=4000)
    it.collect()
    dqn.begin_rollout()
    chosen, (greedy, _) = dqn.act(it.obs), dqn.policy.act(it.obs, ())
    assert (chosen != greedy).float().mean().item() == pytest.approx(0.8 * epsilon, abs=0.03)


def test_random_options_are_equally_likely(monkeypatch: pytest.MonkeyPatch) -> None:
    it, dqn = learner(MultiDiscrete(COUNTS), envs=6000, learning_starts=10_000)
    dqn.begin_rollout()
    action = dqn.act(it.obs)
    for number, count in enumerate(COUNTS):
        shares = action[:, number].bincount(minlength=count) / 6000
        assert shares.tolist() == pytest.approx([1 / count] * count, abs=0.03)
    monkeypatch.setattr(Tensor, "normal_", lambda numbers, **_: numbers.fill_(9.0))  # where the error function is 1
    dqn.begin_rollout()
    assert dqn.act(it.obs).unique(dim=0).tolist() == [[count - 1 for count in COUNTS]]


# Targets


def batch_of(obs: Tensor, action: Tensor, reward: Tensor, discount: Tensor) -> Batch:
    weight = torch.full((len(obs),), 1.0 / len(obs))
    index, noise = torch.zeros(len(obs), dtype=torch.int64), torch.zeros(2, len(obs), 1)
    return Batch({"policy": obs}, action, reward, {"policy": obs + 10.0}, discount, weight, index, noise)


@pytest.mark.parametrize("double", [True, False])
def test_targets_match_double_q_learning(double: bool) -> None:
    # rlax's test vectors; the selector is the online network at the next observations
    _, dqn = learner(MultiDiscrete((3,)), double=double, network={"dueling": False})
    now = torch.tensor([[1.0, 1, 0], [1, 2, 0]])
    following = torch.tensor([[99.0, 1, 98], [91, 2, 66]])
    selector = torch.tensor([[2.0, 10, 1], [11, 20, 1]])

    def network(at_first: Tensor, later: Tensor) -> Callable[..., Tensor]:
        return lambda obs, *, reduced: (later if obs[0, 0] >= 10 else at_first)[None, :, None, :]

    dqn.policy.critic.options = network(now, selector)  # type: ignore[method-assign]
    dqn.policy.target_critic.options = network(now, following)  # type: ignore[method-assign]
    batch = batch_of(torch.zeros(2, 5), torch.tensor([[0.0], [1.0]]), torch.ones(2), torch.tensor([0.0, 1.0]))
    target, expected = dqn.targets(batch)
    td = target - dqn.policy.critic(batch.obs["policy"], batch.action, reduced=None)[0, :, 0]
    assert torch.equal(target, expected)
    assert td.tolist() == ([0.0, 1.0] if double else [0.0, 90.0])


@pytest.mark.parametrize("network", [{"critics": 2}, {**C51, "critics": 2}], ids=["values", "distributions"])
def test_priorities_are_td_errors(network: dict[str, Any]) -> None:
    it, dqn = learner(MultiDiscrete((3,)), network=network, replay={"capacity": 800, "alpha": 1.0})
    it.train(3)
    (batch, *_) = dqn._draw(4)
    with torch.no_grad():
        target, _ = dqn.targets(batch)
        predicted = dqn.policy.critic(batch.obs["policy"], batch.action, reduced=None)
    if "atoms" in network:
        logs = predicted.log_softmax(dim=-1)
        each = [[(t * (t.clamp(min=1e-30).log() - log)).sum() for t, log in zip(target, m, strict=True)] for m in logs]
    else:
        each = [[(t - q).abs() for t, q in zip(target, m[:, 0], strict=True)] for m in predicted]
    slow = torch.tensor(each).mean(dim=0)
    dqn._critic_step(batch, torch.tensor(torch.inf))
    counts = batch.weight > 0
    assert dqn.priorities is not None and counts.any()
    assert torch.allclose(dqn.priorities.values[batch.index][counts], slow[counts] + 1e-6, atol=1e-5)
    assert (dqn.priorities.values[batch.index][~counts] == 0.0).all()


def test_importance_exponent_beta_rises_to_one() -> None:
    it, dqn = learner(MultiDiscrete((3,)), replay={"capacity": 800, "alpha": 1.0, "beta": 0.4})
    it.train(5)
    assert dqn.priorities is not None
    for steps, beta in ((0, 0.4), (200, 0.7), (400, 1.0), (900, 1.0)):  # a whole training has 400
        dqn.steps.fill_(steps)
        (batch, *_) = dqn._draw(1)
        counts = batch.weight > 0
        expected = dqn.priorities.values[batch.index][counts].pow(-beta)
        assert torch.allclose(batch.weight[counts], expected / expected.sum(), rtol=1e-4)


def test_dqn_ignores_critic_observations() -> None:
    env = RandomEnv(8, {"policy": 5, "critic": 7})
    it = OffPolicyLearner("dqn", env)
    it.train(2)
    assert it.algorithm.replay.obs.keys() == {"policy"}


# Learning


@pytest.mark.parametrize(
    "changes", [{}, {"network": C51, "replay": {"alpha": 0.6}, "n_step": 3}], ids=["default", "rainbow"]
)
def test_dqn_solves_a_bandit(changes: dict[str, Any]) -> None:
    class Bandit(RandomEnv):
        """Bandit: the observation shows the best option of the first choice; the best of the second is 2."""

        def step(self, action: Tensor) -> Any:
            outcome = super().step(action)
            outcome.reward = (action[:, 0] == self.wanted).float() + (action[:, 1] == 2).float()
            outcome.terminated, outcome.truncated = torch.ones_like(outcome.terminated), outcome.truncated & False
            outcome.diverged = outcome.diverged & False
            self.wanted = outcome.obs["policy"][:, 0] > 3.0
            return outcome

        def reset(self) -> dict[str, Tensor]:
            obs = super().reset()
            self.wanted = obs["policy"][:, 0] > 3.0
            return obs

    space = MultiDiscrete((2, 4))
    settings = {"updates": 8, "batch_size": 64, "learning_starts": 64, "learning_rate": 3e-3, "replay": {}, **changes}
    settings["replay"] = {"capacity": 3200, **settings["replay"]}
    it = OffPolicyLearner("dqn", Bandit(32, num_actions=2), settings, space=space)
    it.train(12)
    action, _ = it.algorithm.policy.act(it.obs, ())
    best = torch.stack([it.obs["policy"][:, 0] > 3.0, torch.full((32,), 2)], dim=1)
    assert (action == best).float().mean() > 0.9
