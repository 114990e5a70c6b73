"""Common behaviour of all off-policy algorithms."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from gpusim_rl.errors import ConfigError
from gpusim_rl.learn.ensemble import EnsembleLinear
from gpusim_rl.learn.off_policy import Batch, OffPolicy
from gpusim_rl.learn.q_networks import Critic
from gpusim_rl.learn.sac import SACPolicy
from gpusim_rl.testing.conformance import differences
from helpers.fakes import RandomEnv
from helpers.off_policy import ACTOR_CRITICS, C51, NAMES, OffPolicyLearner
from helpers.raised import raises

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "prioritised": {"n_step": 2, "replay": {"alpha": 0.6}},
    "clipped distributions": {"network": {**C51, "layer_norm": False}, "replay": {"alpha": 0.5}},
}
BOTH = {"policy": 5, "critic": 7}


def learner(name: str, kind: str = "plain", *, sizes: dict[str, int] | None = None, **more: Any) -> OffPolicyLearner:
    return OffPolicyLearner(name, RandomEnv(8, sizes), {**KINDS[kind], **more})


def snapshot(algorithm: OffPolicy) -> dict[str, Any]:
    parameters = {name: p.detach().clone() for name, p in algorithm.policy.named_parameters()}
    return {"policy": parameters, "alpha": getattr(algorithm, "log_alpha", torch.zeros(())).detach().clone()}


@pytest.mark.parametrize("name", NAMES)
def test_before_learning_starts_actions_are_uniform(name: str) -> None:
    it = learner(name, learning_starts=96, batch_size=96, replay={"alpha": 0.6})  # 3 iterations of 32
    before, actions = snapshot(it.algorithm), []
    act = it.algorithm.act
    it.algorithm.act = lambda obs: (actions.append(act(obs)), actions[-1])[1]  # type: ignore[method-assign]
    for _ in range(2):
        (stats,) = it.train(1)
        assert differences(snapshot(it.algorithm), before) == []
        assert stats["check/learned"] == 1.0
        assert it.algorithm.priorities is not None and it.algorithm.priorities.values.unique().tolist() == [0.0, 1.0]
    taken = torch.cat(actions).flatten()
    assert taken.abs().max() <= 1.0
    spread = (1 / 3) ** 0.5 if name in ACTOR_CRITICS else (2 / 3) ** 0.5  # of [-1, 1], and of -1, 0 and 1
    assert taken.std() == pytest.approx(spread, abs=0.08) and taken.mean() == pytest.approx(0.0, abs=0.15)
    it.train(1)
    changed = differences(snapshot(it.algorithm), before)
    assert any("critic" in path for path in changed)
    assert any("actor" in path for path in changed) == (name in ACTOR_CRITICS)


@pytest.mark.parametrize("name", NAMES)
def test_normalizer_counts_each_frame_once_and_is_fixed_in_update(name: str) -> None:
    it = learner(name, sizes=BOTH)
    norms: Any = it.algorithm.policy.obs_norm
    group = it.algorithm.policy.critic_group
    seen, frames = [], []
    look = it.algorithm._look_at_new_frames
    draw = it.algorithm._draw

    def drawing(number: int) -> Any:
        seen.append(norms[group].count.item())
        return draw(number)

    def looking() -> Any:
        seen.append(norms[group].count.item())
        return look()

    it.algorithm._draw, it.algorithm._look_at_new_frames = drawing, looking  # type: ignore[method-assign]
    record: Any = it.algorithm.record

    def recording(action: Tensor, step: Any) -> None:
        frames.append(it.algorithm.acted_on[group][~step.diverged])
        record(action, step)

    it.algorithm.record = recording  # type: ignore[method-assign]
    it.train(3)
    every = torch.cat(frames).double()
    assert seen == sorted(seen) and seen[0::2] == seen[1::2], "statistics changed during the update"
    assert norms[group].count.item() == len(every)
    assert torch.allclose(norms[group].mean, every.mean(dim=0))
    assert torch.allclose(norms[group].var, every.var(dim=0, correction=0))


@pytest.mark.parametrize("kind", ["prioritised", "clipped distributions"])
@pytest.mark.parametrize("name", NAMES)
def test_update_with_non_finite_gradient_changes_nothing(name: str, kind: str) -> None:
    it = learner(name, kind)
    it.train(2)
    it.collect()
    before = snapshot(it.algorithm)
    priorities = it.algorithm.state_dict()["priorities"]
    targets = {key for key in before["policy"] if key.startswith("target")}
    moments = it.algorithm.state_dict()["critic_optimizer"]
    draw = it.algorithm._draw

    def poisoned(number: int) -> Any:
        batches = draw(number)
        for batch in batches:
            batch.reward = batch.reward + torch.nan
            batch.obs = {group: x * torch.nan for group, x in batch.obs.items()}
        return batches

    it.algorithm._draw = poisoned  # type: ignore[method-assign]
    stats = it.algorithm.update()
    after = snapshot(it.algorithm)
    assert {path for path in differences(after, before) if path.split("/")[-1] not in targets} == set()
    assert differences(it.algorithm.state_dict()["critic_optimizer"], moments) == []
    assert differences(it.algorithm.state_dict()["priorities"], priorities) == []
    assert stats["check/learned"] == 0.0 and stats["policy/skipped_minibatches"] > 0
    assert all(value.isfinite() for key, value in stats.items() if key.startswith("loss/"))
    it.algorithm._draw = draw  # type: ignore[method-assign]
    assert it.algorithm.update()["check/learned"] == 1.0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["plain", "clipped distributions"])
def test_rows_with_zero_weight_change_nothing(name: str, kind: str) -> None:
    found = []
    for junk in (0.0, 100.0):
        it = learner(name, kind)
        it.train(2)
        it.collect()
        draw = it.algorithm._draw

        def half(number: int, draw: Any = draw, junk: float = junk) -> Any:
            batches = draw(number)
            for batch in batches:
                batch.weight[::2] = 0.0
                batch.reward[::2] = junk
            return batches

        it.algorithm._draw = half  # type: ignore[method-assign]
        it.algorithm.update()
        found.append(snapshot(it.algorithm))
    assert differences(*found) == []


def plain_updates(it: OffPolicyLearner, batches: list[Batch]) -> tuple[list[Tensor], float]:
    """Return parameters and log alpha after the SAC or TD3 updates of the papers, with torch.optim.Adam."""
    policy, cfg = copy.deepcopy(it.algorithm.policy), it.algorithm.cfg
    sac = isinstance(policy, SACPolicy)
    critic, actor, target, target_actor = policy.critic, policy.actor, policy.target_critic, policy.target_actor
    log_alpha = torch.nn.Parameter(torch.tensor(math.log(getattr(cfg, "alpha", 1.0))))
    adams = [torch.optim.Adam(network.parameters(), lr=cfg.learning_rate) for network in (critic, actor)]
    adams.append(torch.optim.Adam([log_alpha], lr=getattr(cfg, "alpha_learning_rate", 1.0)))

    def q(network: Critic, obs: Tensor, action: Tensor, member: int) -> Tensor:
        x = torch.cat([obs, action], dim=-1)
        linear = [layer for layer in (*network.features, network.head) if isinstance(layer, EnsembleLinear)]  # type: ignore[arg-type]
        for layer in linear:
            x = x @ layer.weight[member] + layer.bias[member]
            x = x if layer is network.head else x.relu()
        return x.squeeze(-1)

    def lowest(network: Critic, obs: Tensor, action: Tensor) -> Tensor:
        return torch.minimum(q(network, obs, action, 0), q(network, obs, action, 1))

    def sample(obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        mean, spread = actor(obs, reduced=None).chunk(2, dim=-1)
        std = (-5.0 + 3.5 * (spread.tanh() + 1.0)).exp()
        noise = noise[:, : mean.shape[1]]  # without its density
        action = (mean + std * noise).tanh()
        density = torch.distributions.Normal(mean, std).log_prob(mean + std * noise)
        return action, (density - (1.0 - action.square() + 1e-6).log()).sum(dim=-1)

    def descend(adam: torch.optim.Adam, loss: Tensor) -> None:
        adam.zero_grad()
        loss.backward()
        adam.step()

    for index, batch in enumerate(batches):
        obs, next_obs = batch.obs["policy"], batch.next_obs["policy"]
        with torch.no_grad():
            if sac:
                action, log_prob = sample(next_obs, batch.noise[0])
                value = lowest(target, next_obs, action) - log_alpha.exp() * log_prob
            else:
                assert target_actor is not None
                smoothed = target_actor(next_obs, reduced=None).tanh() + batch.noise[0]
                value = lowest(target, next_obs, smoothed.clamp(-1.0, 1.0))
            y = batch.reward + batch.discount * value
        mask = batch.weight > 0.0
        errors = [(q(critic, obs, batch.action, member) - y)[mask].square().mean() for member in (0, 1)]
        descend(adams[0], errors[0] + errors[1])
        if (index + 1) % cfg.policy_delay == 0:
            if sac:
                action, log_prob = sample(obs, batch.noise[1])
                descend(adams[1], (log_alpha.exp().detach() * log_prob - lowest(critic, obs, action))[mask].mean())
                excess = -log_prob.detach()[mask].mean() - cfg.target_entropy
                descend(adams[2], log_alpha.exp() * excess)
            else:
                descend(adams[1], -lowest(critic, obs, actor(obs, reduced=None).tanh())[mask].mean())
        with torch.no_grad():
            for slow, fast in zip(*policy.target_pairs(), strict=True):
                slow.mul_(1.0 - cfg.tau).add_(cfg.tau * fast)
    return list(policy.parameters()), log_alpha.item()


@pytest.mark.parametrize("name", ["sac", "td3"])
def test_updates_equal_plain_reference(name: str) -> None:
    changes: dict[str, Any] = {"network": {"layer_norm": False}, "updates": 5, "tau": 0.05, "n_step": 3}
    if name == "sac":
        changes |= {"alpha": 0.7, "target_entropy": -2.0}
    it = learner(name, **changes)
    it.algorithm.policy.actor.head.weight.data.mul_(100.0)  # log-stds and actions that differ
    it.collect()
    it.collect()
    batches = it.algorithm._draw(20)
    assert any((batch.weight == 0.0).any() for batch in batches), "no diverged samples"
    expected, log_alpha = plain_updates(it, batches)
    it.algorithm._draw = lambda number: batches[:number]  # type: ignore[method-assign]
    it.algorithm.update()
    for found, plain in zip(it.algorithm.policy.parameters(), expected, strict=True):
        assert torch.allclose(found, plain, atol=2e-5)
    if name == "sac":
        assert it.algorithm.log_alpha.item() == pytest.approx(log_alpha, abs=1e-5)  # type: ignore[attr-defined]
        assert abs(log_alpha - math.log(0.7)) > 1e-3


def test_targets_follow_online_networks_by_tau() -> None:
    it = learner("dqn", tau=0.25, updates=1, horizon=1, policy_delay=1, learning_starts=8, batch_size=8)
    it.train(4)
    targets = [x.clone() for x in it.algorithm._targets]
    it.train(1)
    for old, new, online in zip(targets, it.algorithm._targets, it.algorithm._online, strict=True):
        assert torch.allclose(new, 0.75 * old + 0.25 * online, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_unsaved_replay_is_refilled_by_the_policy(name: str) -> None:
    one = learner(name, replay={"save": False}, learning_starts=64)
    one.train(4)
    state = one.algorithm.state_dict()
    assert state["replay"] is None and "refills it" in one.algorithm.describe()["batch"]
    other = learner(name, replay={"save": False}, learning_starts=64)
    other.algorithm.policy.load_state_dict(one.algorithm.policy.state_dict())
    other.algorithm.load_state_dict(state)
    before = snapshot(other.algorithm)
    (stats,) = other.train(1)
    assert stats["replay/transitions"] == 32.0
    moved = differences(snapshot(other.algorithm)["policy"], before["policy"])
    assert all("target" in path for path in moved), "networks changed before learning_starts"
    other.algorithm.begin_rollout()
    other.algorithm.noise.now.fill_(-1.0 if name == "dqn" else 0.0)  # no random actions
    expected, _ = other.algorithm.policy.act(other.obs, ())
    assert torch.allclose(other.algorithm.act(other.obs), expected)


@pytest.mark.parametrize(
    ("name", "changes", "key", "got"),
    [
        ("sac", {"learning_starts": 500}, "sac.learning_starts", 500),
        ("td3", {"batch_size": 32}, "td3.learning_starts", 16),
        ("sac", {"policy_delay": 3}, "sac.policy_delay", 3),
        ("td3", {"noise_min": 0.5}, "td3.noise_min", 0.5),
        ("sac", {"network": {"value_min": 10.0}}, "sac.network.value_min", 10.0),
        ("sac", {"replay": {"capacity": 31}}, "sac.replay.capacity", 31),
        ("td3", {"learning_starts": 39, "replay": {"capacity": 39}}, "td3.learning_starts", 39),
        ("sac", {"replay": {"capacity": 2_000_000_000}}, "sac.replay.capacity", 2_000_000_000),
    ],
)
def test_settings_that_cannot_learn_are_rejected(name: str, changes: dict[str, Any], key: str, got: float) -> None:
    with raises(ConfigError, key=key, got=got):
        learner(name, sizes={"policy": 10_000}, **changes)


def test_banner_reports_iteration_of_first_update() -> None:
    assert learner("sac", learning_starts=100).algorithm.describe()["batch"].endswith("transitions, until iteration 4")
    never = learner("sac", learning_starts=3240, replay={"capacity": 4000}).algorithm.describe()["batch"]
    assert never.endswith("Try sac.learning_starts=320")
    short = {"learning_starts": 3240, "batch_size": 3240, "replay": {"capacity": 4000}}
    never = learner("sac", **short).algorithm.describe()["batch"]
    assert never.endswith("Try max_iterations=1020")
