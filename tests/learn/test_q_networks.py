"""Critic ensembles, projected distributions and the masked optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from gpusim_rl.learn.ensemble import EnsembleLinear, EnsembleNorm, shared_features
from gpusim_rl.learn.networks import ACTIVATIONS
from gpusim_rl.learn.optimizer import MaskedAdamW
from gpusim_rl.learn.q_networks import Critic, project
from helpers.off_policy import C51, off_policy_config


def test_projection_gives_published_losses() -> None:
    # rlax's test vectors of categorical Q-learning: cross-entropy of the projected target with the logits
    support = torch.tensor([0.5, 1.0, 1.5])
    logits = torch.tensor([[0.0, 9, 0], [9, 0, 9], [0, 9, 0], [9, 9, 0], [9, 0, 9]])
    following = torch.tensor([[0.0, 0, 9], [1, 1, 1], [0, 0, 9], [1, 1, 1], [0, 9, 9]])
    reward = torch.tensor([0.5, 0.0, 0.5, 0.8, -0.1])
    discount = torch.tensor([0.8, 1.0, 0.8, 0.0, 1.0])
    target = project(following.softmax(dim=-1), reward[:, None] + discount[:, None] * support, support)
    loss = -(target * logits.log_softmax(dim=-1)).sum(dim=-1)
    assert loss.tolist() == pytest.approx([8.998915, 3.693209, 8.998915, 0.693209, 5.192931], abs=1e-5)


def test_projection_preserves_probability_mass() -> None:
    support = torch.linspace(-2.0, 2.0, 5)
    returns = torch.tensor([[-2.0, -1.0, 0.25, 2.0, 7.0], [-9.0, 1.5, 1.0, 0.0, 2.0]])
    moved = project(torch.full((2, 5), 0.2), returns, support)
    assert torch.allclose(moved.sum(dim=1), torch.ones(2))
    assert torch.allclose(moved[0], torch.tensor([0.2, 0.2, 0.15, 0.05, 0.4]), atol=1e-6)
    assert torch.allclose(moved @ support, returns.clamp(-2.0, 2.0).mean(dim=1), atol=1e-6)


@pytest.mark.parametrize("layer_norm", [True, False])
@pytest.mark.parametrize("atoms", [None, 11])
def test_ensemble_members_are_independent_critics(layer_norm: bool, atoms: int | None) -> None:
    torch.manual_seed(0)
    net = off_policy_config("sac", {"network": {**C51, "atoms": atoms, "layer_norm": layer_norm, "critics": 3}}).network
    critic = Critic(5, 2, net, "sac.network")
    obs, action = torch.randn(7, 5), torch.randn(7, 2)
    got = critic(obs, action, reduced=None)
    assert got.shape == (3, 7, atoms or 1)
    layers: Any = [*critic.features.children(), critic.head]
    for member in range(3):
        x = torch.cat([obs, action], dim=1)
        for layer in layers:
            if isinstance(layer, EnsembleLinear):
                x = x @ layer.weight[member] + layer.bias[member]
            elif isinstance(layer, EnsembleNorm):
                x = functional.layer_norm(x, x.shape[1:]) * layer.scale[member] + layer.offset[member]
            else:
                x = layer(x)
        assert torch.allclose(got[member], x, atol=1e-5)
    assert not torch.allclose(got[0], got[1])


class CustomNetwork(nn.Module):
    def __init__(self, size: int, cfg: Any) -> None:
        super().__init__()
        self.out_size = cfg.hidden[-1]
        self.layer = nn.Linear(size, self.out_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def test_custom_network_builds_critics() -> None:
    own = {"_target_": f"{__name__}.CustomNetwork", "hidden": [6], "critic_hidden": [9]}
    critic = Critic(5, 2, off_policy_config("td3", {"network": own}).network, "td3.network")
    got = critic(torch.randn(4, 5), torch.randn(4, 2), reduced=None)
    assert got.shape == (2, 4, 1) and not torch.allclose(got[0], got[1])
    assert [layer.out_size for layer in critic.features.children()] == [9, 9]


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_masked_adamw_equals_adamw_and_skips_held_steps(decay: float) -> None:
    torch.manual_seed(0)
    kernel = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)  # gradients have another memory format
    ours, theirs = ([nn.Parameter(x.clone()) for x in (torch.ones(4, 3), torch.ones(3), kernel)] for _ in range(2))
    masked = MaskedAdamW(ours, 0.01, weight_decay=decay, max_norm=1.0)
    plain = torch.optim.AdamW(theirs, lr=0.01, weight_decay=decay)
    for number in range(12):
        gradients = [torch.randn(p.shape) for p in ours]
        hold = number % 3 == 1
        broken = number % 3 == 2
        given = [g * torch.nan if broken else g.clone() for g in gradients]
        norm = masked.set_gradients(given)
        masked.masked_step(norm, torch.tensor(0.0 if hold else torch.inf))
        assert norm.isnan().item() == broken
        if hold or broken:
            continue
        total = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
        assert norm.item() == pytest.approx(total.item(), rel=1e-5)
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = gradient / total.clamp(min=1.0)
        plain.step()
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def perturbed_critic(**network: Any) -> Critic:
    net = off_policy_config("sac", {"network": {"critic_hidden": [16, 12], **network}}).network
    critic = Critic(5, 2, net, "sac.network")
    for parameter in critic.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return critic


def features_together(
    critic: Critic, x: Tensor, dtype: torch.dtype = torch.bfloat16, of: Callable[[Tensor], Tensor] = torch.as_tensor
) -> Tensor:
    return shared_features(
        [*critic.features.children()], dtype, x[None], [of(w) for w in critic.features.parameters()]
    )[0]


@pytest.mark.parametrize("layer_norm", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_critic_features_together_equal_autograd(
    dtype: torch.dtype, error: float, activation: str, layer_norm: bool
) -> None:
    torch.manual_seed(0)
    critic = perturbed_critic(activation=activation, layer_norm=layer_norm)
    x, found = torch.randn(64, 7, requires_grad=True), {}
    functions = {
        "plain": lambda: critic._features(x, reduced=None),
        "together": lambda: features_together(critic, x, dtype),
        "fixed": lambda: features_together(critic, x, dtype, Tensor.detach),
    }
    for name, function in functions.items():
        features = function()
        trained = [] if name == "fixed" else list(critic.features.parameters())
        found[name] = [features, *torch.autograd.grad(features.sin().sum(), [x, *trained])]
    for a, b in zip(found["plain"], found["together"], strict=True):
        assert b.dtype == torch.float32 and (a - b).norm() < error * a.norm()
    assert all(torch.equal(a, b) for a, b in zip(found["together"], found["fixed"], strict=False))


def test_critics_with_targets_equal_separate_evaluations() -> None:
    critic, target = perturbed_critic(), perturbed_critic()
    seen, after = ([torch.randn(64, 5), torch.randn(64, 2)] for _ in range(2))
    first, *others = critic.parameters()
    first.requires_grad_(False)
    outputs, following = critic.with_target(target, seen, after, torch.bfloat16)
    first.requires_grad_(True)
    alone, alone_after = (
        each.head(features_together(each, torch.cat(x, dim=1))) for each, x in ((critic, seen), (target, after))
    )
    assert torch.equal(outputs, alone) and torch.equal(following, alone_after)
    both = (torch.autograd.grad(q.square().sum(), others) for q in (outputs, alone))
    assert all(map(torch.equal, *both))


def test_features_in_16_bits_reject_second_derivatives() -> None:
    x, critic = torch.randn(4, 7, requires_grad=True), perturbed_critic()
    outputs = critic.head(features_together(critic, x))
    [gradient] = torch.autograd.grad(outputs.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_ensemble_layer_with_one_output_equals_matmul() -> None:
    layer, x = EnsembleLinear(3, 7, 1), torch.randn(3, 5, 7)
    assert torch.allclose(layer(x), layer.bias + x @ layer.weight, atol=1e-6)
