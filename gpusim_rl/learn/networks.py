"""Actor and critic networks of on-policy algorithms."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor, nn
from torch.nn import functional

from gpusim_rl.errors import ConfigError
from gpusim_rl.learn.algorithm import EnvSpec, Hidden, Observation, Policy
from gpusim_rl.learn.collective import ALONE, Collective
from gpusim_rl.learn.distributions import CategoricalHead, Distribution, GaussianHead
from gpusim_rl.learn.encoders import Encoder, FrameStack, make_own
from gpusim_rl.learn.normalize import RunningNormalizer
from gpusim_rl.settings.schema import (
    BCConfig,
    CriticConfig,
    DiscriminatorConfig,
    DistillConfig,
    NetworkConfig,
    OnPolicyConfig,
    RNDConfig,
)
from gpusim_rl.spaces import Box

Settings: TypeAlias = OnPolicyConfig | DistillConfig | BCConfig
"""Settings of algorithms with an `ActorCritic`."""
# in place where the output determines the gradient: less memory traffic
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "elu": partial(nn.ELU, inplace=True),
    "relu": partial(nn.ReLU, inplace=True),
    "tanh": nn.Tanh,
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "selu": partial(nn.SELU, inplace=True),
}


@dataclass(slots=True)
class SampledActions:
    """Sampled actions of a batch of envs."""

    action: Shaped[Tensor, "batch actions"]
    """Unclipped actions, as log-probabilities need them; indices if discrete."""
    distribution: Distribution
    value: Float[Tensor, " batch"]
    """Value at the network's scale."""
    hidden: Hidden


@dataclass(slots=True)
class EvaluatedActions:
    """Stored actions, evaluated by the current policy."""

    log_prob: Float[Tensor, "*batch"]
    entropy: Float[Tensor, "*batch"]
    distribution: Distribution
    value: Float[Tensor, "*batch"]


class Features(Protocol):
    """Module that maps [batch, size] to [batch, out_size], built by a user's `network._target_(size, cfg)`."""

    out_size: int


class MLP(nn.Sequential):
    """Multi-layer perceptron; an activation follows every layer."""

    def __init__(self, size: int, cfg: NetworkConfig | CriticConfig | RNDConfig | DiscriminatorConfig) -> None:
        layers: list[nn.Module] = []
        for width in cfg.hidden:
            layers += [nn.Linear(size, width), ACTIVATIONS[cfg.activation]()]
            size = width
        super().__init__(*layers)
        self.out_size = size

    def forward(self, input: Float[Tensor, "*batch size"]) -> Float[Tensor, "*batch out"]:
        """Return features."""
        if input.device.type == "cuda" and torch.is_autocast_enabled("cuda"):
            return self.cast_together(input, torch.get_autocast_dtype("cuda"))
        return super().forward(input)

    def cast_together(self, x: Float[Tensor, "*batch size"], dtype: torch.dtype) -> Float[Tensor, "*batch out"]:
        """Return the same bits as with autocast, but cast all weights in one kernel and all gradients in another."""
        layers = [layer for layer in self if isinstance(layer, nn.Linear) and layer.bias is not None]
        cast = iter(cast_all([weight for layer in layers for weight in (layer.weight, layer.bias)], dtype))
        ones = x.new_ones(1, x.shape[:-1].numel(), dtype=dtype) if torch.is_grad_enabled() else x
        done = False  # whether the last kernel included this activation
        for layer, following in itertools.pairwise([*self, nn.Identity()]):
            if layer in layers:  # a subclass may have others
                done = isinstance(following, nn.ReLU) and x.ndim == 2
                x = _Linear.apply(done, ones, x.to(dtype), next(cast), next(cast))  # type: ignore[reportArgumentType]
            else:
                x, done = x if done else layer(x), False
        return x


