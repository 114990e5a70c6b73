"""Policy networks: Gaussian against torch.distributions, recurrence, value statistics, precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Independent, Normal, kl_divergence

from gpusim_rl.learn.algorithm import EnvSpec
from gpusim_rl.learn.distributions import DiagonalGaussian
from gpusim_rl.learn.networks import ACTIVATIONS, MLP, ActorCritic
from gpusim_rl.learn.ppo import PPO
from gpusim_rl.settings.schema import PPOConfig
from gpusim_rl.spaces import Box
from helpers.fakes import ppo_config

ACTIONS = 3


def gaussian_kl(mean_p: Tensor, log_std_p: Tensor, mean_q: Tensor, log_std_q: Tensor) -> Tensor:
    return DiagonalGaussian(mean_q, log_std_q).kl_from(DiagonalGaussian(mean_p, log_std_p))


def make_policy(sizes: dict[str, int], cfg: PPOConfig, *, bf16: bool = False) -> ActorCritic:
    env = EnvSpec(1, sizes, Box(ACTIONS), 1)
    policy = PPO(cfg, env, device=torch.device("cpu"), seed=0, max_iterations=1).policy
    policy.reduced = torch.bfloat16 if bf16 else None
    return policy


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gaussians(*batch: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = generator(seed)
    mean = torch.randn(*batch, ACTIONS, generator=g)
    return mean, 0.5 * torch.randn(*batch, ACTIONS, generator=g) - 0.5


def torch_gaussian(mean: Tensor, log_std: Tensor) -> Independent:
    return Independent(Normal(mean.double(), log_std.double().exp()), 1)


def test_gaussian_log_prob_and_entropy_equal_torch() -> None:
    mean, log_std = gaussians(7, 5)
    action = mean + 2.0 * torch.randn(7, 5, ACTIONS, generator=generator(1))
    theirs = torch_gaussian(mean, log_std)
    ours = DiagonalGaussian(mean, log_std).log_prob(action)
    torch.testing.assert_close(ours.double(), theirs.log_prob(action.double()), rtol=1e-5, atol=1e-5)
    entropy = DiagonalGaussian(mean, log_std).entropy().double()
    torch.testing.assert_close(entropy, theirs.entropy(), rtol=1e-5, atol=1e-5)


def test_gaussian_kl_equals_torch() -> None:
    p, q = gaussians(50, seed=0), gaussians(50, seed=1)
    ours = gaussian_kl(*p, *q).double()
    torch.testing.assert_close(ours, kl_divergence(torch_gaussian(*p), torch_gaussian(*q)), rtol=1e-5, atol=1e-5)
    assert (ours > 0).all()


def test_kl_is_zero_for_equal_and_accurate_for_near_policies() -> None:
    mean, log_std = gaussians(50)
    assert (gaussian_kl(mean, log_std, mean, log_std) == 0).all()
    near = torch.full_like(log_std, 0.0) + 1e-3  # KL of a scale: e^(2d)/2 - 1/2 - d = d^2 + O(d^3)
    kl = gaussian_kl(mean, near, mean, torch.zeros_like(near))
    torch.testing.assert_close(kl, torch.full_like(kl, ACTIONS * 1e-6), rtol=5e-3, atol=0.0)


NETWORKS: dict[str, dict[str, Any]] = {
    "shared": {},
    "separate": {"separate": True},
    "asymmetric": {"critic": True},
    "state-dependent std": {"state_dependent_std": True},
    "lstm": {"rnn": "lstm", "rnn_layers": 2},
    "gru": {"rnn": "gru"},
    "lstm separate": {"rnn": "lstm", "separate": True},
    "gru asymmetric": {"rnn": "gru", "critic": True},
}


def make(name: str = "shared", seed: int = 0, bf16: bool = False, **ppo: Any) -> ActorCritic:
    network = dict(NETWORKS[name])
    sizes = {"policy": 5}
    if network.pop("critic", False):
        sizes["critic"] = 7
    network |= ppo.pop("network", {})
    torch.manual_seed(seed)
    policy = make_policy(sizes, ppo_config(network, **ppo), bf16=bf16)
    with torch.no_grad():  # large enough for errors to show
        policy.head.mean.weight.mul_(50.0)
        if policy.head.log_std_of_state is not None:
            policy.head.log_std_of_state.weight.normal_(std=0.3)
    return policy


def observe(policy: ActorCritic, *batch: int, seed: int = 0) -> dict[str, Tensor]:
    g = generator(seed)
    return {
        group: 3.0 + 2.0 * torch.randn(*batch, size, generator=g)
        for group, size in (("policy", 5), ("critic", 7))
        if group in ("policy", policy.critic_group)
    }


@pytest.mark.parametrize("name", NETWORKS)
def test_policy_shapes_and_sampling(name: str) -> None:
    policy = make(name)
    obs, hidden = observe(policy, 6), policy.initial_state(6)
    noise = torch.randn(6, ACTIONS, generator=generator(2))
    sample = policy.sample(obs, hidden, noise)
    assert sample.action.shape == (6, ACTIONS)
    assert all(parameter.shape == (6, ACTIONS) for parameter in sample.distribution.parameters)
    assert sample.value.shape == (6,)
    torch.testing.assert_close(sample.action, sample.distribution.mean + sample.distribution.log_std.exp() * noise)
    action, after = policy.act(obs, hidden, deterministic=True)
    assert torch.equal(action, sample.distribution.mean)
    assert all(torch.equal(a, b) for a, b in zip(after, sample.hidden, strict=True))
    torch.manual_seed(0)
    explored, _ = policy.act(obs, hidden, deterministic=False)
    torch.manual_seed(0)
    expected = sample.distribution.sample(torch.randn(6, ACTIONS))
    torch.testing.assert_close(explored, expected)
    assert not sample.action.requires_grad
    assert torch.equal(policy.value(obs, hidden), sample.value)
    assert [h.shape for h in sample.hidden] == [h.shape for h in hidden]


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_reach_every_parameter(name: str) -> None:
    policy = make(name)
    inputs = policy.normalize(observe(policy, 4, 6))
    is_first = torch.zeros(4, 6, dtype=torch.bool)
    action = torch.randn(4, 6, ACTIONS, generator=generator())
    now = policy.evaluate(inputs, action, policy.initial_state(6), is_first)
    (now.log_prob.sum() + now.value.sum()).backward()
    for parameter_name, parameter in policy.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.abs().sum() > 0, parameter_name


def test_actor_and_critic_see_only_their_groups() -> None:
    def touched(policy: ActorCritic, output: Tensor, inputs: dict[str, Tensor]) -> set[str]:
        grads = torch.autograd.grad(output.sum(), list(inputs.values()), retain_graph=True, allow_unused=True)
        return {g for g, grad in zip(inputs, grads, strict=True) if grad is not None}

    policy = make("asymmetric")
    inputs = {g: o[None].requires_grad_() for g, o in observe(policy, 4).items()}
    distribution, value, _ = policy(inputs)
    assert touched(policy, distribution.mean, inputs) == {"policy"}
    assert touched(policy, value, inputs) == {"critic"}

    shared, separate = make("shared"), make("separate")
    assert shared.critic is None and separate.critic is not None
    (separate(separate.normalize(observe(separate, 1, 4)))[1].sum()).backward()
    assert all(p.grad is None for p in separate.actor.parameters())
    (shared(shared.normalize(observe(shared, 1, 4)))[1].sum()).backward()
    assert all(p.grad is not None for p in shared.actor.parameters())


def test_unused_observation_group_is_ignored() -> None:
    policy = make_policy({"policy": 5, "image": 9}, ppo_config())
    obs = observe(policy, 4)
    assert set(policy.normalize(obs | {"image": torch.full((4, 9), torch.nan)})) == {"policy"}
    assert set(policy.obs_norm) == {"policy"}


def test_state_dependent_std() -> None:
    policy = make("state-dependent std")
    a, b = (policy(policy.normalize(observe(policy, 1, 4, seed=s)))[0].log_std for s in (0, 1))
    assert not torch.equal(a, b)
    assert policy.head.log_std is None
    start = make_policy({"policy": 5}, ppo_config({"state_dependent_std": True, "log_std_init": -0.7}))
    log_std = start(start.normalize(observe(start, 1, 4)))[0].log_std
    torch.testing.assert_close(log_std, torch.full_like(log_std, -0.7))


@pytest.mark.parametrize("state_dependent", [False, True])
def test_log_std_is_clamped(state_dependent: bool) -> None:
    network = {"state_dependent_std": state_dependent, "log_std_min": -2.0, "log_std_max": 1.0}
    policy = make(network=network)
    tensor = policy.head.log_std_of_state.bias if policy.head.log_std_of_state is not None else policy.head.log_std
    assert tensor is not None
    for written, expected in ((-9.0, -2.0), (9.0, 1.0)):
        with torch.no_grad():
            tensor.fill_(written)
            if policy.head.log_std_of_state is not None:
                policy.head.log_std_of_state.weight.zero_()
        policy.head.clamp_()
        sample = policy.sample(observe(policy, 4), (), torch.ones(4, ACTIONS))
        assert (sample.distribution.log_std == expected).all()
        mean, log_std = sample.distribution.parameters
        torch.testing.assert_close(sample.action - mean, log_std.exp())


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_equal_torch(name: str) -> None:
    policy = make(network={"activation": name})
    x = torch.randn(11, generator=generator())
    function = getattr(nn.functional, name)
    layers = [m for m in policy.actor.layers if not isinstance(m, nn.Linear)]
    assert len(layers) == 2
    for layer in layers:  # value and gradient; the layer may work in place
        a, b = (x.clone().requires_grad_() for _ in range(2))
        ours, theirs = layer(1.0 * a), function(b)
        torch.testing.assert_close(ours, theirs)
        ours.square().sum().backward()
        theirs.square().sum().backward()
        torch.testing.assert_close(a.grad, b.grad)
    assert torch.isfinite(policy.sample(observe(policy, 3), (), torch.zeros(3, ACTIONS)).distribution.mean).all()


def test_initial_policy_mean_is_near_zero() -> None:
    policy = make_policy({"policy": 5}, ppo_config())
    sample = policy.sample(observe(policy, 100), (), torch.zeros(100, ACTIONS))
    assert sample.distribution.mean.abs().max() < 0.05


@pytest.mark.parametrize("name", [n for n in NETWORKS if "lstm" in n or "gru" in n])
@pytest.mark.parametrize("start", [0, 3])
def test_acting_step_by_step_equals_evaluating_sequences(name: str, start: int) -> None:
    policy = make(name)
    T, N = 9, 6
    g = generator(3)
    obs = observe(policy, T, N)
    action = torch.randn(T, N, ACTIONS, generator=g)
    is_first = torch.rand(T, N, generator=g) < 0.3
    is_first[0] = True
    is_first[start] = torch.arange(N) % 2 == 0  # sequences begin inside and at the start of episodes

    hidden = policy.initial_state(N)
    acted, states = [], []
    for t in range(T):
        hidden = tuple(h.masked_fill(is_first[t][None, :, None], 0.0) for h in hidden)
        states.append(hidden)
        noise = torch.zeros(N, ACTIONS)
        sample = policy.sample({k: v[t] for k, v in obs.items()}, hidden, noise)
        value = policy.value({k: v[t] for k, v in obs.items()}, hidden)
        assert torch.equal(value, sample.value)
        log_prob = sample.distribution.log_prob(action[t])
        acted.append((sample.distribution.mean, log_prob, sample.value))
        hidden = sample.hidden

    inputs = {k: v[start:] for k, v in policy.normalize(obs).items()}
    now = policy.evaluate(inputs, action[start:], states[start], is_first[start:])
    mean, log_prob, value = (torch.stack(x)[start:] for x in zip(*acted, strict=True))
    torch.testing.assert_close(now.distribution.mean, mean, rtol=0.0, atol=1e-6)
    torch.testing.assert_close(now.value, value, rtol=0.0, atol=1e-6)
    torch.testing.assert_close(now.log_prob, log_prob, rtol=1e-6, atol=1e-6)

    # the state matters: without resets the result differs
    other = policy.evaluate(inputs, action[start:], states[start], torch.zeros_like(is_first[start:]))
    assert (other.distribution.mean - mean).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["shared", "separate", "lstm"])
def test_updating_value_statistics_keeps_predictions(name: str) -> None:
    policy = make(name)
    obs, hidden = observe(policy, 64), policy.initial_state(64)
    g = generator(4)
    # batches of different scales with some masked rows
    for scale, offset in ((100.0, -50.0), (1.0, 0.0), (0.1, 300.0), (1e3, 1e3)):
        before = policy.denormalize_value(policy.value(obs, hidden))
        statistics = policy.value_norm.mean.clone()
        returns = offset + scale * torch.randn(500, generator=g)
        where = torch.rand(500, generator=g) < 0.8
        returns = torch.where(where, returns, torch.nan)
        policy.update_value_norm(returns, where)
        assert not torch.equal(statistics, policy.value_norm.mean)
        after = policy.denormalize_value(policy.value(obs, hidden))
        size = before.abs().max().item() + policy.value_norm.mean.abs().item()
        torch.testing.assert_close(after, before, rtol=0.0, atol=2e-6 * size)
    returns = torch.randn(10, generator=g)
    torch.testing.assert_close(policy.denormalize_value(policy.normalize_value(returns)), returns, rtol=0.0, atol=1e-3)


def test_without_value_statistics_values_are_returns() -> None:
    policy = make(normalize_value=False)
    x = torch.randn(5, generator=generator())
    weights = policy.value_head.weight.clone()
    policy.update_value_norm(100.0 * x, torch.ones(5, dtype=torch.bool))
    assert torch.equal(policy.denormalize_value(x), x)
    assert torch.equal(policy.normalize_value(x), x)
    assert torch.equal(policy.value_head.weight, weights)


def test_without_obs_statistics_observations_are_unchanged() -> None:
    policy = make(normalize_obs=False)
    obs = observe(policy, 4)
    assert torch.equal(policy.normalize(obs)["policy"], obs["policy"])
    assert len(policy.obs_norm) == 0


def test_normalised_observations_are_clipped() -> None:
    policy = make(clip_obs=2.0)
    assert policy.normalize({"policy": torch.full((1, 5), 99.0)})["policy"].tolist() == [[2.0] * 5]


@pytest.mark.parametrize("name", ["shared", "asymmetric", "state-dependent std", "lstm", "gru"])
def test_trunk_runs_in_bf16_and_heads_in_fp32(name: str) -> None:
    policy, exact = make(name, bf16=True), make(name)
    features: list[Tensor] = []
    policy.actor.layers.register_forward_hook(lambda module, args, output: features.append(output))
    obs, hidden = observe(policy, 6), policy.initial_state(6)
    noise = torch.randn(6, ACTIONS, generator=generator())
    sample = policy.sample(obs, hidden, noise)
    for tensor in (sample.action, *sample.distribution.parameters, sample.value):
        assert tensor.dtype == torch.float32
    assert all(h.dtype == torch.float32 for h in sample.hidden)
    assert features[0].dtype == torch.bfloat16
    # heads: exactly the float32 result for these features
    expected = policy.head.mean(features[0].float())
    torch.testing.assert_close(sample.distribution.mean, expected, rtol=1e-6, atol=1e-6)
    assert not torch.equal(sample.distribution.mean, sample.distribution.mean.bfloat16().float())
    reference = exact.sample(obs, hidden, noise)
    assert not torch.equal(sample.distribution.mean, reference.distribution.mean)
    torch.testing.assert_close(sample.distribution.mean, reference.distribution.mean, rtol=0.05, atol=0.05)
    # parameters and gradients stay float32
    now = policy.evaluate(policy.normalize({k: v[None] for k, v in obs.items()}), sample.action[None], hidden)
    assert now.log_prob.dtype == now.value.dtype == now.entropy.dtype == torch.float32
    (now.log_prob.sum() + now.value.sum()).backward()
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in policy.parameters())


class NormedMLP(MLP):
    def __init__(self, size: int, cfg: Any) -> None:
        super().__init__(size, cfg)
        self.insert(1, nn.LayerNorm(cfg.hidden[0]))
        self.insert(2, nn.Linear(cfg.hidden[0], cfg.hidden[0], bias=False))


@pytest.mark.parametrize("activation", ["elu", "relu"])
@pytest.mark.parametrize("kind", [MLP, NormedMLP])
def test_cast_together_equals_autocast(kind: type[MLP], activation: str) -> None:
    layers = kind(5, ppo_config({"activation": activation}).network)
    x = torch.randn(7, 5, generator=generator())
    found = []
    for function in (layers, lambda x: layers.cast_together(x, torch.bfloat16)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            features = function(x)
        found.append((features, *torch.autograd.grad(features.float().square().sum(), list(layers.parameters()))))
    for name, a, b in zip(["", *dict(layers.named_parameters())], *found, strict=True):
        assert a.dtype == b.dtype
        if name.endswith("bias"):  # sums in another order
            torch.testing.assert_close(a, b, rtol=2.0**-7, atol=0.0)
        else:
            assert torch.equal(a, b)