class _Linear(torch.autograd.Function):
    """Linear layer, optionally with ReLU, in a kernel; the bias gradient is a product with ones, faster than a sum."""

    @staticmethod
    def forward(ctx: Any, relu: bool, ones: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:  # type: ignore[reportIncompatibleMethodOverride]
        y = torch._addmm_activation(bias, x, weight.mT) if relu else functional.linear(x, weight, bias)  # type: ignore[reportPrivateImportUsage]
        ctx.save_for_backward(ones, x, weight, y if relu else None)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[reportIncompatibleMethodOverride]
        ones, x, weight, y = ctx.saved_tensors
        [gradient] = gradients
        gradient = gradient if y is None else torch.ops.aten.threshold_backward(gradient, y, 0.0)
        rows = gradient.flatten(0, -2)
        inputs = gradient @ weight if ctx.needs_input_grad[2] else None
        return None, None, inputs, rows.mT @ x.flatten(0, -2), (ones @ rows)[0]


def cast_all(tensors: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Cast tensors in one kernel, and their gradients in another."""
    return _Cast.apply(dtype, *tensors)  # type: ignore[reportReturnType]


class _Cast(torch.autograd.Function):
    """Cast of several tensors in one kernel, and of their gradients in another."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:  # type: ignore[reportIncompatibleMethodOverride]
        ctx.dtype = tensors[0].dtype
        return copies(tensors, dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[reportIncompatibleMethodOverride]
        return None, *copies(gradients, ctx.dtype)


def copies(tensors: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Cast tensors in one kernel."""
    found = [torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format) for x in tensors]
    torch._foreach_copy_(found, tensors)  # type: ignore[reportPrivateImportUsage]
    return tuple(found)


def make_features(size: int, cfg: NetworkConfig | CriticConfig, key: str = "network") -> nn.Module:
    """Build an MLP or the user-defined network of section `key`; raise ConfigError if the output shape is wrong."""
    if cfg._target_ is None:
        return MLP(size, cfg)
    module = make_own(cfg._target_, key, "my_networks.Residual", {"size": size, "cfg": cfg})
    expected = [2, module.out_size]
    shape: Any = expected
    with suppress(Exception), torch.no_grad(), torch.random.fork_rng(devices=[]):  # the network may need a GPU
        features = copy.deepcopy(module).eval()(torch.zeros(2, size))
        shape = list(features.shape) if isinstance(features, Tensor) else type(features).__name__
    if shape != expected:
        problem = f"wrong output for an input of shape {[2, size]}"
        where = f"{key}._target_={cfg._target_}"
        raise ConfigError(problem, key=where, expected=f"[batch, out_size] = {expected}", got=shape)
    return module


class Trunk(nn.Module):
    """Optional LSTM or GRU, then an MLP or user-defined network."""

    def __init__(self, size: int, net: NetworkConfig, key: str = "network") -> None:
        super().__init__()
        self.rnn: nn.LSTM | nn.GRU | None = None
        if net.rnn is not None:
            kind = nn.LSTM if net.rnn == "lstm" else nn.GRU
            self.rnn = kind(size, net.rnn_size, net.rnn_layers)
            size = net.rnn_size
        self.layers = make_features(size, net, key)
        self.out_size: int = self.layers.out_size  # type: ignore[assignment]

    @property
    def num_states(self) -> int:
        """Number of tensors in the recurrent state."""
        return 0 if self.rnn is None else 2 if isinstance(self.rnn, nn.LSTM) else 1

    def initial_state(self, batch: int) -> Hidden:
        """Return a zero recurrent state."""
        if self.rnn is None:
            return ()
        device = next(self.rnn.parameters()).device
        shape = (self.rnn.num_layers, batch, self.rnn.hidden_size)
        return tuple(torch.zeros(shape, device=device) for _ in range(self.num_states))

    def forward(
        self,
        x: Float[Tensor, "*time batch size"],
        hidden: Hidden,
        is_first: Bool[Tensor, "time batch"] | None,
        *,
        reduced: torch.dtype | None,
    ) -> tuple[Float[Tensor, "*time batch out"], Hidden]:
        """Run a sequence; `is_first` resets the state. Without a recurrent layer, the time dimension is optional.

        The recurrent layer is float32: its state accumulates rounding errors, and many CPUs lack a bf16 kernel.
        """
        if self.rnn is not None:
            outputs = []
            for t in range(x.shape[0]):
                if is_first is not None:
                    keep = (~is_first[t])[None, :, None]
                    hidden = tuple(h * keep for h in hidden)
                state = hidden if isinstance(self.rnn, nn.LSTM) else hidden[0]
                output, state = self.rnn(x[t : t + 1], state)
                hidden = state if isinstance(state, tuple) else (state,)
                outputs.append(output)
            x = torch.cat(outputs)
        # one batch dimension: with two, layers return views, for which in-place activations copy gradients
        with torch.autocast(x.device.type, dtype=reduced) if reduced else nullcontext():
            features = self.layers(x if x.ndim == 2 else x.flatten(0, 1)).float()
        return features if x.ndim == 2 else features.unflatten(0, x.shape[:2]), hidden


class ActorCritic(Policy):
    """Policy and value function with shared or separate trunks.

    The `policy` group feeds the actor; a `critic` group feeds a separate critic (Pinto et al. 2017, arXiv 1710.06542).
    """

    def __init__(self, cfg: Settings, env: EnvSpec, section: str = "algorithm") -> None:
        super().__init__()
        obs_sizes, net, key = env.obs_sizes, cfg.network, f"{section}.network"
        self.critic_group = "critic" if "critic" in obs_sizes else "policy"
        self.groups = sorted({"policy", self.critic_group}, reverse=True)
        normalized = sorted(self.groups) if cfg.normalize_obs else []
        self.obs_norm = nn.ModuleDict({g: RunningNormalizer(obs_sizes[g], clip=cfg.clip_obs) for g in normalized})
        self.value_norm = RunningNormalizer(1) if isinstance(cfg, OnPolicyConfig) and cfg.normalize_value else None

        separate = net.separate or self.critic_group == "critic"
        self.critic_sees_images = bool(env.images) and self.critic_group == "policy"
        self.images = FrameStack(env.images, net.encoder.frames)
        self.groups += sorted(env.images)
        self.encoder, self.critic_encoder, features = None, None, 0
        if env.images:
            self.encoder = Encoder(self.images.shapes, net.encoder, key)
            features = self.encoder.out_size
            if separate and self.critic_sees_images:
                self.critic_encoder = Encoder(self.images.shapes, net.encoder, key)
        self.actor = Trunk(obs_sizes["policy"] + features, net, key)
        size = obs_sizes[self.critic_group] + (features if self.critic_sees_images else 0)
        self.critic = Trunk(size, net, key) if separate else None
        space, size = env.action_space, self.actor.out_size
        self.head = GaussianHead(size, space, net) if isinstance(space, Box) else CategoricalHead(size, space)
        self.value_head = nn.Linear((self.critic or self.actor).out_size, 1)

    @property
    def recurrent(self) -> bool:
        """True if the policy carries state between steps: an RNN's state or older frames of the stacks."""
        return self.actor.rnn is not None or self.images.num_states > 0

    def initial_state(self, batch: int) -> Hidden:
        """Return a zero state, in the order older frames, actor, separate critic."""
        return self.actor_state(batch) + (self.critic.initial_state(batch) if self.critic else ())

    def actor_state(self, batch: int) -> Hidden:
        """Return the actor's zero state, including older frames."""
        return self.images.initial_state(batch, self.value_head.weight.device) + self.actor.initial_state(batch)

    def act_without_critic(self, obs: Observation, hidden: Hidden) -> tuple[Tensor, Hidden]:
        """Return the most likely actions, from the actor alone."""
        numbers = obs["policy"]
        numbers = self.obs_norm["policy"](numbers) if "policy" in self.obs_norm else numbers
        seen, frames = self.images({group: obs[group][None] for group in self.images.shapes}, hidden, None)
        observed = self._with_images(numbers[None], self.encoder, seen)
        features, state = self.actor(observed, hidden[len(frames) :], None, reduced=self.mlp_reduced)
        return self.head(features[0]).mode, frames + state

    def normalize(self, obs: Observation) -> dict[str, Tensor]:
        """Normalise observations by group, if configured."""
        return {g: self.obs_norm[g](obs[g]) if g in self.obs_norm else obs[g] for g in self.groups}

    def inputs(self, obs: Observation) -> dict[str, Tensor]:
        """Return the normalised observations that minibatches gather."""
        inputs = self.normalize(obs)
        if self.mlp_reduced and not self.recurrent:
            # the first layer rounds to 16 bits anyway; rounding here halves the data that every epoch gathers
            inputs = {name: x.to(self.mlp_reduced) for name, x in inputs.items()}
        return inputs

    def forward(
        self, inputs: Mapping[str, Tensor], hidden: Hidden = (), is_first: Tensor | None = None
    ) -> tuple[Distribution, Tensor, Hidden]:
        """Return distribution, value and state for normalised inputs; the time axis is optional without an RNN."""
        seen, frames = self.images(inputs, hidden, is_first)
        hidden = hidden[len(frames) :]
        split = self.actor.num_states
        observed = self._with_images(inputs["policy"], self.encoder, seen)
        features, actor_state = self.actor(observed, hidden[:split], is_first, reduced=self.mlp_reduced)
        critic_state: Hidden = ()
        critic_features = features
        if self.critic is not None:
            if self.critic_group == "critic":
                observed = inputs["critic"]
            elif self.critic_encoder is not None:
                observed = self._with_images(inputs["policy"], self.critic_encoder, seen)
            critic_features, critic_state = self.critic(observed, hidden[split:], is_first, reduced=self.mlp_reduced)
        distribution = self.head(features)
        return distribution, self.value_head(critic_features).squeeze(-1), frames + actor_state + critic_state

    def _with_images(self, numbers: Tensor, encoder: Encoder | None, images: Mapping[str, Tensor]) -> Tensor:
        if encoder is None:
            return numbers
        return torch.cat([numbers, encoder(images, reduced=self.reduced).to(numbers.dtype)], dim=-1)

    def _one_step(self, obs: Observation, hidden: Hidden) -> tuple[Distribution, Tensor, Hidden]:
        inputs = self.normalize(obs)
        if not self.recurrent:
            return self(inputs)
        distribution, value, hidden = self({group: value[None] for group, value in inputs.items()}, hidden)
        return distribution[0], value[0], hidden

    @torch.no_grad()
    def sample(self, obs: Observation, hidden: Hidden, noise: Float[Tensor, "batch noise"]) -> SampledActions:
        """Sample actions for raw observations [batch, size]."""
        distribution, value, hidden = self._one_step(obs, hidden)
        return SampledActions(distribution.sample(noise), distribution, value, hidden)

    @torch.no_grad()
    def act(self, obs: Observation, hidden: Hidden, deterministic: bool = True) -> tuple[Tensor, Hidden]:
        """Return the most likely or sampled actions for raw observations [batch, size]."""
        distribution, value, hidden = self._one_step(obs, hidden)
        if deterministic:
            return distribution.mode, hidden
        noise = value.new_empty(len(value), self.head.num_noise)
        return distribution.sample(self.head.draw_(noise)), hidden

    @torch.no_grad()
    def value(self, obs: Observation, hidden: Hidden) -> Float[Tensor, " batch"]:
        """Return values of raw observations at the network's scale; images are optional if the critic ignores them."""
        if self.critic is None or not self.images.shapes or self.critic_sees_images:
            return self._one_step(obs, hidden)[1]
        state = hidden[len(hidden) - self.critic.num_states :]
        numbers = obs["critic"]
        numbers = self.obs_norm["critic"](numbers) if "critic" in self.obs_norm else numbers
        features, _ = self.critic(numbers[None], state, None, reduced=self.mlp_reduced)
        return self.value_head(features[0]).squeeze(-1)

    def evaluate(
        self,
        inputs: Mapping[str, Tensor],
        action: Float[Tensor, "time batch actions"],
        hidden: Hidden = (),
        is_first: Bool[Tensor, "time batch"] | None = None,
    ) -> EvaluatedActions:
        """Evaluate stored actions for normalised inputs [time, batch, size]."""
        distribution, value, _ = self(inputs, hidden, is_first)
        log_prob = distribution.log_prob(action)
        return EvaluatedActions(log_prob, distribution.entropy().expand_as(log_prob), distribution.per_sample(), value)

    def denormalize_value(self, value: Tensor) -> Tensor:
        """Convert a network value to the scale of returns."""
        return value if self.value_norm is None else self.value_norm.inverse(value[..., None])[..., 0]

    def normalize_value(self, value: Tensor) -> Tensor:
        """Convert a return to the network's scale."""
        return value if self.value_norm is None else self.value_norm(value[..., None])[..., 0]

    @torch.no_grad()
    def update_value_norm(
        self, returns: Float[Tensor, " batch"], where: Bool[Tensor, " batch"], collective: Collective = ALONE
    ) -> None:
        """Merge returns into the value statistics, preserving predictions (van Hasselt et al. 2016, 1602.07714)."""
        if self.value_norm is None:
            return
        norm, head = self.value_norm, self.value_head
        bias = norm.inverse(head.bias)
        head.weight.mul_(norm.scale)
        norm.update(returns[:, None], where, collective)
        head.bias.copy_(norm(bias))
        head.weight.div_(norm.scale)
